//! What a file format is to whoever opens files.
//!
//! A file has a header, which may be empty, and behind it *blocks*: stretches of bytes, one behind the other, that are
//! read each by itself. A walk through the file finds them. A format says how to read a header, how to walk, and how
//! the blocks that were found become bytes and back, so that the next opening needs no walk. It never opens a file, and
//! knows nothing of caches, threads and signals.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, ReadAt, Result};

/// Where a block lies in its file, and how many rows it has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Its first byte.
    pub offset: u64,
    /// Its bytes: all that has to be read for its rows.
    pub len: u64,
    /// Its rows.
    pub rows: u32,
}

impl Extent {
    /// The first byte behind it.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// A file format, with whatever settings decide where its blocks lie.
pub trait Format: Sync {
    /// What is known of a file before its blocks are found.
    type Header: Send;

    /// A block: where it lies, and whatever else the format has to know of it.
    type Block: Send;

    /// Blocks that a walk finds in a few milliseconds: that often its caller is asked whether to go on. Formats whose
    /// walks read every byte have a smaller number.
    const BLOCKS_AT_ONCE: usize = 2048;

    /// Whether a walk reads every byte, and so knows that a block without rows has none.
    const WALK_READS_ALL: bool = false;

    /// What tells the kept index of a file from one of another format, or of other settings of this one. An empty tag
    /// is left to the first format, whose entries were in caches before there were others.
    fn cache_tag(&self) -> &[u8];

    /// Reads the header of a file. The first bytes of `file` are at hand, and cost nothing to read.
    ///
    /// # Errors
    /// With the file's path.
    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<Self::Header>;

    /// Where the first block starts if there is one: behind the header.
    fn first_block(&self, header: &Self::Header) -> u64;

    /// Finds the blocks of a file, one behind the other, and checks what they declare. Nobody asks for more behind an
    /// error.
    ///
    /// # Errors
    /// With the file's path, and where there is one the block.
    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Self::Header,
    ) -> Result<impl Iterator<Item = Result<Self::Block>> + 'w>;

    /// The same of those blocks that begin at byte `from` or behind it: the first block, or the end of those of a
    /// [front](Format::decode_front).
    ///
    /// # Errors
    /// As [`Format::walk`].
    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Self::Header,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Self::Block>> + 'w> {
        let behind = move |block: &Result<Self::Block>| block.as_ref().map_or(true, |b| self.extent(b).offset >= from);
        Ok(self.walk(file, header)?.filter(behind))
    }

    /// Where a block lies, and how many rows it has.
    fn extent(&self, block: &Self::Block) -> Extent;

    /// Checks that block `number`, which is said to have no rows, has none: it is never read again, so nobody else
    /// would notice. `stored` are the bytes of its extent, `pool` has memory for more.
    ///
    /// # Errors
    /// Malformed, if it isn't such a block.
    fn check_empty(
        &self,
        header: &Self::Header,
        number: u64,
        block: &Self::Block,
        stored: &[u8],
        pool: &BufferPool,
    ) -> Result<()>;

    /// The blocks that were found in a file as bytes that can be kept.
    ///
    /// # Errors
    /// Of memory.
    fn encode(&self, header: &Self::Header, blocks: &[Self::Block]) -> Result<Vec<u8>>;

    /// The blocks of a file of `size` bytes; `None` if they are those of a file with another header. Nothing in the
    /// bytes is to be trusted: what comes out is what a walk over a file of this size could have found.
    ///
    /// # Errors
    /// Malformed, if the bytes aren't an index, or not one of blocks that such a file could have.
    fn decode(&self, header: &Self::Header, index: &[u8], size: u64) -> Result<Option<Vec<Self::Block>>>;

    /// The first blocks of a file that has grown, out of the index of when it was smaller: those that a walk through
    /// the whole file finds at its beginning, and at least one. `None` if what the index is of can't be found in the
    /// file any more, if none of its blocks is sure to have stayed, and of formats that can't tell.
    ///
    /// # Errors
    /// As [`Format::decode`]; those of reading the file.
    fn decode_front(
        &self,
        _file: &dyn ReadAt,
        _header: &Self::Header,
        _index: &[u8],
    ) -> Result<Option<Vec<Self::Block>>> {
        Ok(None)
    }
}
