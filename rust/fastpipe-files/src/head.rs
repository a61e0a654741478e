//! A buffer of the first bytes of a file, which are read once, and of the bytes ahead in a remote file.

use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{ReadAt, Result};

use crate::storage::SourceFile;

/// Number of bytes to buffer: the header and, if the file is small, all of it.
pub(crate) const HEAD_BYTES: u64 = 64 << 10;

/// Bytes of the first and of the largest request for the bytes ahead in a remote file. Requests double.
const AHEAD_BYTES: (u64, u64) = (1 << 20, 32 << 20);

/// Number of bytes to read in a remote file if only a few bytes of each block are looked at and blocks are large.
const GLANCE_BYTES: u64 = 4 << 10;

/// A file with its first bytes in a buffer, so that a small file is read only once.
pub(crate) struct Head<'a> {
    file: &'a SourceFile,
    size: u64,
    bytes: Vec<u8>,
    ahead: Mutex<Ahead>,
}

/// Bytes that were read ahead in a remote file, since each request takes long.
#[derive(Default)]
struct Ahead {
    start: u64,
    bytes: Vec<u8>,
    /// Number of bytes of the next request.
    next: u64,
}

impl Ahead {
    /// Returns a range if it is buffered.
    fn buffered(&self, offset: u64, len: usize) -> Option<&[u8]> {
        let from = usize::try_from(offset.checked_sub(self.start)?).ok()?;
        self.bytes.get(from..from.checked_add(len)?)
    }

    /// Reads a range, from the buffer if possible.
    fn read(&mut self, file: &SourceFile, offset: u64, out: &mut [u8]) -> Result<usize> {
        if let Some(found) = self.buffered(offset, out.len()) {
            out.copy_from_slice(found);
            return Ok(out.len());
        }
        let end = self.start + self.bytes.len() as u64;
        // A walk skips large blocks. Reading what it skips would take longer than another request.
        let skips = offset.saturating_sub(end) > AHEAD_BYTES.1 / 4;
        self.next = match skips {
            true => GLANCE_BYTES,
            false => (self.next * 2).clamp(AHEAD_BYTES.0, AHEAD_BYTES.1),
        };
        let rest = file.size()?.saturating_sub(offset);
        let len = self.next.max(out.len() as u64).min(rest);
        self.bytes = file.read_up_to(offset, len as usize)?;
        self.start = offset;
        let found = self.bytes.len().min(out.len());
        out[..found].copy_from_slice(&self.bytes[..found]);
        Ok(found)
    }
}

impl<'a> Head<'a> {
    /// Reads the first bytes of a file of `size` bytes.
    pub(crate) fn read(file: &'a SourceFile, size: u64) -> Result<Self> {
        let bytes = file.read_up_to(0, size.min(HEAD_BYTES) as usize)?;
        let ahead = Mutex::new(Ahead {
            start: bytes.len() as u64,
            ..Ahead::default()
        });
        Ok(Head {
            file,
            size,
            bytes,
            ahead,
        })
    }

    /// Copies a range if it is buffered.
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        let at_hand = |from: usize| self.bytes.get(from..)?.get(..out.len());
        let found = usize::try_from(offset).ok().and_then(at_hand);
        if let Some(found) = found {
            out.copy_from_slice(found);
        }
        found.is_some()
    }
}

impl ReadAt for Head<'_> {
    fn location(&self) -> &str {
        self.file.location()
    }

    fn size(&self) -> Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match (self.copy(offset, out), self.file.remote()) {
            (true, _) => Ok(out.len()),
            (false, None) => self.file.read_at(offset, out),
            (false, Some(_)) => {
                let mut ahead = self.ahead.lock().unwrap_or_else(PoisonError::into_inner);
                ahead.read(self.file, offset, out)
            }
        }
    }

    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match self.file.remote() {
            None if !self.copy(offset, out) => self.file.glance_at(offset, out),
            None => Ok(out.len()),
            Some(_) => self.read_at(offset, out),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastpipe_batch::{Contents, FileStamp, Stored};

    use super::*;

    #[test]
    fn bytes_in_and_after_the_head_are_read_alike() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let bytes: Vec<u8> = (0..HEAD_BYTES + 100).map(|i| (i % 251) as u8).collect();
        std::fs::write(file.path(), &bytes).unwrap();
        let file = SourceFile::open(file.path().to_str().unwrap()).unwrap();
        let head = Head::read(&file, bytes.len() as u64).unwrap();
        assert_eq!(
            (head.bytes.len() as u64, head.size().unwrap()),
            (HEAD_BYTES, HEAD_BYTES + 100)
        );
        for offset in [
            0,
            5,
            HEAD_BYTES - 8,
            HEAD_BYTES - 7,
            HEAD_BYTES,
            HEAD_BYTES + 95,
            HEAD_BYTES + 200,
        ] {
            let expected = bytes.get(offset as usize..).unwrap_or_default();
            let expected = &expected[..expected.len().min(8)];
            let mut out = [0; 8];
            let found = head.read_at(offset, &mut out).unwrap();
            assert_eq!(&out[..found], expected, "{offset}");
            let found = head.glance_at(offset, &mut out).unwrap();
            assert_eq!(&out[..found], expected, "{offset}");
        }
        assert_eq!(head.read_at(u64::MAX, &mut []).unwrap(), 0);
    }

    /// A remote file that records the length of each request.
    #[derive(Debug)]
    struct Far(Vec<u8>, Mutex<Vec<usize>>);

    impl Stored for Far {
        fn location(&self) -> &str {
            "far"
        }

        fn stamp(&self) -> FileStamp {
            let size = self.0.len() as u64;
            FileStamp { size, modified: 0 }
        }

        fn version(&self) -> &str {
            ""
        }

        fn read_at(&self, offset: u64, out: &mut [u8], _cancelled: &dyn Fn() -> bool) -> Result<usize> {
            let rest = self.0.get(offset as usize..).unwrap_or_default();
            let len = rest.len().min(out.len());
            out[..len].copy_from_slice(&rest[..len]);
            self.1.lock().unwrap().push(len);
            Ok(len)
        }
    }

    #[test]
    fn a_remote_file_is_read_with_few_requests() {
        let size = 8 << 20;
        let far = Arc::new(Far((0..size).map(|i| (i % 251) as u8).collect(), Mutex::default()));
        let contents = Contents::Remote(far.clone());
        let file = SourceFile::of(&"far".into(), Some(&contents)).unwrap();
        let head = Head::read(&file, size as u64).unwrap();
        let mut out = [0; 100];
        for offset in (0..size).step_by(1000) {
            let found = head.read_at(offset as u64, &mut out).unwrap();
            assert_eq!(&out[..found], &far.0[offset..size.min(offset + 100)]);
        }
        let requests = std::mem::take(&mut *far.1.lock().unwrap());
        assert_eq!(requests.len(), 5, "{requests:?}");
        assert!(requests.iter().sum::<usize>() <= size + 1000);
        // Only a few bytes are read of what a walk skips.
        let big = Arc::new(Far(vec![1; 40 << 20], Mutex::default()));
        let file = SourceFile::of(&"big".into(), Some(&Contents::Remote(big.clone()))).unwrap();
        let head = Head::read(&file, 40 << 20).unwrap();
        for offset in [10 << 20, 20 << 20, 30 << 20] {
            assert_eq!(head.glance_at(offset, &mut out).unwrap(), 100);
        }
        assert!(big.1.lock().unwrap().iter().sum::<usize>() < 100_000);
        assert_eq!(head.read_at(50 << 20, &mut out).unwrap(), 0);
    }
}
