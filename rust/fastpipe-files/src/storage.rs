//! Files on disk, byte strings in memory, and remote files, all read by position. Several threads can read one file,
//! because they don't share a cursor.

use std::fs::File;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::SystemTime;

use bytes::Bytes;
use fastpipe_batch::{Contents, Error, ErrorKind, FileStamp, ReadAt, Result, Stored, text_path};

/// An open file.
#[derive(Debug)]
pub struct SourceFile {
    path: Arc<str>,
    place: Place,
}

/// The location of a file's bytes.
#[derive(Debug)]
enum Place {
    Disk {
        file: File,
        /// Whether reading without caching pages may be supported.
        glances: AtomicBool,
    },
    Memory(Bytes),
    Remote {
        stored: Arc<dyn Stored>,
        /// Whether reads should return at once.
        stopped: Arc<AtomicBool>,
    },
}

impl SourceFile {
    /// Opens the file at a path given as text: see [`path_text`](fastpipe_batch::path_text).
    pub fn open(path: &str) -> Result<Self> {
        let real = text_path(path);
        // Check the type before opening: opening a pipe would block until a writer opens it.
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
        let glances = AtomicBool::new(true);
        Ok(SourceFile {
            path: path.into(),
            place: Place::Disk { file, glances },
        })
    }

    /// Returns `contents` as a file of that name if given, or else opens the file at that path.
    ///
    /// # Errors
    /// As for [`SourceFile::open`].
    pub fn of(path: &Arc<str>, contents: Option<&Contents>) -> Result<Self> {
        let place = match contents {
            None => return Self::open(path),
            Some(Contents::Memory(bytes)) => Place::Memory(bytes.clone()),
            Some(Contents::Remote(stored)) => Place::Remote {
                stored: stored.clone(),
                stopped: Arc::default(),
            },
        };
        let path = path.clone();
        Ok(SourceFile { path, place })
    }

    /// Lets reads of a remote file return an error soon after `stopped` becomes true.
    #[must_use]
    pub fn stopped_by(mut self, by: &Arc<AtomicBool>) -> Self {
        if let Place::Remote { stopped, .. } = &mut self.place {
            *stopped = by.clone();
        }
        self
    }

    /// Returns the file in its storage, if it is remote.
    pub fn remote(&self) -> Option<&dyn Stored> {
        match &self.place {
            Place::Remote { stored, .. } => Some(&**stored),
            Place::Disk { .. } | Place::Memory(_) => None,
        }
    }

    /// Reads like [`ReadAt::read_at`]. If the file is remote, returns an error soon after `cancelled` returns true.
    pub(crate) fn read_until(&self, offset: u64, out: &mut [u8], cancelled: &dyn Fn() -> bool) -> Result<usize> {
        match &self.place {
            Place::Remote { stored, .. } => stored.read_at(offset, out, cancelled),
            Place::Disk { .. } | Place::Memory(_) => self.read_at(offset, out),
        }
    }

    /// Returns the size and modification time of the open file, even if another file has its name by now.
    pub fn stamp(&self) -> Result<FileStamp> {
        let file = match &self.place {
            Place::Disk { file, .. } => file,
            Place::Memory(contents) => {
                let size = contents.len() as u64;
                return Ok(FileStamp { size, modified: 0 });
            }
            Place::Remote { stored, .. } => return Ok(stored.stamp()),
        };
        let look = || {
            let metadata = file.metadata()?;
            let (size, modified) = (metadata.len(), nanoseconds(metadata.modified()?));
            Ok(FileStamp { size, modified })
        };
        look().map_err(|e| Error::io(&self.path, &e))
    }

    /// Asks the system to start reading a range that is needed soon.
    pub(crate) fn will_need(&self, offset: u64, len: u64) {
        if let Place::Disk { file, .. } = &self.place {
            advise(file, offset, len, true);
        }
    }

    /// Tells the system that small ranges all over the file will be read, so that it doesn't read beyond them.
    pub fn expect_random_reads(&self) {
        if let Place::Disk { file, .. } = &self.place {
            advise(file, 0, 0, false);
        }
    }

    /// Continues a read after its first `read` bytes.
    fn read_behind(&self, mut read: usize, offset: u64, out: &mut [u8]) -> Result<usize> {
        let file = match &self.place {
            Place::Disk { file, .. } => file,
            Place::Memory(contents) => return Ok(copy(contents, offset, out)),
            Place::Remote { stored, stopped } => {
                return stored.read_at(offset, out, &|| stopped.load(Ordering::Relaxed));
            }
        };
        while read < out.len() {
            match read_once(file, offset + read as u64, &mut out[read..]) {
                Ok(0) => break,
                Ok(n) => read += n,
                Err(e) if e.kind() == io::ErrorKind::Interrupted => {}
                Err(e) => return Err(Error::io(&self.path, &e).at_offset(offset)),
            }
        }
        Ok(read)
    }
}

/// Copies the available bytes from an offset on.
fn copy(contents: &[u8], offset: u64, out: &mut [u8]) -> usize {
    let from = usize::try_from(offset).ok().and_then(|offset| contents.get(offset..));
    let found = from.unwrap_or_default();
    let len = found.len().min(out.len());
    out[..len].copy_from_slice(&found[..len]);
    len
}

/// Tells the system that a range is needed soon, or else that its reads will be random.
#[cfg(target_os = "linux")]
fn advise(file: &File, offset: u64, len: u64, soon: bool) {
    use rustix::fs::{Advice, fadvise};
    let advice = if soon { Advice::WillNeed } else { Advice::Random };
    // This is only advice. Without it, reading takes longer.
    let _ = fadvise(file, offset, std::num::NonZeroU64::new(len), advice);
}

#[cfg(not(target_os = "linux"))]
fn advise(_file: &File, _offset: u64, _len: u64, _soon: bool) {}

#[cfg(unix)]
fn read_once(file: &File, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    std::os::unix::fs::FileExt::read_at(file, out, offset)
}

#[cfg(windows)]
fn read_once(file: &File, offset: u64, out: &mut [u8]) -> io::Result<usize> {
    std::os::windows::fs::FileExt::seek_read(file, out, offset)
}

/// Reads without adding pages to the page cache. Returns `None` if the system or file system doesn't support this, such
/// as Linux before 6.14.
#[cfg(target_os = "linux")]
fn read_uncached(file: &File, offset: u64, out: &mut [u8]) -> Option<usize> {
    use rustix::io::{ReadWriteFlags, preadv2};
    /// RWF_DONTCACHE of the kernel.
    const DONT_CACHE: ReadWriteFlags = ReadWriteFlags::from_bits_retain(0x80);
    preadv2(file, &mut [io::IoSliceMut::new(out)], offset, DONT_CACHE).ok()
}

#[cfg(not(target_os = "linux"))]
fn read_uncached(_file: &File, _offset: u64, _out: &mut [u8]) -> Option<usize> {
    None
}

impl ReadAt for SourceFile {
    fn location(&self) -> &str {
        &self.path
    }

    fn size(&self) -> Result<u64> {
        match &self.place {
            Place::Disk { file, .. } => file.metadata().map(|m| m.len()).map_err(|e| Error::io(&self.path, &e)),
            Place::Memory(contents) => Ok(contents.len() as u64),
            Place::Remote { stored, .. } => Ok(stored.stamp().size),
        }
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read_behind(0, offset, out)
    }

    // A single small page in the cache would prevent the kernel from reading the surrounding data in large pages, which
    // are faster to read, now and later.
    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let Place::Disk { file, glances } = &self.place else {
            return self.read_at(offset, out);
        };
        let may_glance = glances.load(Ordering::Relaxed);
        let read = may_glance.then(|| read_uncached(file, offset, out)).flatten();
        if read.is_none() {
            glances.store(false, Ordering::Relaxed);
        }
        self.read_behind(read.unwrap_or(0), offset, out)
    }
}

/// Converts a time to nanoseconds since 1970.
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
        let file = SourceFile::open(file.path().to_str().unwrap()).unwrap();
        let mut out = [0; 8];
        assert_eq!(file.read_at(6, &mut out).unwrap(), 5);
        assert_eq!((&out[..5], file.size().unwrap()), (&b"world"[..], 11));
        assert_eq!(file.glance_at(0, &mut out).unwrap(), 8);
        assert_eq!(&out, b"hello wo");
        assert_eq!(file.glance_at(8, &mut out).unwrap(), 3);
        let Place::Disk { glances, .. } = &file.place else {
            panic!("the file is on disk")
        };
        glances.store(false, Ordering::Relaxed);
        assert_eq!((file.glance_at(3, &mut out).unwrap(), &out), (8, b"lo world"));
    }

    #[test]
    fn memory_is_read_by_position() {
        let name: Arc<str> = "<bytes #0>".into();
        let file = SourceFile::of(&name, Some(&Contents::Memory(Bytes::from_static(b"hello world")))).unwrap();
        let mut out = [0; 8];
        assert_eq!(file.read_at(6, &mut out).unwrap(), 5);
        assert_eq!((&out[..5], file.size().unwrap()), (&b"world"[..], 11));
        assert_eq!((file.glance_at(3, &mut out).unwrap(), &out), (8, b"lo world"));
        for offset in [11, 12, u64::MAX] {
            assert_eq!(file.read_at(offset, &mut out).unwrap(), 0);
        }
        assert_eq!(file.stamp().unwrap(), FileStamp { size: 11, modified: 0 });
        assert_eq!(file.location(), "<bytes #0>");
        assert_eq!(SourceFile::of(&name, None).unwrap_err().kind(), ErrorKind::NotFound);
    }

    #[test]
    fn files_that_cannot_be_opened_are_typed_errors() {
        assert_eq!(
            SourceFile::open("/nowhere/x.avro").unwrap_err().kind(),
            ErrorKind::NotFound
        );
        let folder = tempfile::tempdir().unwrap();
        assert_eq!(
            SourceFile::open(folder.path().to_str().unwrap()).unwrap_err().kind(),
            ErrorKind::Storage
        );
    }
}
