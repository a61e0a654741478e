//! The directory of a cache: how large its files are, and which of them make room for others.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io;
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};

use twox_hash::XxHash3_64;

use crate::cache::file::{CacheFile, Change, on_disk};
use crate::cache::ledger::Ledger;

/// The suffix of files that cache objects.
const SUFFIX: &str = "blocks";

/// Bytes of the ledger on the disk.
const LEDGER: u64 = 4096;

/// A file that no process has opened for this long may be removed. Processes touch the files of open readers more
/// often.
const IDLE: Duration = Duration::from_secs(24 * 3600);

/// A cache that is full is emptied by this part of its size at once.
const PART: u64 = 16;

/// Time to wait for other processes when bytes are added.
const PATIENCE: Duration = Duration::from_secs(2);

/// Time to wait for other processes when a cache is opened.
const OPENING_PATIENCE: Duration = Duration::from_secs(5);

/// A directory with files of up to `size` bytes.
#[derive(Debug)]
pub(crate) struct Directory {
    path: PathBuf,
    size: u64,
}

/// What became of bytes that were to be stored.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Outcome {
    /// They are in the cache.
    Stored,
    /// Some of them have no room.
    Full,
    /// Other processes had the lock for too long.
    Busy,
}

struct Listed {
    path: PathBuf,
    len: u64,
    used: SystemTime,
}

impl Directory {
    /// Opens a directory, and counts its files again. Creates it if only its last component is missing. Removes the
    /// files that were not used for the longest time if the directory is larger than `size`.
    pub(crate) fn open(path: PathBuf, size: u64) -> io::Result<Self> {
        match private_directory(&path) {
            Err(error) if !path.is_dir() => return Err(error),
            _ => {}
        }
        let directory = Directory { path, size };
        // Another process that holds the lock keeps the count up to date, so that it can be used as it is.
        if let Some(mut ledger) = Ledger::lock(&directory.path, OPENING_PATIENCE)? {
            let listed = directory.listed()?;
            let used = counted(&listed);
            ledger.set(used)?;
            directory.remove_oldest(&mut ledger, listed, used, |used, _| used > size)?;
        }
        Ok(directory)
    }

    /// Returns whether the directory has this path and size.
    pub(crate) fn is(&self, path: &Path, size: u64) -> bool {
        self.path == path && self.size == size
    }

    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns the path of the file for an object.
    pub(crate) fn file_of(&self, object: &str) -> PathBuf {
        self.path
            .join(format!("{:016x}.{SUFFIX}", XxHash3_64::oneshot(object.as_bytes())))
    }

    /// Appends bytes to a file, as far as there is room. Files that aren't `open` and haven't been used for long make
    /// room for them.
    pub(crate) fn store(
        &self,
        file: &CacheFile,
        offset: u64,
        bytes: &[u8],
        open: &dyn Fn() -> HashSet<PathBuf>,
    ) -> io::Result<Outcome> {
        let Some(mut ledger) = Ledger::lock(&self.path, PATIENCE)? else {
            return Ok(Outcome::Busy);
        };
        let used = match ledger.used()? {
            Some(used) => used,
            None => counted(&self.listed()?),
        };
        let append = |ledger: &mut Ledger, mut used: u64| {
            file.append(
                offset,
                bytes,
                self.size.saturating_sub(used),
                &mut |Change { from, to }| {
                    used = used.saturating_sub(from) + to;
                    ledger.set(used)
                },
            )
        };
        if append(&mut ledger, used)? {
            return Ok(Outcome::Stored);
        }
        let (listed, open, now) = (self.listed()?, open(), SystemTime::now());
        let (used, target) = (counted(&listed), self.size - self.size / PART);
        let is_idle = |file: &Listed| {
            let age = now.duration_since(file.used).unwrap_or_default();
            age > IDLE && !open.contains(&file.path)
        };
        let left = self.remove_oldest(&mut ledger, listed, used, |used, file| used > target && is_idle(file))?;
        let fits = left < used && append(&mut ledger, left)?;
        Ok(if fits { Outcome::Stored } else { Outcome::Full })
    }

    /// Removes a file.
    pub(crate) fn remove(&self, path: &Path) -> io::Result<()> {
        let Some(mut ledger) = Ledger::lock(&self.path, PATIENCE)? else {
            return Ok(());
        };
        removed(path)?;
        ledger.set(counted(&self.listed()?))
    }

    /// Removes each file for which `goes` returns true, given the bytes in use, beginning with the one that was not
    /// used for the longest time. Returns the bytes in use after that.
    fn remove_oldest(
        &self,
        ledger: &mut Ledger,
        mut listed: Vec<Listed>,
        mut used: u64,
        goes: impl Fn(u64, &Listed) -> bool,
    ) -> io::Result<u64> {
        listed.sort_by_key(|file| file.used);
        for file in &listed {
            if !goes(used, file) {
                continue;
            }
            removed(&file.path)?;
            used -= on_disk(file.len);
        }
        ledger.set(used)?;
        Ok(used)
    }

    /// Lists the files that cache objects.
    fn listed(&self) -> io::Result<Vec<Listed>> {
        let mut found = Vec::new();
        for entry in std::fs::read_dir(&self.path)? {
            let path = entry?.path();
            let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
            let is_digest = stem.len() == 16 && stem.bytes().all(|byte| byte.is_ascii_hexdigit());
            if !is_digest || path.extension().is_none_or(|suffix| suffix != SUFFIX) {
                continue;
            }
            // Another program may have removed it.
            if let Ok(metadata) = path.symlink_metadata()
                && metadata.is_file()
            {
                let used = metadata.modified()?;
                let len = metadata.len();
                found.push(Listed { path, len, used });
            }
        }
        Ok(found)
    }
}

fn counted(listed: &[Listed]) -> u64 {
    LEDGER + listed.iter().map(|file| on_disk(file.len)).sum::<u64>()
}

/// Removes a file. Its space is free at once, even if another process is reading it.
fn removed(path: &Path) -> io::Result<()> {
    _ = OpenOptions::new().write(true).truncate(true).open(path);
    match std::fs::remove_file(path) {
        Err(error) if error.kind() != io::ErrorKind::NotFound => Err(error),
        _ => Ok(()),
    }
}

/// Creates a directory that only its owner can read: the objects may be secret.
fn private_directory(path: &Path) -> io::Result<()> {
    let mut builder = std::fs::DirBuilder::new();
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    #[cfg(not(unix))]
    let _ = &mut builder;
    builder.create(path)
}
