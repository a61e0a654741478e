//! The files of a source while it is read: opened when they are needed, and watched for changes.
//!
//! Rows of a file that is changed while a pass reads it may be of its old and of its new contents. That shows in its
//! size or time of modification, which are compared with what they were before its units were found:
//!
//! - when the file is opened, for it may have been closed in between, and another have its name by now;
//! - behind the last read of it before it is closed;
//! - for all that are open, when another epoch begins, and at the end of the pass.
//!
//! So every read is followed by a look, at the cost of a system call a file now and then. Device and inode aren't
//! compared: a file that was replaced goes on to be read as it was while it is open, and some file systems number files
//! anew.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use bytes::Bytes;
use fastpipe_batch::{Buffer, BufferPool, ByteRange, Error, ErrorKind, FileStamp, ReadAt, Result, SourceFacts};

use crate::storage::LocalFile;

/// Files kept open: enough that neighbouring units find theirs open, far below any limit of descriptors.
const KEPT_OPEN: usize = 32;

/// The files of a source; a bounded number stays open.
#[derive(Debug, Default)]
pub struct Files {
    paths: Vec<Arc<str>>,
    /// What they looked like when their units were found; empty if that isn't known.
    stamps: Vec<FileStamp>,
    /// The bytes of those that lie in memory; empty if none do.
    contents: Vec<Option<Bytes>>,
    open: Mutex<VecDeque<Arc<OpenFile>>>,
    /// The latest epoch that was read of.
    epoch: AtomicU64,
    /// The change of a file that is closed.
    changed: OnceLock<Error>,
}

#[derive(Debug)]
struct OpenFile {
    number: u32,
    file: LocalFile,
    /// Whether it is no longer kept open, so that whoever reads it yet must look for changes.
    left: AtomicBool,
}

/// An open file, as one that is read by position.
struct Reading(Arc<OpenFile>);

impl std::ops::Deref for Reading {
    type Target = dyn ReadAt;

    fn deref(&self) -> &Self::Target {
        &self.0.file
    }
}

impl Files {
    /// The files of the source with these facts.
    pub fn of(source: &SourceFacts) -> Self {
        Files {
            paths: source.locations.clone(),
            stamps: source.stamps.clone(),
            contents: source.contents.clone(),
            ..Files::default()
        }
    }

    /// Reads a range into memory of the pool.
    ///
    /// # Errors
    /// Of storage: if the file can't be read, or was changed since it was indexed, as far as that is looked at here.
    pub fn read(&self, range: ByteRange, pool: &BufferPool) -> Result<Buffer> {
        let open = self.get(range.location)?;
        let len = usize::try_from(range.len)
            .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than memory can be addressed"))?;
        let mut bytes = pool.take(len)?;
        let found = open.file.read_at(range.offset, &mut bytes)?;
        if found < len {
            let what = format!("it became shorter: expected {len} bytes, found {found}");
            return Err(changed(&what).at_path(open.file.location()));
        }
        // Whoever sets this looks at the file after that, and so after this read if it isn't seen here.
        if open.left.load(Ordering::SeqCst) {
            self.look_at(&open)?;
        }
        Ok(bytes)
    }

    /// A file, to be read otherwise. Behind that it is to be looked at.
    pub(crate) fn open(&self, location: u32) -> Result<impl std::ops::Deref<Target = dyn ReadAt>> {
        self.get(location).map(Reading)
    }

    /// Sees whether a file is what it was when it was indexed.
    pub(crate) fn look_at_file(&self, location: u32) -> Result<()> {
        self.look_at(&*self.get(location)?)
    }

    /// Lets the system begin to read a range that is needed soon.
    pub fn will_need(&self, range: ByteRange) {
        if let Ok(open) = self.get(range.location) {
            open.file.will_need(range.offset, range.len);
        }
    }

    /// Sees whether any file was changed while it was read.
    ///
    /// # Errors
    /// Of storage: if one was.
    pub fn check(&self) -> Result<()> {
        self.lock().iter().try_for_each(|open| self.look_at(open))?;
        self.changed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// The same, if something of another epoch is to be read now. A change that was met when a file was closed is told
    /// at any time.
    ///
    /// # Errors
    /// Of storage: if one was.
    pub fn check_before(&self, epoch: u64) -> Result<()> {
        // Looked at first: threads that only read don't take the word from one another.
        if self.epoch.load(Ordering::Relaxed) < epoch && self.epoch.fetch_max(epoch, Ordering::Relaxed) < epoch {
            return self.check();
        }
        self.changed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// What is behind an error about what was read of a file, if the file was changed: it is no damage then.
    #[cold]
    pub fn change_behind(&self, error: &Error) -> Option<Error> {
        let at = error.location();
        let changed = self.change_of(at.path.as_deref()?)?;
        Some(match (at.block, at.offset) {
            (Some(block), Some(offset)) => changed.at_block(block, offset),
            _ => changed,
        })
    }

    /// The error for a file that was changed since it was indexed, if it was.
    fn change_of(&self, path: &str) -> Option<Error> {
        let open = self.lock().iter().find(|open| open.file.location() == path).cloned();
        let looked = match open {
            Some(open) => self.look_at(&open),
            None => {
                let number = self.paths.iter().position(|p| &**p == path)?;
                let file = self.open_file(number).ok()?;
                self.compare(number as u32, &file)
            }
        };
        looked.err()
    }

    fn look_at(&self, open: &OpenFile) -> Result<()> {
        self.compare(open.number, &open.file)
    }

    /// Sees whether a file is what it was when it was indexed.
    fn compare(&self, number: u32, file: &LocalFile) -> Result<()> {
        let Some(before) = self.stamps.get(number as usize) else {
            return Ok(());
        };
        let now = file.stamp()?;
        let what = match now == *before {
            true => return Ok(()),
            false if now.size == before.size => "it was modified since it was indexed".to_owned(),
            false => format!("it has {} bytes, and had {} when it was indexed", now.size, before.size),
        };
        Err(changed(&what).at_path(file.location()))
    }

    fn open_file(&self, number: usize) -> Result<LocalFile> {
        let path = self.paths.get(number).ok_or_else(|| {
            let reason = format!("a source named file {number} of {}", self.paths.len());
            Error::new(ErrorKind::Internal, reason)
        })?;
        LocalFile::of(path, self.contents.get(number).and_then(Option::as_ref))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<OpenFile>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// File `number`.
    fn get(&self, number: u32) -> Result<Arc<OpenFile>> {
        let mut open = self.lock();
        if let Some(found) = open.iter().find(|open| open.number == number) {
            return Ok(found.clone());
        }
        let file = self.open_file(number as usize)?;
        self.compare(number, &file)?;
        let left = AtomicBool::new(false);
        let file = Arc::new(OpenFile { number, file, left });
        let oldest = (open.len() >= KEPT_OPEN).then(|| open.pop_front()).flatten();
        open.push_back(file.clone());
        drop(open);
        if let Some(oldest) = oldest {
            oldest.left.store(true, Ordering::SeqCst);
            if let Err(error) = self.look_at(&oldest) {
                // Not of the unit that is read now.
                self.changed.get_or_init(|| error);
            }
        }
        Ok(file)
    }
}

/// A file was changed while it was read.
#[cold]
pub(crate) fn changed(what: &str) -> Error {
    let reason = format!(
        "the file changed while it was read: {what}. What was read may be of both contents: start again with a new reader, \
         once nobody writes to it"
    );
    Error::new(ErrorKind::Storage, reason)
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::time::{Duration, UNIX_EPOCH};

    use super::*;

    fn files(folder: &Path, count: usize) -> Files {
        let paths: Vec<Arc<str>> = (0..count)
            .map(|i| {
                let path = folder.join(i.to_string());
                std::fs::write(&path, i.to_string()).unwrap();
                path.to_str().unwrap().into()
            })
            .collect();
        let stamp = |path: &Arc<str>| LocalFile::open(path).unwrap().stamp().unwrap();
        Files {
            stamps: paths.iter().map(stamp).collect(),
            paths,
            ..Files::default()
        }
    }

    fn read(files: &Files, location: u32) -> Result<Buffer> {
        let range = ByteRange {
            location,
            offset: 0,
            len: 1,
        };
        files.read(range, &BufferPool::default())
    }

    /// As large as before, and of another time.
    fn change(files: &Files, number: usize) {
        let file = std::fs::File::options()
            .write(true)
            .open(&*files.paths[number])
            .unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn a_bounded_number_of_files_stays_open() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 3 * KEPT_OPEN);
        for (i, path) in files.paths.iter().enumerate() {
            assert_eq!(files.get(i as u32).unwrap().file.location(), &**path);
        }
        assert_eq!(files.lock().len(), KEPT_OPEN);
        assert!(files.check().is_ok());
    }

    #[test]
    fn a_change_is_noticed_at_the_next_check() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 2);
        read(&files, 0).unwrap();
        change(&files, 1);
        assert!(files.check().is_ok(), "nothing was read of it");
        assert_eq!(read(&files, 1).unwrap_err().kind(), ErrorKind::Storage);
        change(&files, 0);
        read(&files, 0).unwrap();
        assert!(files.check_before(0).is_ok());
        let error = files.check_before(1).unwrap_err();
        assert!(error.reason().contains("changed while it was read: it was modified"));
        assert_eq!(error.location().path.as_deref(), Some(&*files.paths[0]));
        assert_eq!(files.check().unwrap_err().kind(), ErrorKind::Storage);
    }

    #[test]
    fn a_change_is_noticed_when_the_file_is_closed() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), KEPT_OPEN + 1);
        for i in 0..KEPT_OPEN {
            read(&files, i as u32).unwrap();
        }
        let first = files.get(0).unwrap();
        change(&files, 0);
        read(&files, KEPT_OPEN as u32).unwrap();
        assert!(first.left.load(Ordering::SeqCst));
        assert_eq!(files.check_before(0).unwrap_err().kind(), ErrorKind::Storage);
        // It can't be opened again, either; and whoever reads it yet learns of it.
        assert_eq!(read(&files, 0).unwrap_err().kind(), ErrorKind::Storage);
        assert!(files.look_at(&first).is_err());
    }

    #[test]
    fn a_file_that_became_shorter_has_changed() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 1);
        read(&files, 0).unwrap();
        std::fs::write(&*files.paths[0], b"").unwrap();
        let error = read(&files, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage);
        assert!(error.reason().contains("it became shorter: expected 1 bytes, found 0"));
        let damage = |path: &str| Error::new(ErrorKind::Malformed, "x").at_block(3, 90).at_path(path);
        let error = files.change_behind(&damage(&files.paths[0])).unwrap();
        assert_eq!((error.kind(), error.location().block), (ErrorKind::Storage, Some(3)));
        assert!(files.change_behind(&damage("elsewhere")).is_none());
    }

    #[test]
    fn a_file_that_was_replaced_is_read_as_it_was_while_it_is_open() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 1);
        read(&files, 0).unwrap();
        std::fs::write(folder.path().join("new"), b"12345").unwrap();
        std::fs::rename(folder.path().join("new"), &*files.paths[0]).unwrap();
        assert_eq!(&*read(&files, 0).unwrap(), b"0");
        assert!(files.check().is_ok());
    }
}
