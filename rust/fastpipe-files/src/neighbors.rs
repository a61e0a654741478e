//! Reading several ranges of remote files with few requests, several at a time.

use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, Result};

use crate::file_set::Files;
use crate::progress::{Halt, LOOK_AFTER, OnProgress};

/// Bytes that one request may read. The advice of the stores is 8 to 16 MiB.
pub const REQUEST_BYTES: u64 = 8 << 20;

/// Number of threads that read ranges.
const THREADS: usize = 16;

/// A request may read a gap of at most a sixteenth of the bytes that are needed.
const GAP: u64 = 16;

/// Returns the range from the start of `first` to the end of `second` if one request should read both.
pub fn joined(first: ByteRange, second: ByteRange) -> Option<ByteRange> {
    let gap = second.offset.checked_sub(first.offset.checked_add(first.len)?)?;
    let len = first.len + gap + second.len;
    let fits = first.location == second.location && gap <= (first.len + second.len) / GAP && len <= REQUEST_BYTES;
    fits.then_some(ByteRange { len, ..first })
}

impl Files {
    /// Reads ranges of one file with one request. The ranges are in the sequence of the file.
    ///
    /// # Errors
    /// As for [`Files::read_until`].
    pub fn read_joined(
        &self,
        ranges: &[ByteRange],
        pool: &BufferPool,
        cancelled: &dyn Fn() -> bool,
    ) -> Result<Vec<Buffer>> {
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else {
            return Ok(Vec::new());
        };
        let len = (last.offset + last.len).saturating_sub(first.offset);
        let bytes = self.read_until(ByteRange { len, ..*first }, pool, cancelled)?;
        if let [_] = ranges {
            return Ok(vec![bytes]);
        }
        let part = |range: &ByteRange| {
            let found = range.offset.checked_sub(first.offset).and_then(|start| {
                let start = usize::try_from(start).ok()?;
                bytes.get(start..start.checked_add(usize::try_from(range.len).ok()?)?)
            });
            let found =
                found.ok_or_else(|| Error::new(ErrorKind::Internal, "ranges of a request aren't in sequence"))?;
            let mut part = pool.take(found.len())?;
            part.copy_from_slice(found);
            Ok(part)
        };
        let parts = ranges.iter().map(part).collect();
        pool.put(bytes);
        parts
    }

    /// Reads ranges of remote files, several at a time. Neighbors in `ranges` are read with one request.
    ///
    /// # Errors
    /// Any error of `on_progress`.
    pub(crate) fn read_many<E>(
        &self,
        ranges: &[ByteRange],
        pool: &BufferPool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<Result<Buffer>>, Halt<E>> {
        let requests = requests(ranges);
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        let found = Mutex::new(Vec::new());
        let work = || {
            while let Some(request) = requests.get(next.fetch_add(1, Ordering::Relaxed)) {
                let read = self.read_joined(request, pool, &|| stopped.load(Ordering::Relaxed));
                let read: Vec<Result<Buffer>> = match read {
                    Ok(parts) => parts.into_iter().map(Ok).collect(),
                    Err(error) => request.iter().map(|_| Err(error.clone())).collect(),
                };
                let at = request.as_ptr() as usize;
                found.lock().unwrap_or_else(PoisonError::into_inner).push((at, read));
            }
        };
        std::thread::scope(|scope| {
            let (done, ended) = channel::<()>();
            let spawn = |_| {
                let (work, done) = (&work, done.clone());
                let builder = std::thread::Builder::new().name("fastpipe-read".to_owned());
                let run = move || {
                    work();
                    drop(done);
                };
                builder.spawn_scoped(scope, run).ok()
            };
            if (0..THREADS.min(requests.len())).map_while(spawn).count() == 0 {
                work();
            }
            drop(done);
            while let Err(RecvTimeoutError::Timeout) = ended.recv_timeout(LOOK_AFTER) {
                if let Err(error) = on_progress(0) {
                    stopped.store(true, Ordering::Relaxed);
                    return Err(Halt::Interrupted(error));
                }
            }
            Ok(())
        })?;
        let mut found = found.into_inner().unwrap_or_else(PoisonError::into_inner);
        // Requests are parts of `ranges`, so their addresses have the same order.
        found.sort_unstable_by_key(|(at, _)| *at);
        Ok(found.into_iter().flat_map(|(_, read)| read).collect())
    }
}

/// Cuts ranges into parts that are read with one request each.
fn requests(ranges: &[ByteRange]) -> Vec<&[ByteRange]> {
    let mut all: Option<ByteRange> = None;
    let mut requests = Vec::new();
    let mut start = 0;
    for (i, &range) in ranges.iter().enumerate() {
        all = all.and_then(|all| joined(all, range));
        if all.is_none() {
            if i > start {
                requests.push(&ranges[start..i]);
            }
            (start, all) = (i, Some(range));
        }
    }
    if start < ranges.len() {
        requests.push(&ranges[start..]);
    }
    requests
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(location: u32, offset: u64, len: u64) -> ByteRange {
        ByteRange { location, offset, len }
    }

    #[test]
    fn near_ranges_of_a_file_are_joined() {
        let first = range(1, 100, 1000);
        assert_eq!(joined(first, range(1, 1100, 50)), Some(range(1, 100, 1050)));
        assert_eq!(joined(first, range(1, 1150, 50)), Some(range(1, 100, 1100)));
        assert_eq!(joined(first, range(1, 1200, 50)), None, "the gap is too large");
        assert_eq!(joined(first, range(2, 1100, 50)), None, "another file");
        assert_eq!(joined(first, range(1, 500, 50)), None, "not after the first");
        assert_eq!(joined(first, range(1, 1100, REQUEST_BYTES)), None, "too long");
    }

    #[test]
    fn ranges_are_cut_into_requests() {
        let all = [
            range(0, 0, 10),
            range(0, 10, 10),
            range(0, 90, 10),
            range(1, 100, 10),
            range(1, 110, 1),
        ];
        assert_eq!(requests(&all), [&all[..2], &all[2..3], &all[3..]]);
        assert!(requests(&[]).is_empty());
    }

    #[test]
    fn many_ranges_are_read_in_sequence() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        let bytes: Vec<u8> = (0..=255).collect();
        std::fs::write(&path, &bytes).unwrap();
        let files = Files::at(&[path.to_str().unwrap().into()]);
        let ranges: Vec<_> = [(0, 3), (3, 20), (100, 1), (250, 6)]
            .map(|(offset, len)| range(0, offset, len))
            .into();
        let never = &mut |_| Ok::<(), std::convert::Infallible>(());
        let read = files.read_many(&ranges, &BufferPool::default(), never);
        let read = read.unwrap_or_else(|halt| panic!("{halt:?}"));
        for (range, found) in ranges.iter().zip(&read) {
            let expected = &bytes[range.offset as usize..(range.offset + range.len) as usize];
            assert_eq!(&**found.as_ref().unwrap(), expected);
        }
        assert_eq!(read.len(), 4);
        let stop = &mut |_| Err("stop");
        let missing = Files::at(&["/nowhere/x".into()]);
        let read = missing.read_many(&ranges[..1], &BufferPool::default(), never);
        assert!(read.unwrap_or_else(|halt| panic!("{halt:?}"))[0].is_err());
        let _ = files.read_many(&ranges, &BufferPool::default(), stop);
    }
}
