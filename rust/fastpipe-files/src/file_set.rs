//! The files of a source during a pass: opened on demand, and checked for changes.
//!
//! If a file changes while a pass reads it, its rows may be a mix of old and new contents. A change is detected by
//! comparing the file's size and modification time with their values before its units were found:
//!
//! - when the file is opened, because it may have been replaced while it was closed,
//! - after the last read before the file is closed,
//! - for all open files, when another epoch begins and at the end of the pass.
//!
//! Every read is thus followed by a check, at the cost of an occasional system call per file. Device and inode aren't
//! compared: an open file that is replaced can still be read unchanged, and some file systems renumber files.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fastpipe_batch::{
    Buffer, BufferPool, ByteRange, Contents, Error, ErrorKind, FileStamp, ReadAt, Result, SourceFacts,
};

use crate::storage::SourceFile;

/// Number of files to keep open: enough that neighboring units find their file open, and far below any limit of file
/// descriptors.
const KEPT_OPEN: usize = 32;

/// The files of a source. Only a bounded number of them stays open.
#[derive(Debug, Default)]
pub struct Files {
    paths: Vec<Arc<str>>,
    /// Size and modification time of each file before its units were found. Empty if unknown.
    stamps: Vec<FileStamp>,
    /// Contents of files that are in memory. Empty if all files are on disk.
    contents: Vec<Option<Contents>>,
    open: Mutex<VecDeque<Arc<OpenFile>>>,
    /// The latest epoch that was read.
    epoch: AtomicU64,
    /// The first change that was found when a file was closed.
    changed: OnceLock<Error>,
}

#[derive(Debug)]
struct OpenFile {
    number: u32,
    file: SourceFile,
    /// Whether the file has left the list of open files. A thread that still reads it must then check for changes.
    left: AtomicBool,
}

/// An open file that can be read by position.
struct Reading(Arc<OpenFile>);

impl std::ops::Deref for Reading {
    type Target = dyn ReadAt;

    fn deref(&self) -> &Self::Target {
        &self.0.file
    }
}

impl Files {
    /// Returns the files of a source.
    pub fn of(source: &SourceFacts) -> Self {
        Files {
            paths: source.locations.clone(),
            stamps: source.stamps.clone(),
            contents: source.contents.clone(),
            ..Files::default()
        }
    }

    /// Returns local files whose stamps aren't known.
    #[cfg(test)]
    pub(crate) fn at(paths: &[Arc<str>]) -> Self {
        Files {
            paths: paths.to_vec(),
            ..Files::default()
        }
    }

    /// Reads a range into memory of the pool.
    ///
    /// # Errors
    /// Storage if the file can't be read, or if a change of the file is detected here.
    pub fn read(&self, range: ByteRange, pool: &BufferPool) -> Result<Buffer> {
        self.read_until(range, pool, &|| false)
    }

    /// Reads a range into memory of the pool. If the file is remote, returns an error soon after `cancelled` returns
    /// true.
    ///
    /// # Errors
    /// As for [`Files::read`]; Closed if it was cancelled.
    pub fn read_until(&self, range: ByteRange, pool: &BufferPool, cancelled: &dyn Fn() -> bool) -> Result<Buffer> {
        let open = self.get(range.location)?;
        let len = usize::try_from(range.len)
            .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than the address space"))?;
        let mut bytes = pool.take(len)?;
        let found = open.file.read_until(range.offset, &mut bytes, cancelled)?;
        if found < len {
            let what = format!("it became shorter: expected {len} bytes, found {found}");
            return Err(changed(&what).at_path(open.file.location()));
        }
        // The thread that sets this flag checks the file afterward. If the flag isn't seen here, that check follows
        // this read.
        if open.left.load(Ordering::SeqCst) {
            self.look_at(&open)?;
        }
        Ok(bytes)
    }

    /// Whether a file is in another storage.
    pub(crate) fn is_remote(&self, location: u32) -> bool {
        matches!(self.contents.get(location as usize), Some(Some(Contents::Remote(_))))
    }

    /// Opens a file for direct reads. The caller must check afterward that it hasn't changed.
    pub(crate) fn open(&self, location: u32) -> Result<impl std::ops::Deref<Target = dyn ReadAt>> {
        self.get(location).map(Reading)
    }

    /// Checks that a file hasn't changed since it was indexed.
    pub(crate) fn look_at_file(&self, location: u32) -> Result<()> {
        self.look_at(&*self.get(location)?)
    }

    /// Asks the system to start reading a range that is needed soon.
    pub fn will_need(&self, range: ByteRange) {
        if let Ok(open) = self.get(range.location) {
            open.file.will_need(range.offset, range.len);
        }
    }

    /// Checks that no file was changed while it was read.
    ///
    /// # Errors
    /// Storage if a file was changed.
    pub fn check(&self) -> Result<()> {
        self.lock().iter().try_for_each(|open| self.look_at(open))?;
        self.changed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Checks for changes if `epoch` is the first read of a new epoch. A change found when a file was closed is
    /// reported in any case.
    ///
    /// # Errors
    /// Storage if a file was changed.
    pub fn check_before(&self, epoch: u64) -> Result<()> {
        // The load comes first, so that threads of the same epoch don't contend for the cache line.
        if self.epoch.load(Ordering::Relaxed) < epoch && self.epoch.fetch_max(epoch, Ordering::Relaxed) < epoch {
            return self.check();
        }
        self.changed.get().map_or(Ok(()), |error| Err(error.clone()))
    }

    /// Returns the change of a file that explains an error in its data, if the file was changed. The data isn't damaged
    /// then.
    #[cold]
    pub fn change_behind(&self, error: &Error) -> Option<Error> {
        let at = error.location();
        let changed = self.change_of(at.path.as_deref()?)?;
        Some(match (at.block, at.offset) {
            (Some(block), Some(offset)) => changed.at_block(block, offset),
            _ => changed,
        })
    }

    /// Returns the error for a file if it was changed since it was indexed.
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

    /// Checks that a file hasn't changed since it was indexed.
    fn compare(&self, number: u32, file: &SourceFile) -> Result<()> {
        let Some(before) = self.stamps.get(number as usize) else {
            return Ok(());
        };
        let now = file.stamp()?;
        let what = match now == *before {
            true => return Ok(()),
            false if now.size == before.size => "it was modified since it was indexed".to_owned(),
            false => format!("it has {} bytes, but had {} when it was indexed", now.size, before.size),
        };
        Err(changed(&what).at_path(file.location()))
    }

    fn open_file(&self, number: usize) -> Result<SourceFile> {
        let path = self.paths.get(number).ok_or_else(|| {
            let reason = format!("unknown file {number} of {}", self.paths.len());
            Error::new(ErrorKind::Internal, reason)
        })?;
        SourceFile::of(path, self.contents.get(number).and_then(Option::as_ref))
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, VecDeque<Arc<OpenFile>>> {
        self.open.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns file `number`, and opens it if necessary.
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
                // The error isn't about the unit that is read now.
                self.changed.get_or_init(|| error);
            }
        }
        Ok(file)
    }
}

/// Returns the error for a file that was changed while it was read.
#[cold]
pub(crate) fn changed(what: &str) -> Error {
    let reason = format!(
        "the file changed while it was read: {what}. Rows may be a mix of old and new contents: start again with a new \
         reader when no process writes to the file"
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
        let stamp = |path: &Arc<str>| SourceFile::open(path).unwrap().stamp().unwrap();
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

    /// Changes the modification time and keeps the size.
    fn change(files: &Files, number: usize) {
        let file = std::fs::File::options()
            .write(true)
            .open(&*files.paths[number])
            .unwrap();
        file.set_modified(UNIX_EPOCH + Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn the_number_of_open_files_is_bounded() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 3 * KEPT_OPEN);
        for (i, path) in files.paths.iter().enumerate() {
            assert_eq!(files.get(i as u32).unwrap().file.location(), &**path);
        }
        assert_eq!(files.lock().len(), KEPT_OPEN);
        assert!(files.check().is_ok());
    }

    #[test]
    fn a_change_is_detected_at_the_next_check() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 2);
        read(&files, 0).unwrap();
        change(&files, 1);
        assert!(files.check().is_ok(), "the file was not read");
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
    fn a_change_is_detected_when_the_file_is_closed() {
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
        // It can't be opened again. A thread that still reads it detects the change.
        assert_eq!(read(&files, 0).unwrap_err().kind(), ErrorKind::Storage);
        assert!(files.look_at(&first).is_err());
    }

    #[test]
    fn a_truncated_file_has_changed() {
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
    fn an_open_file_is_readable_after_it_was_replaced() {
        let folder = tempfile::tempdir().unwrap();
        let files = files(folder.path(), 1);
        read(&files, 0).unwrap();
        std::fs::write(folder.path().join("new"), b"12345").unwrap();
        std::fs::rename(folder.path().join("new"), &*files.paths[0]).unwrap();
        assert_eq!(&*read(&files, 0).unwrap(), b"0");
        assert!(files.check().is_ok());
    }
}
