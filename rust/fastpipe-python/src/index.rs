//! Walking files for their blocks, off the GIL, with an eye on Ctrl-C.

use std::sync::Arc;

use fastpipe_avro::{Block, FileInfo, Header, Walk};
use fastpipe_batch::{BufferPool, Error, ReadAt};
use fastpipe_engine::LocalFile;
use pyo3::prelude::*;

use crate::errors::IntoPy;

/// Blocks walked between two looks at signals: a few milliseconds.
const BLOCKS_AT_ONCE: usize = 2048;

/// Reads a file's header.
pub(crate) fn read_header(
    py: Python<'_>,
    path: &Arc<str>,
    known: Option<&FileInfo>,
) -> PyResult<(LocalFile, FileInfo)> {
    py.detach(|| {
        let file = LocalFile::open(path)?;
        let header = Header::read(&file)?;
        let info = FileInfo::new(path.clone(), header, known)?;
        Ok((file, info))
    })
    .py(py)
}

/// Walks the blocks of a file. A block without records is never read, so it is looked at here whether it really has none.
pub(crate) fn walk(py: Python<'_>, file: &LocalFile, info: &FileInfo) -> PyResult<Vec<Block>> {
    let mut walk = Walk::new(file, &info.header).py(py)?;
    let mut blocks = Vec::new();
    let pool = BufferPool::default();
    loop {
        let more = py.detach(|| {
            let more = walk.by_ref().take(BLOCKS_AT_ONCE).collect::<Result<Vec<_>, _>>()?;
            for (number, block) in (blocks.len() as u64..).zip(&more) {
                info.check(number, block)?;
                if block.rows == 0 {
                    let mut stored = pool.take(block.size as usize);
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
        if end {
            return Ok(blocks);
        }
        py.check_signals()?;
    }
}
