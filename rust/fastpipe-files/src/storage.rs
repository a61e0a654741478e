//! Local files, read by position: several threads read one file without sharing a cursor.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use fastpipe_batch::{Error, ErrorKind, FileStamp, ReadAt, Result, text_path};

/// An open file.
#[derive(Debug)]
pub struct LocalFile {
    path: Arc<str>,
    file: File,
    /// Whether it may be possible to read without keeping pages.
    glances: AtomicBool,
}

impl LocalFile {
    /// Opens the file whose path has this text: see [`path_text`](fastpipe_batch::path_text).
    pub fn open(path: &str) -> Result<Self> {
        let real = text_path(path);
        // Looked at before it is opened: to open a pipe is to wait for who writes to it.
        let metadata = std::fs::metadata(&*real).map_err(|e| Error::io(path, &e))?;
        if !metadata.is_file() {
            let what = if metadata.is_dir() {
                "a directory"
            } else {
                "a pipe or device"
            };
            return Err(Error::new(ErrorKind::Storage, format!("expected a file, found {what}")).at_path(path));
        }
        let file = File::open(&*real).map_err(|e| Error::io(path, &e))?;
        Ok(LocalFile {
            path: path.into(),
            file,
            glances: AtomicBool::new(true),
        })
    }

    /// What the file that is open looks like, whatever has its name by now.
    pub fn stamp(&self) -> Result<FileStamp> {
        let look = || {
            let metadata = self.file.metadata()?;
            let (size, modified) = (metadata.len(), nanoseconds(metadata.modified()?));
            Ok(FileStamp { size, modified })
        };
        look().map_err(|e| Error::io(&self.path, &e))
    }

    /// Lets the system begin to read a range that is needed soon.
    pub(crate) fn will_need(&self, offset: u64, len: u64) {
        will_need(&self.file, offset, len);
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

/// Nanoseconds from 1970 to a time.
pub(crate) fn nanoseconds(time: SystemTime) -> i128 {
    match time.duration_since(SystemTime::UNIX_EPOCH) {
        Ok(since) => since.as_nanos() as i128,
        Err(before) => -(before.duration().as_nanos() as i128),
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
}
