//! Opening files with their blocks: out of the cache of indexes, if there is one and it has them; else by a walk.

use std::path::PathBuf;
use std::sync::Arc;

use fastpipe_avro::{Block, FileInfo, decode_index, encode_index};
use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt};
use fastpipe_engine::{IndexCache, Key, LocalFile, Lookup, Stamp};
use pyo3::prelude::*;

use crate::errors::IntoPy;
use crate::index::{BLOCKS_AT_ONCE, info, walk_front, walk_telling};

/// What came of a file's entry in the cache.
#[derive(Clone, Copy)]
pub(crate) enum Kept {
    /// There is no cache.
    Nowhere,
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
    pub(crate) info: FileInfo,
    pub(crate) blocks: Vec<Block>,
    kept: Kept,
    /// Bytes of the file, and of its entry in the cache.
    size: u64,
    entry: u64,
}

/// Opens a file and finds its blocks. `tell` is called every few milliseconds with the number of bytes that lie behind.
pub(crate) fn open(
    py: Python<'_>,
    path: &Arc<str>,
    known: Option<&FileInfo>,
    cache: Option<&IndexCache>,
    tell: &mut dyn FnMut(u64) -> PyResult<()>,
) -> PyResult<Opened> {
    let (file, before, info) = py.detach(|| look(path, known)).py(py)?;
    let mut opened = Opened {
        info,
        blocks: Vec::new(),
        kept: Kept::Nowhere,
        size: before.size(),
        entry: 0,
    };
    let Some(cache) = cache else {
        opened.blocks = walk_telling(py, &file, &opened.info, tell)?;
        return Ok(opened);
    };
    let key = py.detach(|| Key::local(path, &before)).py(py)?;
    if let Some((blocks, entry)) = load(py, cache, &key, &file, &opened)? {
        tell(opened.size)?;
        (opened.blocks, opened.kept, opened.entry) = (blocks, Kept::Before, entry);
        return Ok(opened);
    }
    py.detach(|| cache.check_writable()).py(py)?;
    opened.blocks = walk_telling(py, &file, &opened.info, tell)?;
    let keep = || keep(cache, &key, &before, &file, &opened);
    (opened.kept, opened.entry) = py.detach(keep).py(py)?;
    if matches!(opened.kept, Kept::Unsettled | Kept::Changed) {
        let why = "the file was modified a moment ago, or has a time of modification in the future";
        log(py, "info", &format!("the block index of {path} wasn't kept: {why}"))?;
    }
    Ok(opened)
}

/// Opens a damaged file with the blocks in front of the damage; `None` if that is in its header.
pub(crate) fn open_front(py: Python<'_>, path: &Arc<str>, known: Option<&FileInfo>) -> PyResult<Option<Opened>> {
    let Ok((file, before, info)) = py.detach(|| look(path, known)) else {
        return Ok(None);
    };
    let blocks = walk_front(py, &file, &info)?;
    Ok(Some(Opened {
        info,
        blocks,
        kept: Kept::Nowhere,
        size: before.size(),
        entry: 0,
    }))
}

/// Opens a file. Its stamp is taken before anything is read of it: what changes from there on shows in the stamp after the
/// walk, or in the key of the next opening.
fn look(path: &Arc<str>, known: Option<&FileInfo>) -> Result<(LocalFile, Stamp, FileInfo), Error> {
    let file = LocalFile::open(path)?;
    let stamp = Stamp::of(&file)?;
    let info = info(&file, path, known)?;
    Ok((file, stamp, info))
}

/// The blocks of a file out of the cache, and the bytes of their entry. Damage is logged.
fn load(
    py: Python<'_>,
    cache: &IndexCache,
    key: &Key,
    file: &LocalFile,
    opened: &Opened,
) -> PyResult<Option<(Vec<Block>, u64)>> {
    let info = &opened.info;
    let damage = match py.detach(|| cache.load(key)) {
        Lookup::Missing => return Ok(None),
        Lookup::Damaged(reason) => reason,
        Lookup::Found(bytes, entry) => match py.detach(|| decode_index(&bytes, info, opened.size)) {
            Ok(None) => return Ok(None),
            Ok(Some(blocks)) => match check_empty(py, file, info, &blocks)? {
                Ok(()) => return Ok(Some((blocks, entry))),
                Err(e) => e.reason().to_owned(),
            },
            Err(e) => e.reason().to_owned(),
        },
    };
    let (entry, path) = (cache.path(key), &info.path);
    let text = format!(
        "the block index of {path} in {} is damaged ({damage}): it is made anew",
        entry.display()
    );
    log(py, "warning", &text)?;
    Ok(None)
}

/// Blocks without records are never read, and so never held against the index: that is done here. There are next to none.
fn check_empty(py: Python<'_>, file: &LocalFile, info: &FileInfo, blocks: &[Block]) -> PyResult<Result<(), Error>> {
    let pool = BufferPool::default();
    let check = |number: usize, block: &Block| {
        let mut bytes = pool.take(block.len() as usize)?;
        file.read_at(block.offset, &mut bytes)?;
        if Block::parse(&bytes, block.offset)? != *block {
            return Err(Error::new(
                ErrorKind::Malformed,
                "it has a block without records that isn't there",
            ));
        }
        let start = block.header as usize;
        info.check_empty(number as u64, block, &bytes[start..start + block.size as usize], &pool)?;
        pool.put(bytes);
        Ok(())
    };
    let mut empty = blocks
        .iter()
        .enumerate()
        .filter(|(_, block)| block.rows == 0)
        .peekable();
    while empty.peek().is_some() {
        let mut some = empty.by_ref().take(BLOCKS_AT_ONCE);
        if let Err(e) = py.detach(|| some.try_for_each(|(number, block)| check(number, block))) {
            return Ok(Err(e));
        }
        py.check_signals()?;
    }
    Ok(Ok(()))
}

/// Writes the blocks of a file to the cache, unless a change of the file might go unnoticed.
fn keep(
    cache: &IndexCache,
    key: &Key,
    before: &Stamp,
    file: &LocalFile,
    opened: &Opened,
) -> Result<(Kept, u64), Error> {
    if !Stamp::of(file)?.same(before) {
        return Ok((Kept::Changed, 0));
    }
    if !before.is_settled() {
        return Ok((Kept::Unsettled, 0));
    }
    let entry = cache.store(key, &encode_index(&opened.info, &opened.blocks))?;
    Ok((Kept::Now, entry))
}

fn log(py: Python<'_>, level: &str, text: &str) -> PyResult<()> {
    let logger = py.import("logging")?.call_method1("getLogger", ("fastpipe",))?;
    logger.call_method1(level, ("%s", text))?;
    Ok(())
}

/// Blocks, rows and bytes of a file, bytes of its index, and what came of that.
type Row = (usize, u64, u64, u64, &'static str);

/// Sees to it that the block index of a file lies in a directory. `progress` is called every few milliseconds with the
/// number of bytes that lie behind.
#[pyfunction]
pub(crate) fn index_file(
    py: Python<'_>,
    path: &str,
    index_cache: PathBuf,
    progress: &Bound<'_, PyAny>,
) -> PyResult<Row> {
    let cache = IndexCache::open(&index_cache).py(py)?;
    let mut tell = |behind: u64| progress.call1((behind,)).map(drop);
    let opened = open(py, &Arc::from(path), None, Some(&cache), &mut tell)?;
    let rows = opened.blocks.iter().map(|block| u64::from(block.rows)).sum();
    let kept = match opened.kept {
        Kept::Nowhere => "nowhere",
        Kept::Before => "before",
        Kept::Now => "now",
        Kept::Unsettled => "unsettled",
        Kept::Changed => "changed",
    };
    Ok((opened.blocks.len(), rows, opened.size, opened.entry, kept))
}
