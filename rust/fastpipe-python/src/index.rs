//! Walking files for their blocks, off the GIL, with an eye on Ctrl-C.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastpipe_avro::{Block, FileInfo, Header, Walk};
use fastpipe_batch::{BufferPool, Error, ReadAt, Result};
use fastpipe_files::LocalFile;
use pyo3::prelude::*;

use crate::errors::to_py;

/// Blocks looked at between two looks at signals: a few milliseconds.
pub(crate) const BLOCKS_AT_ONCE: usize = 2048;

/// Time between two looks at signals.
pub(crate) const LOOK_AFTER: Duration = Duration::from_millis(20);

/// Bytes of a file that are read at once: its header and, of a small file, all.
pub(crate) const HEAD_BYTES: u64 = 64 << 10;

/// Why something off the GIL ended before its time.
pub(crate) enum Halt {
    /// It failed.
    Failed(Error),
    /// Python raised, a signal's handler for example.
    Raised(PyErr),
    /// Somebody else did.
    Stopped,
}

impl From<Error> for Halt {
    fn from(error: Error) -> Self {
        Halt::Failed(error)
    }
}

impl From<PyErr> for Halt {
    fn from(error: PyErr) -> Self {
        Halt::Raised(error)
    }
}

impl Halt {
    /// The exception.
    pub(crate) fn raise(self, py: Python<'_>) -> PyErr {
        match self {
            Halt::Failed(error) => to_py(py, &error),
            Halt::Raised(error) => error,
            Halt::Stopped => pyo3::exceptions::PyKeyboardInterrupt::new_err(()),
        }
    }
}

/// Is told every few milliseconds how many bytes of a file lie behind.
pub(crate) type Tell<'a> = dyn FnMut(u64) -> std::result::Result<(), Halt> + 'a;

/// Looks at signals now and then.
pub(crate) fn signals() -> impl FnMut(u64) -> std::result::Result<(), Halt> + Send {
    let mut last = Instant::now();
    move |_| {
        if last.elapsed() >= LOOK_AFTER {
            last = Instant::now();
            Python::attach(|py| py.check_signals())?;
        }
        Ok(())
    }
}

/// A file of which the first bytes are at hand, so that a small one is read once.
pub(crate) struct Head<'a> {
    file: &'a LocalFile,
    size: u64,
    bytes: Vec<u8>,
}

impl<'a> Head<'a> {
    /// Reads the first bytes of a file of this size.
    pub(crate) fn read(file: &'a LocalFile, size: u64) -> Result<Self> {
        let mut bytes = vec![0; size.min(HEAD_BYTES) as usize];
        let found = file.read_at(0, &mut bytes)?;
        bytes.truncate(found);
        Ok(Head { file, size, bytes })
    }

    /// Copies a range, if it is at hand.
    fn copy(&self, offset: u64, out: &mut [u8]) -> bool {
        let at_hand = |from: usize| self.bytes.get(from..)?.get(..out.len());
        let found = usize::try_from(offset).ok().and_then(at_hand);
        if let Some(found) = found {
            out.copy_from_slice(found);
        }
        found.is_some()
    }
}

impl ReadAt for Head<'_> {
    fn location(&self) -> &str {
        self.file.location()
    }

    fn size(&self) -> Result<u64> {
        Ok(self.size)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match self.copy(offset, out) {
            true => Ok(out.len()),
            false => self.file.read_at(offset, out),
        }
    }

    fn glance_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        match self.copy(offset, out) {
            true => Ok(out.len()),
            false => self.file.glance_at(offset, out),
        }
    }
}

/// Reads a file's header.
pub(crate) fn read_header(path: &Arc<str>) -> Result<(LocalFile, FileInfo)> {
    let file = LocalFile::open(path)?;
    let info = FileInfo::new(path.clone(), Header::read(&file)?)?;
    Ok((file, info))
}

/// Appends a block to the index of a file, if the system has memory for it.
fn push(blocks: &mut Vec<Block>, block: Block, info: &FileInfo) -> Result<()> {
    if blocks.len() == blocks.capacity() {
        let bytes = blocks.len().saturating_add(1).saturating_mul(size_of::<Block>());
        let refused = |_| Error::out_of_memory(bytes, "the index of a file's blocks").at_path(&info.path);
        blocks.try_reserve(1).map_err(refused)?;
    }
    blocks.push(block);
    Ok(())
}

/// Walks the blocks of a file. A block without records is never read, so it is looked at here whether it really has none.
pub(crate) fn walk(file: &dyn ReadAt, info: &FileInfo, tell: &mut Tell<'_>) -> std::result::Result<Vec<Block>, Halt> {
    let mut walk = Walk::new(file, &info.header)?;
    let mut blocks: Vec<Block> = Vec::new();
    let pool = BufferPool::default();
    loop {
        let from = blocks.len();
        for block in walk.by_ref().take(BLOCKS_AT_ONCE) {
            let (block, number) = (block?, blocks.len() as u64);
            info.check(number, &block)?;
            if block.rows == 0 {
                let mut stored = pool.take(block.size as usize)?;
                file.read_at(block.offset + u64::from(block.header), &mut stored)?;
                info.check_empty(number, &block, &stored, &pool)?;
                pool.put(stored);
            }
            push(&mut blocks, block, info)?;
        }
        tell(blocks.last().map_or(info.header.size, |b| b.offset + b.len()))?;
        if blocks.len() - from < BLOCKS_AT_ONCE {
            blocks.shrink_to_fit();
            return Ok(blocks);
        }
    }
}

/// The blocks in front of the first that is damaged, as far as a walk can tell. A block without records is taken as it is.
pub(crate) fn walk_front(
    file: &dyn ReadAt,
    info: &FileInfo,
    tell: &mut Tell<'_>,
) -> std::result::Result<Vec<Block>, Halt> {
    let mut blocks: Vec<Block> = Vec::new();
    let Ok(walk) = Walk::new(file, &info.header) else {
        return Ok(blocks);
    };
    for block in walk.map_while(Result::ok) {
        if info.check(blocks.len() as u64, &block).is_err() {
            break;
        }
        push(&mut blocks, block, info)?;
        if blocks.len().is_multiple_of(BLOCKS_AT_ONCE) {
            tell(block.offset + block.len())?;
        }
    }
    Ok(blocks)
}
