//! A directory that caches the indexes of files, so that later openings need not search for units.
//!
//! There is one entry per file and [format tag](crate::Format::cache_tag), named by a hash of both. An entry consists
//! of
//!
//! | bytes | content |
//! |---|---|
//! | 8 | [`MAGIC`], whose last byte is the version of this layout; entries of other versions have other names |
//! | 4 | CRC-32 of everything after it, little-endian |
//! | any | the [`Key`], in [postcard's wire format](https://postcard.jamesmunns.com/wire-format) |
//! | the rest | the index as encoded by the format, opaque to this module |
//!
//! An entry is valid as long as the key is the same. If a file has grown, its old entry can serve as the beginning of
//! the new one, [if the format supports that](crate::Format::decode_front). Entries are untrusted: an entry that
//! doesn't match is treated as missing.
//!
//! # Coarse clocks
//!
//! A key contains the file's size and modification time. If a file changes twice within one tick of its file system's
//! clock (2 s on FAT, milliseconds elsewhere), its modification time stays the same. An index built between the two
//! changes would then still match after the second one. In Git's terms, such a file is "racily clean". Git compares the
//! contents in this case; this cache instead doesn't store an index. [`Stamp::is_settled`] returns whether the
//! modification time was old enough *before* the search for units. Any later change then results in a different time.

use std::borrow::Cow;
use std::fs::File;
use std::io::{self, Read, Write};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::time::{Duration, SystemTime};

use fastpipe_batch::{Error, ErrorKind, FileStamp, ReadAt, Result, text_path};
use serde::{Deserialize, Serialize};
use siphasher::sip128::SipHasher24;

use crate::storage::{SourceFile, nanoseconds};

/// The first bytes of an entry.
const MAGIC: [u8; 8] = *b"FPINDEX\x01";

/// The file name suffix of an entry, which includes the version.
const SUFFIX: &str = "index1";

/// Bytes of the magic number and the checksum.
const PREFIX: usize = MAGIC.len() + size_of::<u32>();

/// A modification time is trusted if its age exceeds the tick of any file system's clock.
const COARSEST_CLOCK: Duration = Duration::from_secs(2);

/// Maximum bytes of an entry in addition to the file's size and the path: for the key and lengths.
const SLACK: u64 = 4096;

/// Attempts to move an entry to its place. On Windows, other processes may hold it open.
const ATTEMPTS: u32 = if cfg!(windows) { 8 } else { 1 };

/// Evidence of whether a local file has changed.
#[derive(Clone, Copy, Debug)]
pub struct Stamp {
    file: FileStamp,
    /// Time of the observation, in nanoseconds since 1970.
    seen: i128,
}

impl Stamp {
    /// Observes a file.
    pub fn of(file: &SourceFile) -> Result<Stamp> {
        // Read the clock first: if the file changes in between, it then looks younger than it is, never older.
        let seen = nanoseconds(SystemTime::now());
        let file = file.stamp()?;
        Ok(Stamp { file, seen })
    }

    /// Returns the file's size and modification time.
    pub fn file(&self) -> FileStamp {
        self.file
    }

    /// Returns the size of the file in bytes.
    pub fn size(&self) -> u64 {
        self.file.size
    }

    /// Whether both stamps belong to the same contents, as far as size and time can show.
    pub fn same(&self, other: &Stamp) -> bool {
        self.file == other.file
    }

    /// Whether every later change is certain to alter the modification time. If the time is in the future, this is
    /// false, because the clock of a file server may be ahead.
    pub fn is_settled(&self) -> bool {
        self.seen - self.file.modified > COARSEST_CLOCK.as_nanos() as i128
    }
}

/// Identifies what an index was built from. Add new variants at the end: their positions are part of the layout of
/// entries.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[non_exhaustive]
pub enum Key {
    /// A local file.
    Local {
        /// Absolute path of the file, with symbolic links resolved.
        path: Vec<u8>,
        /// Size of the file in bytes.
        size: u64,
        /// Modification time in nanoseconds since 1970.
        modified: i128,
    },
    /// A local file that may have several indexes.
    Tagged {
        /// Tag of the index: see [`Format::cache_tag`](crate::Format::cache_tag).
        tag: Vec<u8>,
        /// Absolute path of the file, with symbolic links resolved.
        path: Vec<u8>,
        /// Size of the file in bytes.
        size: u64,
        /// Modification time in nanoseconds since 1970.
        modified: i128,
    },
    /// A file in another storage.
    Remote {
        /// Tag of the index: see [`Format::cache_tag`](crate::Format::cache_tag).
        tag: Vec<u8>,
        /// URL of the file.
        url: String,
        /// A text that another version of the file doesn't have.
        version: String,
        /// Size of the file in bytes.
        size: u64,
        /// Modification time in nanoseconds since 1970.
        modified: i128,
    },
}

impl Key {
    /// Returns the key of a local file for the index with this tag.
    pub fn local(path: &str, stamp: &Stamp, tag: &[u8]) -> Result<Key> {
        // Several names of one file share an entry. An open file that has been deleted is identified by its former
        // path.
        let real = text_path(path);
        let path = std::fs::canonicalize(&*real)
            .or_else(|_| std::path::absolute(&*real))
            .map_err(|e| Error::io(path, &e))?;
        let path = path.into_os_string().into_encoded_bytes();
        let FileStamp { size, modified } = stamp.file;
        Ok(if tag.is_empty() {
            Key::Local { path, size, modified }
        } else {
            let tag = tag.to_vec();
            Key::Tagged {
                tag,
                path,
                size,
                modified,
            }
        })
    }

    /// Returns the key of a file for the index with this tag.
    pub fn of(file: &SourceFile, stamp: &Stamp, tag: &[u8]) -> Result<Key> {
        let Some(remote) = file.remote() else {
            return Key::local(file.location(), stamp, tag);
        };
        let FileStamp { size, modified } = stamp.file;
        Ok(Key::Remote {
            tag: tag.to_vec(),
            url: file.location().to_owned(),
            version: remote.version().to_owned(),
            size,
            modified,
        })
    }

    /// Returns the name of the index, which doesn't depend on the file's contents.
    fn name(&self) -> Cow<'_, [u8]> {
        match self {
            Key::Local { path, .. } => path.into(),
            // A path can't contain a zero byte, so names are unique.
            Key::Tagged { tag, path, .. } => [&path[..], tag].join(&0).into(),
            // No absolute path begins like a URL.
            Key::Remote { tag, url, .. } => [url.as_bytes(), tag].join(&0).into(),
        }
    }

    /// Returns the size of the file in bytes.
    fn size(&self) -> u64 {
        let (Key::Local { size, .. } | Key::Tagged { size, .. } | Key::Remote { size, .. }) = self;
        *size
    }

    /// Returns the maximum size of an entry. An index is smaller than the file, so larger entries aren't read.
    fn most(&self) -> u64 {
        self.size().saturating_add(self.name().len() as u64 + SLACK)
    }
}

/// The result of a look-up in the cache.
#[derive(Debug, PartialEq, Eq)]
pub enum Lookup {
    /// An index, and the size of its entry in bytes.
    Found(Vec<u8>, u64),
    /// An index from when the file was smaller, and the size that the file had.
    Smaller(Vec<u8>, u64),
    /// No entry, or an entry for different contents of the file.
    Missing,
    /// A damaged entry, with a description of the damage.
    Damaged(String),
}

/// A directory of indexes. Any number of processes may use it concurrently.
#[derive(Debug)]
pub struct IndexCache {
    directory: PathBuf,
    /// Set after a file could be written to the directory.
    writable: OnceLock<()>,
}

impl IndexCache {
    /// Opens a directory, and creates it if it doesn't exist.
    pub fn open(directory: &Path) -> Result<IndexCache> {
        let cache = IndexCache {
            directory: directory.to_owned(),
            writable: OnceLock::new(),
        };
        std::fs::create_dir_all(directory).map_err(|e| cache.unwritable(&e))?;
        Ok(cache)
    }

    /// Returns the path of the entry for a key.
    pub fn path(&self, key: &Key) -> PathBuf {
        // SipHash is specified, so names stay the same across versions of Rust and fastpipe.
        let hash = SipHasher24::new().hash(&key.name()).as_u128();
        self.directory.join(format!("{hash:032x}.{SUFFIX}"))
    }

    /// Looks up the index of a file whose contents match the key.
    pub fn load(&self, key: &Key) -> Lookup {
        match read_whole(&self.path(key), key.most()) {
            Ok(None) => Lookup::Missing,
            Ok(Some(bytes)) => parse(bytes, key),
            Err(e) => Lookup::Damaged(e.to_string()),
        }
    }

    /// Checks that entries can be written, so that no walk through a file is wasted.
    pub fn check_writable(&self) -> Result<()> {
        if self.writable.get().is_none() {
            self.temporary().map_err(|e| self.unwritable(&e))?;
            self.writable.get_or_init(|| ());
        }
        Ok(())
    }

    /// Stores an index, and replaces an older one. Other processes see either the old or the new entry, never a partial
    /// one. Returns the size of the entry in bytes.
    pub fn store(&self, key: &Key, index: &[u8]) -> Result<u64> {
        let bytes = render(key, index);
        let write = || {
            let mut file = self.temporary()?;
            // A sync isn't needed: the checksum detects an entry damaged by a system crash.
            file.write_all(&bytes)?;
            Ok(file.into_temp_path())
        };
        let mut written = write().map_err(|e| self.unwritable(&e))?;
        for attempt in 1.. {
            let Err(failed) = written.persist(self.path(key)) else {
                break;
            };
            // Windows doesn't replace a file that is open. Most likely, another process is writing or reading the same
            // index.
            if matches!(self.load(key), Lookup::Found(found, _) if found == index) {
                break;
            }
            if attempt == ATTEMPTS {
                return Err(self.unwritable(&failed.error));
            }
            std::thread::sleep(Duration::from_millis(1 << attempt));
            written = failed.path;
        }
        Ok(bytes.len() as u64)
    }

    fn temporary(&self) -> io::Result<tempfile::NamedTempFile> {
        let mut builder = tempfile::Builder::new();
        builder.prefix(".tmp-");
        // Use the default permissions of files: the directory may be shared, and entries contain no secrets.
        #[cfg(unix)]
        builder.permissions(std::os::unix::fs::PermissionsExt::from_mode(0o666));
        builder.tempfile_in(&self.directory)
    }

    #[cold]
    fn unwritable(&self, error: &io::Error) -> Error {
        let reason = format!(
            "block indexes can't be written to this directory: {error}. Choose a writable one (index_cache=... in \
             Python, --cache on the command line), or don't use index_cache"
        );
        Error::new(ErrorKind::Storage, reason).at_path(&self.directory.to_string_lossy())
    }
}

/// Returns the bytes of an entry. Returns `None` if it doesn't exist, or exceeds `most` bytes because it was built from
/// a larger file.
fn read_whole(path: &Path, most: u64) -> io::Result<Option<Vec<u8>>> {
    let open = || {
        // Check the type before opening: opening a pipe would block until a writer opens it.
        if !std::fs::metadata(path)?.is_file() {
            return Err(io::Error::other("it is not a file"));
        }
        File::open(path)
    };
    let file = match open() {
        Err(e) if e.kind() == io::ErrorKind::NotFound => return Ok(None),
        opened => opened?,
    };
    let mut bytes = Vec::new();
    let read = file.take(most.saturating_add(1)).read_to_end(&mut bytes)? as u64;
    Ok((read <= most).then_some(bytes))
}

fn render(key: &Key, index: &[u8]) -> Vec<u8> {
    let mut bytes = MAGIC.to_vec();
    bytes.extend([0; PREFIX - MAGIC.len()]);
    let mut bytes = postcard::to_extend(key, bytes).expect("writing to memory doesn't fail");
    bytes.extend_from_slice(index);
    let checksum = crc32fast::hash(&bytes[PREFIX..]);
    bytes[MAGIC.len()..PREFIX].copy_from_slice(&checksum.to_le_bytes());
    bytes
}

fn parse(mut bytes: Vec<u8>, key: &Key) -> Lookup {
    let damaged = |what: &str| Lookup::Damaged(what.to_owned());
    let Some((prefix, rest)) = bytes.split_first_chunk::<PREFIX>() else {
        return damaged("it is cut short");
    };
    if prefix[..MAGIC.len()] != MAGIC {
        return damaged("its first bytes are wrong");
    }
    if prefix[MAGIC.len()..] != crc32fast::hash(rest).to_le_bytes() {
        return damaged("its checksum is wrong");
    }
    let (found, start) = match postcard::take_from_bytes::<Key>(rest) {
        Ok((found, index)) => (found, bytes.len() - index.len()),
        Err(_) => return damaged("its key is invalid"),
    };
    let entry = bytes.len() as u64;
    match found == *key {
        true => Lookup::Found(bytes.split_off(start), entry),
        false if found.name() == key.name() && found.size() < key.size() => {
            Lookup::Smaller(bytes.split_off(start), found.size())
        }
        false => Lookup::Missing,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn key(path: &str, size: u64, modified: i128) -> Key {
        let path = path.as_bytes().to_vec();
        Key::Local { path, size, modified }
    }

    fn found(index: &[u8], key: &Key) -> Lookup {
        Lookup::Found(index.to_vec(), render(key, index).len() as u64)
    }

    #[test]
    fn entries_are_found_by_their_key() {
        let folder = tempfile::tempdir().unwrap();
        let cache = IndexCache::open(&folder.path().join("a/b")).unwrap();
        let new = key("/x", 7, -3);
        assert_eq!(cache.load(&new), Lookup::Missing);
        cache.store(&new, b"one").unwrap();
        let bytes = cache.store(&new, b"two").unwrap();
        assert_eq!(cache.load(&new), found(b"two", &new));
        assert_eq!(std::fs::metadata(cache.path(&new)).unwrap().len(), bytes);
        for other in [key("/x", 6, -3), key("/x", 7, 3), key("/y", 8, -3)] {
            assert_eq!(cache.load(&other), Lookup::Missing);
        }
        // The file has grown.
        for grown in [key("/x", 8, -3), key("/x", 70, 3)] {
            assert_eq!(cache.load(&grown), Lookup::Smaller(b"two".to_vec(), 7));
        }
        // Simulates a hash collision with another file.
        std::fs::rename(cache.path(&new), cache.path(&key("/y", 7, -3))).unwrap();
        assert_eq!(cache.load(&key("/y", 7, -3)), Lookup::Missing);
        assert_eq!(std::fs::read_dir(folder.path().join("a/b")).unwrap().count(), 1);
    }

    #[test]
    fn tags_distinguish_indexes_of_one_file() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("file");
        std::fs::write(&path, b"content").unwrap();
        let stamp = Stamp::of(&SourceFile::open(path.to_str().unwrap()).unwrap()).unwrap();
        let cache = IndexCache::open(folder.path()).unwrap();
        let keys = [&b""[..], b"a", b"b"].map(|tag| Key::local(path.to_str().unwrap(), &stamp, tag).unwrap());
        assert!(matches!(keys[0], Key::Local { .. }));
        for (i, key) in keys.iter().enumerate() {
            cache.store(key, &[i as u8; 20]).unwrap();
        }
        for (i, key) in keys.iter().enumerate() {
            assert_eq!(cache.load(key), found(&[i as u8; 20], key));
        }
        // Simulates a hash collision with another tag.
        std::fs::rename(cache.path(&keys[1]), cache.path(&keys[2])).unwrap();
        assert_eq!(cache.load(&keys[2]), Lookup::Missing);
    }

    #[test]
    fn entry_names_never_change() {
        let cache = IndexCache {
            directory: "d".into(),
            writable: OnceLock::new(),
        };
        let path = cache.path(&key("/data/part-0.avro", 1, 1));
        assert_eq!(path, Path::new("d").join("7760de57efb29a78bfb25c32cff40c54.index1"));
    }

    #[test]
    fn every_truncation_and_changed_byte_is_detected() {
        let key = key("/x", 7, 1 << 60);
        let whole = render(&key, b"blocks");
        assert_eq!(parse(whole.clone(), &key), found(b"blocks", &key));
        for n in 0..whole.len() {
            assert!(matches!(parse(whole[..n].to_vec(), &key), Lookup::Damaged(_)), "{n}");
            for bit in 0..8 {
                let mut bytes = whole.clone();
                bytes[n] ^= 1 << bit;
                assert!(matches!(parse(bytes, &key), Lookup::Damaged(_)), "{n}");
            }
        }
    }

    #[test]
    fn large_entries_and_directories_are_not_read() {
        let folder = tempfile::tempdir().unwrap();
        let cache = IndexCache::open(folder.path()).unwrap();
        let key = key("/x", 7, 0);
        let file = std::fs::File::create(cache.path(&key)).unwrap();
        file.set_len(1 << 24).unwrap();
        assert_eq!(cache.load(&key), Lookup::Missing);
        std::fs::remove_file(cache.path(&key)).unwrap();
        std::fs::create_dir(cache.path(&key)).unwrap();
        assert!(matches!(cache.load(&key), Lookup::Damaged(_)));
        assert_eq!(cache.store(&key, b"").unwrap_err().kind(), ErrorKind::Storage);
    }

    #[test]
    fn a_file_in_the_place_of_the_directory_is_a_typed_error() {
        let file = tempfile::NamedTempFile::new().unwrap();
        for path in [file.path().to_owned(), file.path().join("below")] {
            let error = IndexCache::open(&path).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Storage);
            assert!(error.reason().contains("index_cache"));
        }
    }

    #[test]
    fn only_files_modified_long_ago_are_settled() {
        for (age, settled) in [(-5, false), (0, false), (1_999_999_999, false), (2_000_000_001, true)] {
            let modified = 100 - age;
            let stamp = Stamp {
                file: FileStamp { size: 1, modified },
                seen: 100,
            };
            assert_eq!(stamp.is_settled(), settled, "{age}");
        }
    }

    #[test]
    fn stamps_distinguish_files_by_size_and_time() {
        let file = tempfile::NamedTempFile::new().unwrap();
        let day = Duration::from_secs(86_400);
        let look = |time: SystemTime| {
            file.as_file().set_modified(time).unwrap();
            Stamp::of(&SourceFile::open(file.path().to_str().unwrap()).unwrap()).unwrap()
        };
        let now = SystemTime::now();
        let old = look(now - day);
        assert!(old.is_settled() && old.same(&look(now - day)));
        assert!(!old.same(&look(now - 2 * day)));
        assert!(!look(now + day).is_settled());
        assert!(look(SystemTime::UNIX_EPOCH - day).is_settled());
        file.as_file().write_all(b"x").unwrap();
        let longer = look(now - day);
        assert!(!old.same(&longer) && longer.size() == 1);
    }

    proptest! {
        #[test]
        fn entries_round_trip(path: String, size: u64, modified: i128, index: Vec<u8>) {
            let key = key(&path, size, modified);
            prop_assert_eq!(parse(render(&key, &index), &key), found(&index, &key));
        }

        #[test]
        fn any_bytes_are_taken(bytes: Vec<u8>, sealed: bool) {
            let mut entry = bytes;
            if sealed {
                let checksum = crc32fast::hash(&entry).to_le_bytes();
                entry.splice(0..0, MAGIC.into_iter().chain(checksum));
            }
            prop_assert!(!matches!(parse(entry, &key("/x", 7, 0)), Lookup::Found(..)));
        }
    }
}
