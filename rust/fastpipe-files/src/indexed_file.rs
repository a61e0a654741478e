//! Opening a file and its blocks: from the index cache if possible, otherwise by a walk.

use std::sync::Arc;

use fastpipe_batch::{FileStamp, ReadAt, Result, shown_path};

use crate::format::Format;
use crate::head::{HEAD_BYTES, Head};
use crate::index_cache::{IndexCache, Key, Lookup, Stamp};
use crate::log_record::LogRecord;
use crate::progress::{Halt, OnProgress};
use crate::storage::SourceFile;
use crate::walk::{check_all_empty, walk, walk_front, walk_on};

/// The outcome for a file's cache entry.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum CacheOutcome {
    /// No cache is used.
    Disabled,
    /// The file needs no entry: it is read as a whole with its header.
    TooSmall,
    /// A valid entry existed.
    Hit,
    /// An entry was written.
    Stored,
    /// No entry was written: the file was modified so recently that another change might go unnoticed.
    TooRecent,
    /// No entry was written: the file changed during the walk.
    FileChanged,
}

/// An open file with its blocks.
pub struct Opened<F: Format> {
    /// Path of the file, as text.
    pub path: Arc<str>,
    /// Contents of its header.
    pub header: F::Header,
    /// Its blocks, in sequence.
    pub blocks: Vec<F::Block>,
    /// Size and modification time before anything was read.
    pub stamp: FileStamp,
    /// Messages to log.
    pub notes: Vec<LogRecord>,
    /// The outcome for its cache entry.
    pub kept: CacheOutcome,
    /// Size of the cache entry in bytes.
    pub entry: u64,
}

/// A file whose header was read, but whose blocks haven't been found yet.
struct Begun<'f, F: Format> {
    head: Head<'f>,
    stamp: Stamp,
    opened: Opened<F>,
}

impl<'f, F: Format> Begun<'f, F> {
    fn new(format: &F, file: &'f SourceFile, path: &Arc<str>) -> Result<Self> {
        // Take the stamp before reading anything. Any later change then shows in the stamp after the walk, in the key
        // of the next opening, or when the file is read.
        let stamp = Stamp::of(file)?;
        let head = Head::read(file, stamp.size())?;
        let opened = Opened {
            path: path.clone(),
            header: format.read_header(path, &head)?,
            blocks: Vec::new(),
            stamp: stamp.file(),
            notes: Vec::new(),
            kept: CacheOutcome::Disabled,
            entry: 0,
        };
        Ok(Begun { head, stamp, opened })
    }
}

/// Finds the blocks of a file that is already open. Calls `on_progress` every few milliseconds with the number of bytes
/// processed.
///
/// # Errors
/// If the file can't be read or is damaged; if its index can't be written to the cache; any error of `on_progress`.
pub(crate) fn open_file<F: Format, E>(
    format: &F,
    file: &SourceFile,
    path: &Arc<str>,
    cache: Option<&IndexCache>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Opened<F>, Halt<E>> {
    let Begun {
        head,
        stamp,
        mut opened,
    } = Begun::new(format, file, path)?;
    match cache {
        None => opened.blocks = walk(format, &head, &opened.header, on_progress)?,
        Some(cache) if open_checksummed(format, &head, file, &stamp, cache, &mut opened, on_progress)? => {}
        Some(_) if stamp.size() <= HEAD_BYTES && !F::INDEXES_SMALL_FILES => {
            opened.kept = CacheOutcome::TooSmall;
            opened.blocks = walk(format, &head, &opened.header, on_progress)?;
        }
        Some(cache) => open_cached(format, &head, file, stamp, cache, &mut opened, on_progress)?,
    }
    Ok(opened)
}

/// Finds the blocks before the damage in a file that is already open. Returns `None` if the header is damaged.
///
/// # Errors
/// If memory for its index can't be allocated; any error of `on_progress`.
pub(crate) fn open_file_front<F: Format, E>(
    format: &F,
    file: &SourceFile,
    path: &Arc<str>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Option<Opened<F>>, Halt<E>> {
    let Ok(Begun { head, mut opened, .. }) = Begun::new(format, file, path) else {
        return Ok(None);
    };
    opened.blocks = walk_front(format, &head, &opened.header, on_progress)?;
    Ok(Some(opened))
}

/// Finds the blocks of a file in the index that also has checksums. Returns whether it exists.
fn open_checksummed<F: Format, E>(
    format: &F,
    head: &Head<'_>,
    file: &SourceFile,
    stamp: &Stamp,
    cache: &IndexCache,
    opened: &mut Opened<F>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<bool, Halt<E>> {
    let Some(tag) = format.checksums_tag() else {
        return Ok(false);
    };
    let entry = Entry {
        cache,
        key: Key::of(file, stamp, tag)?,
        // Only the other format can create the checksums again.
        remedy: "reading without its checksums. Create it again with fastpipe index --checksums",
    };
    let Loaded::Whole(blocks, entry) = load(format, &entry, head, opened, on_progress)? else {
        return Ok(false);
    };
    on_progress(stamp.size()).map_err(Halt::Interrupted)?;
    (opened.blocks, opened.kept, opened.entry) = (blocks, CacheOutcome::Hit, entry);
    Ok(true)
}

/// Finds the blocks of a file using the cache, and updates the cache.
fn open_cached<F: Format, E>(
    format: &F,
    head: &Head<'_>,
    file: &SourceFile,
    before: Stamp,
    cache: &IndexCache,
    opened: &mut Opened<F>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<(), Halt<E>> {
    let entry = Entry {
        cache,
        key: Key::of(file, &before, format.cache_tag())?,
        remedy: "rebuilding it",
    };
    let front = match load(format, &entry, head, opened, on_progress)? {
        Loaded::Whole(blocks, entry) => {
            on_progress(before.size()).map_err(Halt::Interrupted)?;
            (opened.blocks, opened.kept, opened.entry) = (blocks, CacheOutcome::Hit, entry);
            return Ok(());
        }
        Loaded::Front(blocks, size) => {
            let path = shown_path(&opened.path);
            let text = format!(
                "the block index of {path} is extended: the file grew from {size} to {} bytes",
                before.size()
            );
            opened.notes.push(LogRecord::info(text));
            blocks
        }
        Loaded::Nothing => Vec::new(),
    };
    cache.check_writable()?;
    opened.blocks = walk_on(format, head, &opened.header, front, on_progress)?;
    (opened.kept, opened.entry) = keep(format, &entry, &before, file, opened)?;
    if matches!(opened.kept, CacheOutcome::TooRecent | CacheOutcome::FileChanged) {
        let why = "the file was modified a moment ago, or its modification time is in the future";
        let text = format!("the block index of {} was not saved: {why}", shown_path(&opened.path));
        opened.notes.push(LogRecord::info(text));
    }
    Ok(())
}

/// The entry of a file in the cache.
struct Entry<'a> {
    cache: &'a IndexCache,
    key: Key,
    /// What happens if the entry is damaged, for the message.
    remedy: &'static str,
}

impl Entry<'_> {
    fn damaged(&self, path: &str, damage: &str) -> LogRecord {
        let (entry, path) = (self.cache.path(&self.key), shown_path(path));
        let text = format!(
            "the block index of {path} in {} is damaged ({damage}): {}",
            entry.display(),
            self.remedy
        );
        LogRecord::warning(text)
    }
}

/// Blocks of a file from the cache.
enum Loaded<F: Format> {
    /// All blocks, and the size of the entry in bytes.
    Whole(Vec<F::Block>, u64),
    /// The first blocks, and the size that the file had when they were found.
    Front(Vec<F::Block>, u64),
    Nothing,
}

/// Loads the blocks of a file from the cache. Adds a message to the file's log records if the entry is damaged.
fn load<F: Format, E>(
    format: &F,
    entry: &Entry<'_>,
    file: &dyn ReadAt,
    opened: &mut Opened<F>,
    on_progress: &mut OnProgress<'_, E>,
) -> Result<Loaded<F>, Halt<E>> {
    let header = &opened.header;
    let (size, bytes, entry_size) = match entry.cache.load(&entry.key) {
        Lookup::Missing => return Ok(Loaded::Nothing),
        Lookup::Damaged(reason) => {
            opened.notes.push(entry.damaged(&opened.path, &reason));
            return Ok(Loaded::Nothing);
        }
        Lookup::Found(bytes, entry_size) => (opened.stamp.size, bytes, entry_size),
        Lookup::Smaller(bytes, size) => (size, bytes, 0),
    };
    let grown = size < opened.stamp.size;
    let blocks = match grown {
        true => format.decode_front(file, header, &bytes),
        false => format.decode(header, &bytes, size),
    };
    let failed = match blocks {
        Ok(None) => return Ok(Loaded::Nothing),
        Ok(Some(blocks)) => match check_all_empty(format, file, header, &blocks, on_progress) {
            Ok(()) if grown => return Ok(Loaded::Front(blocks, size)),
            Ok(()) => return Ok(Loaded::Whole(blocks, entry_size)),
            Err(Halt::Failed(error)) => error,
            Err(halt) => return Err(halt),
        },
        Err(error) => error,
    };
    opened.notes.push(entry.damaged(&opened.path, failed.reason()));
    Ok(Loaded::Nothing)
}

/// Writes the blocks of a file to the cache, unless a change of the file might go unnoticed.
fn keep<F: Format>(
    format: &F,
    entry: &Entry<'_>,
    before: &Stamp,
    file: &SourceFile,
    opened: &Opened<F>,
) -> Result<(CacheOutcome, u64)> {
    if !Stamp::of(file)?.same(before) {
        return Ok((CacheOutcome::FileChanged, 0));
    }
    if !before.is_settled() {
        return Ok((CacheOutcome::TooRecent, 0));
    }
    let index = format.encode(&opened.header, &opened.blocks)?;
    Ok((CacheOutcome::Stored, entry.cache.store(&entry.key, &index)?))
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::path::Path;

    use fastpipe_batch::ErrorKind;

    use super::*;
    use crate::log_record::Level;
    use crate::toy::{HEADER, Toy, file, many, write};

    fn open<F: Format, E>(
        format: &F,
        path: &Arc<str>,
        cache: Option<&IndexCache>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Opened<F>, Halt<E>> {
        open_file(format, &SourceFile::open(path)?, path, cache, on_progress)
    }

    fn open_front<F: Format, E>(
        format: &F,
        path: &Arc<str>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Option<Opened<F>>, Halt<E>> {
        open_file_front(format, &SourceFile::open(path)?, path, on_progress)
    }

    fn never(_: u64) -> Result<(), Infallible> {
        Ok(())
    }

    fn opened(format: &Toy, path: &Arc<str>, cache: Option<&IndexCache>) -> Opened<Toy> {
        open(format, path, cache, &mut never).unwrap_or_else(|halt| panic!("{halt:?}"))
    }

    fn failure(path: &Arc<str>, cache: Option<&IndexCache>) -> fastpipe_batch::Error {
        match open(&Toy::default(), path, cache, &mut never) {
            Err(Halt::Failed(error)) => error,
            _ => panic!("the call must fail"),
        }
    }

    /// Returns the only entry in a cache directory.
    fn entry(cache: &Path) -> std::path::PathBuf {
        let mut entries = std::fs::read_dir(cache).unwrap().map(|entry| entry.unwrap().path());
        let entry = entries.next().unwrap();
        assert!(entries.next().is_none());
        entry
    }

    struct Place {
        folder: tempfile::TempDir,
        cache: IndexCache,
        format: Toy,
    }

    impl Place {
        fn new() -> Place {
            let folder = tempfile::tempdir().unwrap();
            let cache = IndexCache::open(&folder.path().join("cache")).unwrap();
            let format = Toy::default();
            Place { folder, cache, format }
        }

        fn write(&self, bytes: &[u8]) -> Arc<str> {
            write(self.folder.path(), "file", bytes)
        }

        fn opened(&self, path: &Arc<str>) -> Opened<Toy> {
            opened(&self.format, path, Some(&self.cache))
        }
    }

    #[test]
    fn a_second_opening_needs_no_walk() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let plain = opened(&Toy::default(), &path, None);
        assert_eq!((plain.kept, plain.entry), (CacheOutcome::Disabled, 0));
        let first = place.opened(&path);
        assert_eq!((first.kept, place.format.walks()), (CacheOutcome::Stored, 1));
        let second = place.opened(&path);
        assert_eq!((second.kept, place.format.walks()), (CacheOutcome::Hit, 1));
        let bytes = std::fs::metadata(entry(&place.folder.path().join("cache")))
            .unwrap()
            .len();
        assert_eq!((first.entry, second.entry), (bytes, bytes));
        for opened in [&first, &second] {
            assert_eq!(opened.blocks, plain.blocks);
            assert_eq!((&opened.header, &opened.path), (&plain.header, &path));
            assert!(opened.notes.is_empty());
        }
        assert_eq!(plain.blocks.last().unwrap().end(), plain.stamp.size);
    }

    #[test]
    fn files_read_with_their_header_need_no_cache() {
        let place = Place::new();
        let small = place.write(&file(b'x', &[(1, 2), (3, 4)]));
        let found = place.opened(&small);
        assert_eq!((found.kept, found.blocks.len()), (CacheOutcome::TooSmall, 2));
        let none = place.write(b"toyx");
        assert_eq!(place.opened(&none).blocks, []);
        assert_eq!(std::fs::read_dir(place.folder.path().join("cache")).unwrap().count(), 0);
    }

    #[test]
    fn a_file_that_changed_is_walked_again() {
        let place = Place::new();
        let mut blocks = many();
        let path = place.write(&file(b'x', &blocks));
        assert_eq!(place.opened(&path).kept, CacheOutcome::Stored);
        blocks[7].0 += 1;
        // The size is the same, but the modification time differs.
        let path = place.write(&file(b'x', &blocks));
        let again = place.opened(&path);
        assert_eq!(
            (again.kept, again.blocks[7].rows),
            (CacheOutcome::Stored, u32::from(blocks[7].0))
        );
        blocks.push((9, 9));
        let path = place.write(&file(b'x', &blocks));
        assert_eq!(place.opened(&path).blocks.len(), blocks.len());
        assert_eq!(place.opened(&path).kept, CacheOutcome::Hit);
        assert_eq!(place.format.walks(), 3);
    }

    #[test]
    fn the_index_of_a_file_that_has_grown_is_extended() {
        let place = Place {
            format: Toy {
                grows: true,
                ..Toy::default()
            },
            ..Place::new()
        };
        let mut blocks = many();
        let before = place.opened(&place.write(&file(b'x', &blocks)));
        blocks.last_mut().unwrap().0 += 1;
        blocks.extend([(7, 7), (0, 0), (9, 9)]);
        let path = place.write(&file(b'x', &blocks));
        let grown = place.opened(&path);
        assert_eq!(
            (grown.kept, &grown.blocks),
            (CacheOutcome::Stored, &opened(&Toy::default(), &path, None).blocks)
        );
        assert_eq!(grown.blocks[..299], before.blocks[..299]);
        let [note] = &grown.notes[..] else { panic!() };
        assert_eq!(note.level, Level::Info);
        let sizes = format!(
            "is extended: the file grew from {} to {} bytes",
            before.stamp.size, grown.stamp.size
        );
        assert!(note.text.contains(&sizes), "{}", note.text);
        assert_eq!(place.opened(&path).kept, CacheOutcome::Hit);
        // A file that has shrunk or has another header is walked completely.
        blocks.pop();
        assert!(place.opened(&place.write(&file(b'x', &blocks))).notes.is_empty());
        blocks.push((1, 1));
        let other = place.opened(&place.write(&file(b'y', &blocks)));
        assert!(other.notes.is_empty() && other.blocks.len() == blocks.len());
        // A block that was empty now contains rows.
        let mut rewritten = file(b'y', &blocks);
        let at = rewritten.len() - 3 - 2;
        assert_eq!(rewritten[at..at + 2], [0, 0]);
        rewritten[at] = 1;
        rewritten.extend([1, 1, b'd']);
        let again = place.opened(&place.write(&rewritten));
        assert_eq!((again.blocks.len(), again.notes.len()), (blocks.len() + 1, 1));
        assert!(
            again.notes[0].text.contains("is damaged (it isn't empty)"),
            "{}",
            again.notes[0].text
        );
    }

    #[test]
    fn an_entry_for_another_header_is_ignored() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let time = std::fs::metadata(&*path).unwrap().modified().unwrap();
        place.opened(&path);
        // The size and modification time are the same.
        std::fs::write(&*path, file(b'y', &many())).unwrap();
        let open = std::fs::File::options().write(true).open(&*path).unwrap();
        open.set_modified(time).unwrap();
        let again = place.opened(&path);
        assert_eq!((again.kept, again.header.name), (CacheOutcome::Stored, b'y'));
        assert!(again.notes.is_empty());
    }

    #[test]
    fn a_damaged_entry_is_reported_and_replaced() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let blocks = place.opened(&path).blocks;
        let kept = entry(&place.folder.path().join("cache"));
        let sound = std::fs::read(&kept).unwrap();
        let stamp = Stamp::of(&SourceFile::open(&path).unwrap()).unwrap();
        let key = Key::local(&path, &stamp, b"").unwrap();
        let write_index = |index: &[u8]| assert!(place.cache.store(&key, index).unwrap() > 0);
        let damages: [(&str, &dyn Fn()); 4] = [
            ("it is cut short", &|| std::fs::write(&kept, b"FP").unwrap()),
            ("its checksum is wrong", &|| {
                let mut bytes = sound.clone();
                *bytes.last_mut().unwrap() ^= 1;
                std::fs::write(&kept, bytes).unwrap();
            }),
            ("its blocks don't cover the file", &|| write_index(b"x\x01\x02")),
            // The entry is valid, but its blocks don't match the file, which the format detects.
            ("it isn't empty", &|| {
                let mut index = place.format.encode(&plain_header(&path), &blocks).unwrap();
                index[1] = 0;
                write_index(&index);
            }),
        ];
        for (what, damage) in damages {
            damage();
            let again = place.opened(&path);
            assert_eq!((again.kept, &again.blocks), (CacheOutcome::Stored, &blocks), "{what}");
            let [note] = &again.notes[..] else { panic!("{what}") };
            assert_eq!(note.level, Level::Warning);
            assert!(
                note.text.contains(&format!("is damaged ({what}): rebuilding it")),
                "{}",
                note.text
            );
            assert!(note.text.contains(&*path) && note.text.contains(kept.to_str().unwrap()));
            assert_eq!(std::fs::read(&kept).unwrap(), sound);
        }
    }

    fn plain_header(path: &Arc<str>) -> crate::toy::ToyHeader {
        opened(&Toy::default(), path, None).header
    }

    #[test]
    fn formats_with_different_tags_have_separate_entries() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        for tag in [&b""[..], b"csv;", b"csv,"] {
            let format = Toy { tag, ..Toy::default() };
            assert_eq!(opened(&format, &path, Some(&place.cache)).kept, CacheOutcome::Stored);
            assert_eq!(opened(&format, &path, Some(&place.cache)).kept, CacheOutcome::Hit);
        }
    }

    #[test]
    fn indexes_with_checksums_are_preferred_and_never_written() {
        let place = Place {
            format: Toy {
                checksums: Some(b"sums"),
                ..Toy::default()
            },
            ..Place::new()
        };
        let sums = Toy {
            tag: b"sums",
            ..Toy::default()
        };
        let path = place.write(&file(b'x', &many()));
        assert_eq!(opened(&sums, &path, Some(&place.cache)).kept, CacheOutcome::Stored);
        assert_eq!(place.opened(&path).kept, CacheOutcome::Hit);
        let kept = entry(&place.folder.path().join("cache"));
        std::fs::write(&kept, b"FP").unwrap();
        for (outcome, walks) in [(CacheOutcome::Stored, 1), (CacheOutcome::Hit, 1)] {
            let again = place.opened(&path);
            assert_eq!((again.kept, place.format.walks()), (outcome, walks));
            let [note] = &again.notes[..] else { panic!() };
            assert_eq!(note.level, Level::Warning);
            assert!(note.text.contains("reading without its checksums"), "{}", note.text);
        }
        assert_eq!(std::fs::read(&kept).unwrap(), b"FP");
        // Small files have no index of the format, but may have one with checksums.
        let path = write(place.folder.path(), "small", &file(b'x', &[(1, 2)]));
        let stamp = Stamp::of(&SourceFile::open(&path).unwrap()).unwrap();
        let key = Key::local(&path, &stamp, b"sums").unwrap();
        assert_eq!(place.opened(&path).kept, CacheOutcome::TooSmall);
        place.cache.store(&key, b"x\x01\x02").unwrap();
        assert_eq!(place.opened(&path).kept, CacheOutcome::Hit);
    }

    #[test]
    fn indexes_of_recently_changed_files_are_not_cached() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let open = std::fs::File::options().write(true).open(&*path).unwrap();
        open.set_modified(std::time::SystemTime::now()).unwrap();
        let found = place.opened(&path);
        assert_eq!((found.kept, found.blocks.len()), (CacheOutcome::TooRecent, 300));
        let [note] = &found.notes[..] else { panic!() };
        assert_eq!(note.level, Level::Info);
        assert!(note.text.contains("was not saved: the file was modified a moment ago"));
    }

    #[test]
    fn a_file_that_changes_during_the_walk_is_not_cached() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let mut change = |_| {
            let open = std::fs::File::options().write(true).open(&*path).unwrap();
            open.set_modified(std::time::UNIX_EPOCH).unwrap();
            Ok::<_, Infallible>(())
        };
        let found = open(&place.format, &path, Some(&place.cache), &mut change).unwrap_or_else(|_| panic!());
        assert_eq!((found.kept, found.notes.len()), (CacheOutcome::FileChanged, 1));
        assert_eq!(place.opened(&path).kept, CacheOutcome::Stored);
    }

    #[test]
    fn progress_is_reported_and_the_caller_can_cancel() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        let mut told = Vec::new();
        let mut end = |behind| {
            told.push(behind);
            if told.len() == 3 { Err("enough") } else { Ok(()) }
        };
        let halted = open(&place.format, &path, Some(&place.cache), &mut end);
        assert!(matches!(halted, Err(Halt::Interrupted("enough"))));
        assert_eq!(told, [4, 8, 12].map(|blocks| HEADER + 257 * blocks));
        // No entry was written.
        assert_eq!(place.opened(&path).kept, CacheOutcome::Stored);
        let mut told = Vec::new();
        let mut note = |behind| {
            told.push(behind);
            Ok::<_, Infallible>(())
        };
        open(&place.format, &path, Some(&place.cache), &mut note).unwrap_or_else(|_| panic!());
        assert_eq!(told, [HEADER + 257 * 300]);
        let halted = open(&place.format, &path, Some(&place.cache), &mut |_| Err(()));
        assert!(matches!(halted, Err(Halt::Interrupted(()))));
        let halted = open_front(&place.format, &path, &mut |_| Err(()));
        assert!(matches!(halted, Err(Halt::Interrupted(()))));
    }

    #[test]
    fn blocks_before_damage_are_kept() {
        let place = Place::new();
        let mut bytes = file(b'x', &many());
        bytes.truncate(bytes.len() - 1);
        let path = place.write(&bytes);
        for cache in [None, Some(&place.cache)] {
            let error = failure(&path, cache);
            assert_eq!(
                (error.kind(), error.location().block),
                (ErrorKind::Malformed, Some(299))
            );
        }
        assert_eq!(std::fs::read_dir(place.folder.path().join("cache")).unwrap().count(), 0);
        let front = open_front(&place.format, &path, &mut never).unwrap_or_else(|_| panic!());
        let front = front.expect("the header is valid");
        assert_eq!((front.blocks.len(), front.kept), (299, CacheOutcome::Disabled));
        let headless = place.write(b"boy");
        assert_eq!(failure(&headless, None).kind(), ErrorKind::Malformed);
        let front = open_front(&place.format, &headless, &mut never);
        assert!(matches!(front, Ok(None)));
    }

    #[test]
    fn blocks_without_rows_are_validated() {
        let place = Place::new();
        let sound = place.write(&file(b'x', &[(1, 1), (0, 0), (1, 1)]));
        assert_eq!(place.opened(&sound).blocks.len(), 3);
        let damaged = place.write(&file(b'x', &[(1, 1), (0, 3), (1, 1)]));
        let error = failure(&damaged, None);
        assert_eq!((error.kind(), error.location().block), (ErrorKind::Malformed, Some(1)));
    }

    #[test]
    fn a_missing_file_is_a_typed_error() {
        let place = Place::new();
        let path: Arc<str> = place.folder.path().join("none").to_str().unwrap().into();
        let error = failure(&path, Some(&place.cache));
        assert_eq!(error.kind(), ErrorKind::NotFound);
        assert_eq!(error.location().path.as_deref(), Some(&*path));
        let front = open_front(&place.format, &path, &mut never);
        assert!(matches!(front, Err(Halt::Failed(e)) if e.kind() == ErrorKind::NotFound));
    }

    #[test]
    fn a_cache_that_can_not_be_written_fails_before_the_walk() {
        let place = Place::new();
        let path = place.write(&file(b'x', &many()));
        std::fs::remove_dir(place.folder.path().join("cache")).unwrap();
        let halted = open(&place.format, &path, Some(&place.cache), &mut never);
        assert!(matches!(halted, Err(Halt::Failed(e)) if e.kind() == ErrorKind::Storage));
        assert_eq!(place.format.walks(), 0);
    }
}
