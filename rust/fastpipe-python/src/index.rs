//! Walking files for their blocks, off the GIL, with an eye on Ctrl-C.

use std::sync::Arc;

use fastpipe_avro::{Block, FileInfo, Header, Walk};
use fastpipe_batch::{BufferPool, Error, ReadAt};
use fastpipe_engine::LocalFile;
use pyo3::prelude::*;

use crate::errors::IntoPy;

/// Blocks looked at between two looks at signals: a few milliseconds.
pub(crate) const BLOCKS_AT_ONCE: usize = 2048;

/// Reads a file's header.
pub(crate) fn read_header(py: Python<'_>, path: &Arc<str>) -> PyResult<(LocalFile, FileInfo)> {
    py.detach(|| {
        let file = LocalFile::open(path)?;
        let info = info(&file, path, None)?;
        Ok((file, info))
    })
    .py(py)
}

/// What the header of a file says.
pub(crate) fn info(file: &LocalFile, path: &Arc<str>, known: Option<&FileInfo>) -> Result<FileInfo, Error> {
    FileInfo::new(path.clone(), Header::read(file)?, known)
}

/// Walks the blocks of a file. A block without records is never read, so it is looked at here whether it really has none.
pub(crate) fn walk(py: Python<'_>, file: &LocalFile, info: &FileInfo) -> PyResult<Vec<Block>> {
    walk_telling(py, file, info, &mut |_| Ok(()))
}

/// The same. `tell` is called every few milliseconds with the number of bytes that lie behind.
pub(crate) fn walk_telling(
    py: Python<'_>,
    file: &LocalFile,
    info: &FileInfo,
    tell: &mut dyn FnMut(u64) -> PyResult<()>,
) -> PyResult<Vec<Block>> {
    let mut walk = Walk::new(file, &info.header).py(py)?;
    let mut blocks = Vec::new();
    let pool = BufferPool::default();
    loop {
        let more = py.detach(|| {
            let more = walk.by_ref().take(BLOCKS_AT_ONCE).collect::<Result<Vec<_>, _>>()?;
            for (number, block) in (blocks.len() as u64..).zip(&more) {
                info.check(number, block)?;
                if block.rows == 0 {
                    let mut stored = pool.take(block.size as usize)?;
                    file.read_at(block.offset + u64::from(block.header), &mut stored)?;
                    info.check_empty(number, block, &stored, &pool)?;
                    pool.put(stored);
                }
            }
            Ok::<_, Error>(more)
        });
        let more = more.py(py)?;
        let end = more.len() < BLOCKS_AT_ONCE;
        blocks.extend(more);
        tell(blocks.last().map_or(info.header.size, |b| b.offset + b.len()))?;
        if end {
            return Ok(blocks);
        }
        py.check_signals()?;
    }
}

/// The blocks in front of the first that is damaged, as far as a walk can tell. A block without records is taken as it is.
pub(crate) fn walk_front(py: Python<'_>, file: &LocalFile, info: &FileInfo) -> PyResult<Vec<Block>> {
    let mut blocks: Vec<Block> = Vec::new();
    let Ok(mut walk) = Walk::new(file, &info.header) else {
        return Ok(blocks);
    };
    loop {
        let before = blocks.len();
        py.detach(|| {
            for block in walk.by_ref().take(BLOCKS_AT_ONCE).map_while(Result::ok) {
                if info.check(blocks.len() as u64, &block).is_err() {
                    break;
                }
                blocks.push(block);
            }
        });
        if blocks.len() - before < BLOCKS_AT_ONCE {
            return Ok(blocks);
        }
        py.check_signals()?;
    }
}
