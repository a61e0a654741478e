//! Opening a file with its blocks: out of the cache of indexes, if there is one and it has them; else by a walk.

use std::collections::{BTreeMap, HashMap};
use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_avro::{Block, FileInfo, Header, Schema, decode_index, encode_index};
use fastpipe_batch::{BufferPool, Error, ErrorKind, FileStamp, ReadAt, Result, path_text, shown_path};
use fastpipe_files::{IndexCache, Key, LocalFile, Lookup, Stamp};
use pyo3::prelude::*;

use crate::errors::IntoPy;
use crate::index::{BLOCKS_AT_ONCE, HEAD_BYTES, Halt, Head, Tell, walk, walk_front};

/// What came of a file's entry in the cache.
#[derive(Clone, Copy)]
pub(crate) enum Kept {
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
pub(crate) struct Opened {
    /// What its header says, without the metadata.
    pub(crate) info: FileInfo,
    pub(crate) blocks: Vec<Block>,
    /// What it looked like before anything was read of it.
    pub(crate) stamp: FileStamp,
    /// What is to be logged: levels and texts.
    pub(crate) notes: Vec<(&'static str, String)>,
    kept: Kept,
    /// Bytes of its entry in the cache.
    entry: u64,
}

/// The schemas that were parsed, by their texts: files that have the same share one.
#[derive(Default)]
pub(crate) struct Schemas(Mutex<HashMap<Arc<str>, Arc<Schema>>>);

impl Schemas {
    /// The schema with a text. Whoever wants one that is being parsed waits for it.
    fn parse(&self, json: &str) -> Result<Arc<Schema>> {
        let mut known = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(schema) = known.get(json) {
            return Ok(schema.clone());
        }
        let schema = Arc::new(Schema::parse(json)?);
        known.insert(json.into(), schema.clone());
        Ok(schema)
    }

    /// The texts of the schemas.
    pub(crate) fn texts(self) -> HashMap<*const Schema, Arc<str>> {
        let known = self.0.into_inner().unwrap_or_else(PoisonError::into_inner);
        known
            .into_iter()
            .map(|(json, schema)| (Arc::as_ptr(&schema), json))
            .collect()
    }
}

/// A file of which the header is read, and none of the blocks are found.
struct Begun<'f> {
    head: Head<'f>,
    stamp: Stamp,
    opened: Opened,
}

impl<'f> Begun<'f> {
    fn new(file: &'f LocalFile, path: &Arc<str>, schemas: &Schemas) -> Result<Self> {
        // Its stamp is taken before anything is read of it: what changes from there on shows in the stamp after the walk, in
        // the key of the next opening, or when the file is read.
        let stamp = Stamp::of(file)?;
        let head = Head::read(file, stamp.size())?;
        let mut info = FileInfo::parsed(path.clone(), Header::read(&head)?, |json| schemas.parse(json))?;
        // Each file has the text of its schema there.
        info.header.metadata = BTreeMap::new();
        let opened = Opened {
            info,
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
pub(crate) fn open(
    path: &Arc<str>,
    schemas: &Schemas,
    cache: Option<&IndexCache>,
    tell: &mut Tell<'_>,
) -> std::result::Result<Opened, Halt> {
    let file = LocalFile::open(path)?;
    let Begun {
        head,
        stamp,
        mut opened,
    } = Begun::new(&file, path, schemas)?;
    match cache {
        None => opened.blocks = walk(&head, &opened.info, tell)?,
        Some(_) if stamp.size() <= HEAD_BYTES => {
            opened.kept = Kept::Small;
            opened.blocks = walk(&head, &opened.info, tell)?;
        }
        Some(cache) => open_cached(&head, &file, stamp, cache, &mut opened, tell)?,
    }
    Ok(opened)
}

/// Opens a damaged file with the blocks in front of the damage; `None` if that is in its header.
pub(crate) fn open_front(
    path: &Arc<str>,
    schemas: &Schemas,
    tell: &mut Tell<'_>,
) -> std::result::Result<Option<Opened>, Halt> {
    let file = LocalFile::open(path)?;
    let Ok(Begun { head, mut opened, .. }) = Begun::new(&file, path, schemas) else {
        return Ok(None);
    };
    opened.blocks = walk_front(&head, &opened.info, tell)?;
    Ok(Some(opened))
}

/// Finds the blocks of a file by the cache, or for it.
fn open_cached(
    head: &Head<'_>,
    file: &LocalFile,
    before: Stamp,
    cache: &IndexCache,
    opened: &mut Opened,
    tell: &mut Tell<'_>,
) -> std::result::Result<(), Halt> {
    let key = Key::local(file.location(), &before)?;
    if let Some((blocks, entry)) = load(cache, &key, head, opened, tell)? {
        tell(before.size())?;
        (opened.blocks, opened.kept, opened.entry) = (blocks, Kept::Before, entry);
        return Ok(());
    }
    cache.check_writable()?;
    opened.blocks = walk(head, &opened.info, tell)?;
    (opened.kept, opened.entry) = keep(cache, &key, &before, file, opened)?;
    if matches!(opened.kept, Kept::Unsettled | Kept::Changed) {
        let why = "the file was modified a moment ago, or has a time of modification in the future";
        let text = format!(
            "the block index of {} wasn't kept: {why}",
            shown_path(&opened.info.path)
        );
        opened.notes.push(("info", text));
    }
    Ok(())
}

/// The blocks of a file out of the cache, and the bytes of their entry. Damage is noted.
fn load(
    cache: &IndexCache,
    key: &Key,
    file: &dyn ReadAt,
    opened: &mut Opened,
    tell: &mut Tell<'_>,
) -> std::result::Result<Option<(Vec<Block>, u64)>, Halt> {
    let info = &opened.info;
    let damage = match cache.load(key) {
        Lookup::Missing => return Ok(None),
        Lookup::Damaged(reason) => reason,
        Lookup::Found(bytes, entry) => match decode_index(&bytes, info, opened.stamp.size) {
            Ok(None) => return Ok(None),
            Ok(Some(blocks)) => match check_empty(file, info, &blocks, tell) {
                Ok(()) => return Ok(Some((blocks, entry))),
                Err(Halt::Failed(e)) => e.reason().to_owned(),
                Err(halt) => return Err(halt),
            },
            Err(e) => e.reason().to_owned(),
        },
    };
    let (entry, path) = (cache.path(key), shown_path(&info.path));
    let text = format!(
        "the block index of {path} in {} is damaged ({damage}): it is made anew",
        entry.display()
    );
    opened.notes.push(("warning", text));
    Ok(None)
}

/// Blocks without records are never read, and so never held against the index: that is done here. There are next to none.
fn check_empty(
    file: &dyn ReadAt,
    info: &FileInfo,
    blocks: &[Block],
    tell: &mut Tell<'_>,
) -> std::result::Result<(), Halt> {
    let pool = BufferPool::default();
    let empty = blocks.iter().enumerate().filter(|(_, block)| block.rows == 0);
    for (looked_at, (number, block)) in empty.enumerate() {
        let mut bytes = pool.take(block.len() as usize)?;
        file.read_at(block.offset, &mut bytes)?;
        if Block::parse(&bytes, block.offset)? != *block {
            let reason = "it has a block without records that isn't there";
            return Err(Error::new(ErrorKind::Malformed, reason).into());
        }
        let start = block.header as usize;
        info.check_empty(number as u64, block, &bytes[start..start + block.size as usize], &pool)?;
        pool.put(bytes);
        if looked_at % BLOCKS_AT_ONCE == BLOCKS_AT_ONCE - 1 {
            tell(info.header.size)?;
        }
    }
    Ok(())
}

/// Writes the blocks of a file to the cache, unless a change of the file might go unnoticed.
fn keep(cache: &IndexCache, key: &Key, before: &Stamp, file: &LocalFile, opened: &Opened) -> Result<(Kept, u64)> {
    if !Stamp::of(file)?.same(before) {
        return Ok((Kept::Changed, 0));
    }
    if !before.is_settled() {
        return Ok((Kept::Unsettled, 0));
    }
    let entry = cache.store(key, &encode_index(&opened.info, &opened.blocks))?;
    Ok((Kept::Now, entry))
}

/// Logs texts at their levels.
pub(crate) fn log(py: Python<'_>, notes: &[(&'static str, String)]) -> PyResult<()> {
    if notes.is_empty() {
        return Ok(());
    }
    let logger = py.import("logging")?.call_method1("getLogger", ("fastpipe",))?;
    for (level, text) in notes {
        logger.call_method1(*level, ("%s", text))?;
    }
    Ok(())
}

/// Blocks, rows and bytes of a file, bytes of its index, and what came of that.
type Row = (usize, u64, u64, u64, &'static str);

/// Sees to it that the block index of a file lies in a directory. `progress` is called every few milliseconds with the
/// number of bytes that lie behind.
#[pyfunction]
pub(crate) fn index_file(
    py: Python<'_>,
    path: OsString,
    index_cache: PathBuf,
    progress: &Bound<'_, PyAny>,
) -> PyResult<Row> {
    let cache = IndexCache::open(&index_cache).py(py)?;
    let (path, progress) = (Arc::from(path_text(&path)), progress.clone().unbind());
    let opened = py.detach(|| {
        let mut tell = |behind: u64| {
            let told = Python::attach(|py| {
                progress.call1(py, (behind,))?;
                py.check_signals()
            });
            told.map_err(Halt::Raised)
        };
        open(&path, &Schemas::default(), Some(&cache), &mut tell)
    });
    let opened = opened.map_err(|halt| halt.raise(py))?;
    log(py, &opened.notes)?;
    let rows = opened.blocks.iter().map(|block| u64::from(block.rows)).sum();
    let kept = match opened.kept {
        Kept::Nowhere => "nowhere",
        Kept::Small => "small",
        Kept::Before => "before",
        Kept::Now => "now",
        Kept::Unsettled => "unsettled",
        Kept::Changed => "changed",
    };
    Ok((opened.blocks.len(), rows, opened.stamp.size, opened.entry, kept))
}
