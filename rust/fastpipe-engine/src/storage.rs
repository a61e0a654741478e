//! Local files, read by position: several threads read one file without sharing a cursor.

use std::collections::VecDeque;
use std::fs::{File, Metadata};
use std::io;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, ReadAt, Result};

/// An open file.
#[derive(Debug)]
pub struct LocalFile {
    path: Arc<str>,
    file: File,
    /// Whether it may be possible to read without keeping pages.
    glances: AtomicBool,
}

impl LocalFile {
    /// Opens a file.
    pub fn open(path: &str) -> Result<Self> {
        // Looked at before it is opened: to open a pipe is to wait for who writes to it.
        let metadata = std::fs::metadata(path).map_err(|e| Error::io(path, &e))?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() {
                "a directory"
            } else {
                "a pipe or device"
            };
            return Err(Error::new(ErrorKind::Storage, format!("expected a file, found {what}")).at_path(path));
        }
        let file = File::open(path).map_err(|e| Error::io(path, &e))?;
        Ok(LocalFile {
            path: path.into(),
            file,
            glances: AtomicBool::new(true),
        })
    }

    /// What the system says of the file that is open, whatever has its name by now.
    pub(crate) fn metadata(&self) -> io::Result<Metadata> {
        self.file.metadata()
    }

    /// Reads on where something was read already.
    fn read_behind(&self, mut read: usize, offset: u64, out: &mut [u8]) -> Result<usize> {
        while read < out.len() {
            match read_once(&self.file, offset + read as u64, &mut out[read..]) {
                Ok(0) => break,
                Ok(n) => read += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(&self.path, &e).at_offset(offset)),
            }
        }
        Ok(read)
    }
}

#[cfg(target_os = "linux")]
fn will_need(file: &File, offset: u64, len: u64) {
    // Only advice: where it isn't taken, reading takes longer.
    let _ = rustix::fs::fadvise(
        file,
        offset,
        std::num::NonZeroU64::new(len),
        rustix::fs::Advice::WillNeed,
    );
}

#[cfg(not(target_os = "linux"))]
fn will_need(_file: &File, _offset: u64, _len: u64) {}

#[cfg(unix)]
fn read_once(file: &File, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_once(file: &File, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

/// Reads without leaving in the page cache what wasn't there. `None` where the system or the file system can't: before Linux
/// 6.14, and on some kinds of disk.
#[cfg(target_os = "linux")]
fn read_uncached(file: &File, offset: u64, out: &mut [u8]) -> Option<usize> {
    use rustix::io::{ReadWriteFlags, preadv2};
    /// The kernel's RWF_DONTCACHE.
    const DONT_CACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
    preadv2(file, &mut [io::IoSliceMut::new(out)], offset, DONT_CACHE).ok()
}

#[cfg(not(target_os = "linux"))]
fn read_uncached(_file: &File, _offset: u64, _out: &mut [u8]) -> Option<usize> {
    None
}

impl ReadAt for LocalFile {
    fn location(&self) -> &str {
        &self.path
    }

    fn size(&self) -> Result<u64> {
        self.file
            .metadata()
            .map(|m| m.len())
            .map_err(|e| Error::io(&self.path, &e))
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read_behind(0, offset, out)
    }

    // One small page in the cache keeps the kernel from reading what lies around it in large ones. Those are read faster, now
    // and later.
    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let glances = self.glances.load(Ordering::Relaxed);
        let read = glances.then(|| read_uncached(&self.file, offset, out)).flatten();
        if read.is_none() {
            self.glances.store(false, Ordering::Relaxed);
        }
        self.read_behind(read.unwrap_or(0), offset, out)
    }
}

/// The files of a source, opened when they are needed; a bounded number stays open.
#[derive(Debug)]
pub struct Files {
    paths: Vec<Arc<str>>,
    open: Mutex<VecDeque<(u32, Arc<LocalFile>)>>,
}

/// Files kept open: enough that neighbouring blocks find theirs open, far below any limit of descriptors.
const KEPT_OPEN: usize = 32;

impl Files {
    /// The files with these paths.
    pub fn new(paths: &[Arc<str>]) -> Self {
        Files {
            paths: paths.to_vec(),
            open: Mutex::default(),
        }
    }

    /// Reads a range into memory of the pool.
    pub fn read(&self, range: ByteRange, pool: &BufferPool) -> Result<Buffer> {
        let file = self.get(range.location)?;
        let len = usize::try_from(range.len)
            .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than memory can be addressed"))?;
        let mut bytes = pool.take(len)?;
        let found = file.read_at(range.offset, &mut bytes)?;
        if found < len {
            let reason = format!("expected {len} bytes, found {found}: the file became shorter");
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        Ok(bytes)
    }

    /// Lets the system begin to read a range that is needed soon.
    pub fn will_need(&self, range: ByteRange) {
        if let Ok(file) = self.get(range.location) {
            will_need(&file.file, range.offset, range.len);
        }
    }

    /// File `number`.
    pub fn get(&self, number: u32) -> Result<Arc<LocalFile>> {
        let mut open = self.open.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some((_, file)) = open.iter().find(|(n, _)| *n == number) {
            return Ok(file.clone());
        }
        let path = self.paths.get(number as usize).ok_or_else(|| {
            Error::new(
                ErrorKind::Internal,
                format!("a source named file {number} of {}", self.paths.len()),
            )
        })?;
        let file = Arc::new(LocalFile::open(path)?);
        if open.len() >= KEPT_OPEN {
            open.pop_front();
        }
        open.push_back((number, file.clone()));
        Ok(file)
    }
}

#[cfg(test)]
mod tests {
    use std::io::Write;

    use super::*;

    #[test]
    fn files_are_read_by_position() {
        let mut file = tempfile::NamedTempFile::new().unwrap();
        file.write_all(b"hello world").unwrap();
        let file = LocalFile::open(file.path().to_str().unwrap()).unwrap();
        let mut out = [0; 8];
        assert_eq!(file.read_at(6, &mut out).unwrap(), 5);
        assert_eq!((&out[..5], file.size().unwrap()), (&b"world"[..], 11));
        assert_eq!(file.glance_at(0, &mut out).unwrap(), 8);
        assert_eq!(&out, b"hello wo");
        assert_eq!(file.glance_at(8, &mut out).unwrap(), 3);
        file.glances.store(false, Ordering::Relaxed);
        assert_eq!((file.glance_at(3, &mut out).unwrap(), &out), (8, b"lo world"));
    }

    #[test]
    fn what_cannot_be_opened_is_a_typed_error() {
        assert_eq!(
            LocalFile::open("/nowhere/x.avro").unwrap_err().kind(),
            ErrorKind::NotFound
        );
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            LocalFile::open(folder.path().to_str().unwrap()).unwrap_err().kind(),
            ErrorKind::Storage
        );
    }

    #[test]
    fn a_bounded_number_of_files_stays_open() {
        let folder = tempfile::tempdir().unwrap();
        let paths: Vec<Arc<str>> = (0..3 * KEPT_OPEN)
            .map(|i| {
                let path = folder.path().join(i.to_string());
                std::fs::write(&path, i.to_string()).unwrap();
                path.to_str().unwrap().into()
            })
            .collect();
        let files = Files::new(&paths);
        for (i, path) in paths.iter().enumerate() {
            assert_eq!(files.get(i as u32).unwrap().location(), &**path);
        }
        assert_eq!(files.open.lock().unwrap().len(), KEPT_OPEN);
    }
}
