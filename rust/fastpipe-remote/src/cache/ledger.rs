//! How many bytes a cache takes, in a file that processes lock in turn.
//!
//! All changes of a cache are made under the lock, and bytes are counted before they are written. So the number may be
//! too large after a process was killed, but never too small. The system releases the lock of a process that ends.

use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::path::Path;
use std::time::{Duration, Instant};

use twox_hash::XxHash3_64;

/// Name of the file in the directory.
const NAME: &str = "fastpipe-blocks.lock";

/// Time between two attempts to lock.
const PAUSE: Duration = Duration::from_millis(1);

/// The locked file. Dropping it releases the lock.
#[derive(Debug)]
pub(crate) struct Ledger {
    file: File,
}

impl Ledger {
    /// Locks the ledger of a directory. `None` if other processes have it for longer than `patience`.
    pub(crate) fn lock(directory: &Path, patience: Duration) -> io::Result<Option<Ledger>> {
        let path = directory.join(NAME);
        let start = Instant::now();
        loop {
            match locked(&path) {
                Ok(file) => return Ok(Some(Ledger { file })),
                Err(error) if !is_busy(&error) => return Err(error),
                Err(_) if start.elapsed() >= patience => return Ok(None),
                Err(_) => std::thread::sleep(PAUSE),
            }
        }
    }

    /// Returns the bytes that are counted. `None` if they aren't known.
    pub(crate) fn used(&mut self) -> io::Result<Option<u64>> {
        let mut entry = Vec::new();
        self.file.seek(SeekFrom::Start(0))?;
        Read::by_ref(&mut self.file).take(17).read_to_end(&mut entry)?;
        let entry: Option<[u8; 16]> = entry.try_into().ok();
        let used = entry.map(|entry| u64::from_le_bytes(entry[..8].try_into().unwrap_or_default()));
        Ok(used.filter(|&used| entry == Some(encoded(used))))
    }

    /// Changes the bytes that are counted.
    pub(crate) fn set(&mut self, used: u64) -> io::Result<()> {
        self.file.seek(SeekFrom::Start(0))?;
        self.file.write_all(&encoded(used))
    }
}

fn encoded(used: u64) -> [u8; 16] {
    let mut entry = [0; 16];
    entry[..8].copy_from_slice(&used.to_le_bytes());
    let sum = XxHash3_64::oneshot_with_seed(1, &entry[..8]);
    entry[8..].copy_from_slice(&sum.to_le_bytes());
    entry
}

fn options() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false);
    options
}

#[cfg(unix)]
fn locked(path: &Path) -> io::Result<File> {
    let file = options().open(path)?;
    rustix::fs::flock(&file, rustix::fs::FlockOperation::NonBlockingLockExclusive)?;
    Ok(file)
}

#[cfg(unix)]
fn is_busy(error: &io::Error) -> bool {
    matches!(error.kind(), io::ErrorKind::WouldBlock | io::ErrorKind::Interrupted)
}

/// A file that is opened without sharing is locked.
#[cfg(windows)]
fn locked(path: &Path) -> io::Result<File> {
    use std::os::windows::fs::OpenOptionsExt;
    options().share_mode(0).open(path)
}

#[cfg(windows)]
fn is_busy(error: &io::Error) -> bool {
    const SHARING_VIOLATION: i32 = 32;
    error.raw_os_error() == Some(SHARING_VIOLATION)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn one_holder_at_a_time_and_damage_is_noticed() {
        let folder = tempfile::tempdir().unwrap();
        let lock = || Ledger::lock(folder.path(), Duration::from_millis(5)).unwrap();
        let mut first = lock().unwrap();
        assert_eq!(first.used().unwrap(), None);
        first.set(77).unwrap();
        assert!(lock().is_none());
        drop(first);
        assert_eq!(lock().unwrap().used().unwrap(), Some(77));
        for damaged in [&b""[..], b"short", &[7; 16], &[0; 1000]] {
            std::fs::write(folder.path().join(NAME), damaged).unwrap();
            assert_eq!(lock().unwrap().used().unwrap(), None);
        }
    }
}
