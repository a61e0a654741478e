//! Opening a file with its blocks: out of the cache of indexes, if there is one and it has them; else by a walk.

use std::sync::Arc;

use fastpipe_batch::{FileStamp, ReadAt, Result, shown_path};

use crate::format::Format;
use crate::head::{HEAD_BYTES, Head};
use crate::index_cache::{IndexCache, Key, Lookup, Stamp};
use crate::note::Note;
use crate::storage::LocalFile;
use crate::tell::{Halt, Tell};
use crate::walk::{check_all_empty, walk, walk_front};

/// What came of a file's entry in the cache.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kept {
    /// There is no cache.
    Nowhere,
    /// It needs none: the file is read whole with its header.
    Small,
    /// It was there already.
    Before,
    /// It was written.
    Now,
    /// It wasn't written: the file was modified so recently that its next change might not show.
    Unsettled,
    /// It wasn't written: the file changed during the walk.
    Changed,
}

/// A file with its blocks.
pub struct Opened<F: Format> {
    /// Its path, as text.
    pub path: Arc<str>,
    /// What its header says.
    pub header: F::Header,
    /// Its blocks, one behind the other.
    pub blocks: Vec<F::Block>,
    /// What it looked like before anything was read of it.
    pub stamp: FileStamp,
    /// What is to be logged.
    pub notes: Vec<Note>,
    /// What came of its entry in the cache.
    pub kept: Kept,
    /// Bytes of that entry.
    pub entry: u64,
}

/// A file of which the header is read, and none of the blocks are found.
struct Begun<'f, F: Format> {
    head: Head<'f>,
    stamp: Stamp,
    opened: Opened<F>,
}

impl<'f, F: Format> Begun<'f, F> {
    fn new(format: &F, file: &'f LocalFile, path: &Arc<str>) -> Result<Self> {
        // Its stamp is taken before anything is read of it: what changes from there on shows in the stamp after the walk, in
        // the key of the next opening, or when the file is read.
        let stamp = Stamp::of(file)?;
        let head = Head::read(file, stamp.size())?;
        let opened = Opened {
            path: path.clone(),
            header: format.read_header(path, &head)?,
            blocks: Vec::new(),
            stamp: stamp.file(),
            notes: Vec::new(),
            kept: Kept::Nowhere,
            entry: 0,
        };
        Ok(Begun { head, stamp, opened })
    }
}

/// Opens a file and finds its blocks. `tell` is called every few milliseconds with the number of bytes that lie behind.
///
/// # Errors
/// If the file can't be read or is damaged; if its index can't be written to the cache; whatever `tell` returns.
pub fn open<F: Format, E>(
    format: &F,
    path: &Arc<str>,
    cache: Option<&IndexCache>,
    tell: &mut Tell<'_, E>,
) -> Result<Opened<F>, Halt<E>> {
    let file = LocalFile::open(path)?;
    let Begun {
        head,
        stamp,
        mut opened,
    } = Begun::new(format, &file, path)?;
    match cache {
        None => opened.blocks = walk(format, &head, &opened.header, tell)?,
        Some(_) if stamp.size() <= HEAD_BYTES => {
            opened.kept = Kept::Small;
            opened.blocks = walk(format, &head, &opened.header, tell)?;
        }
        Some(cache) => open_cached(format, &head, &file, stamp, cache, &mut opened, tell)?,
    }
    Ok(opened)
}

/// Opens a damaged file with the blocks in front of the damage; `None` if that is in its header.
///
/// # Errors
/// If the file can't be opened any more, or its index has no room in memory; whatever `tell` returns.
pub fn open_front<F: Format, E>(
    format: &F,
    path: &Arc<str>,
    tell: &mut Tell<'_, E>,
) -> Result<Option<Opened<F>>, Halt<E>> {
    let file = LocalFile::open(path)?;
    let Ok(Begun { head, mut opened, .. }) = Begun::new(format, &file, path) else {
        return Ok(None);
    };
    opened.blocks = walk_front(format, &head, &opened.header, tell)?;
    Ok(Some(opened))
}

/// Finds the blocks of a file by the cache, or for it.
fn open_cached<F: Format, E>(
    format: &F,
    head: &Head<'_>,
    file: &LocalFile,
    before: Stamp,
    cache: &IndexCache,
    opened: &mut Opened<F>,
    tell: &mut Tell<'_, E>,
) -> Result<(), Halt<E>> {
    let key = Key::local(file.location(), &before, format.cache_tag())?;
    if let Some((blocks, entry)) = load(format, cache, &key, head, opened, tell)? {
        tell(before.size()).map_err(Halt::Interrupted)?;
        (opened.blocks, opened.kept, opened.entry) = (blocks, Kept::Before, entry);
        return Ok(());
    }
    cache.check_writable()?;
    opened.blocks = walk(format, head, &opened.header, tell)?;
    (opened.kept, opened.entry) = keep(format, cache, &key, &before, file, opened)?;
    if matches!(opened.kept, Kept::Unsettled | Kept::Changed) {
        let why = "the file was modified a moment ago, or has a time of modification in the future";
        let text = format!("the block index of {} wasn't kept: {why}", shown_path(&opened.path));
        opened.notes.push(Note::info(text));
    }
    Ok(())
}

/// The blocks of a file out of the cache, and the bytes of their entry. Damage is noted.
#[allow(clippy::type_complexity)] // Named, it would be no clearer.
fn load<F: Format, E>(
    format: &F,
    cache: &IndexCache,
    key: &Key,
    file: &dyn ReadAt,
    opened: &mut Opened<F>,
    tell: &mut Tell<'_, E>,
) -> Result<Option<(Vec<F::Block>, u64)>, Halt<E>> {
    let header = &opened.header;
    let damage = match cache.load(key) {
        Lookup::Missing => return Ok(None),
        Lookup::Damaged(reason) => reason,
        Lookup::Found(bytes, entry) => match format.decode(header, &bytes, opened.stamp.size) {
            Ok(None) => return Ok(None),
            Ok(Some(blocks)) => match check_all_empty(format, file, header, &blocks, tell) {
                Ok(()) => return Ok(Some((blocks, entry))),
                Err(Halt::Failed(e)) => e.reason().to_owned(),
                Err(halt) => return Err(halt),
            },
            Err(e) => e.reason().to_owned(),
        },
    };
    let (entry, path) = (cache.path(key), shown_path(&opened.path));
    let text = format!(
        "the block index of {path} in {} is damaged ({damage}): it is made anew",
        entry.display()
    );
    opened.notes.push(Note::warning(text));
    Ok(None)
}

/// Writes the blocks of a file to the cache, unless a change of the file might go unnoticed.
fn keep<F: Format>(
    format: &F,
    cache: &IndexCache,
    key: &Key,
    before: &Stamp,
    file: &LocalFile,
    opened: &Opened<F>,
) -> Result<(Kept, u64)> {
    if !Stamp::of(file)?.same(before) {
        return Ok((Kept::Changed, 0));
    }
    if !before.is_settled() {
        return Ok((Kept::Unsettled, 0));
    }
    let entry = cache.store(key, &format.encode(&opened.header, &opened.blocks)?)?;
    Ok((Kept::Now, entry))
}
