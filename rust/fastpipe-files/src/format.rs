//! The interface between file formats and the code that opens files.
//!
//! A file consists of a header, which may be empty, and a sequence of *blocks*: byte ranges that are read independently
//! of each other. A walk through the file finds the blocks. A format defines how to read a header and how to walk. It
//! also defines how to encode the blocks that were found, so that the next opening needs no walk. A format never opens
//! a file, and knows nothing about caches, threads and signals.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, ReadAt, Result};

/// The position of a block in its file, and its row count.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Extent {
    /// Position of its first byte.
    pub offset: u64,
    /// Number of bytes that must be read for its rows.
    pub len: u64,
    /// Number of rows.
    pub rows: u32,
}

impl Extent {
    /// Returns the position after the block.
    pub fn end(&self) -> u64 {
        self.offset + self.len
    }
}

/// A file format, with all settings that affect the positions of blocks.
pub trait Format: Sync {
    /// Information about a file before its blocks are found.
    type Header: Send;

    /// A block: its position, and any other information that the format needs.
    type Block: Send;

    /// Number of blocks that a walk finds within a few milliseconds. The caller is asked that often whether to
    /// continue. Formats whose walks read every byte use a smaller number.
    const BLOCKS_AT_ONCE: usize = 2048;

    /// Whether a walk reads every byte, so that a block found to be empty needs no further check.
    const WALK_READS_ALL: bool = false;

    /// Whether files that are read as a whole with their header have an index too, because it has more than positions.
    const INDEXES_SMALL_FILES: bool = false;

    /// Returns a tag that distinguishes the cached indexes of different formats and settings. The empty tag is
    /// reserved for the first format, whose entries existed before tags.
    fn cache_tag(&self) -> &[u8];

    /// Returns the tag of indexes that also have checksums of the blocks, if the format supports them. Another format,
    /// whose walk reads all bytes, writes them. They are used if they exist, and never written or replaced.
    fn checksums_tag(&self) -> Option<&[u8]> {
        None
    }

    /// Reads the header of a file. The first bytes of `file` are buffered, so reading them is free.
    ///
    /// # Errors
    /// With the file's path.
    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<Self::Header>;

    /// Returns the position of the first block, after the header.
    fn first_block(&self, header: &Self::Header) -> u64;

    /// Finds the blocks of a file in sequence, and checks what they declare. Callers stop at the first error.
    ///
    /// # Errors
    /// With the file's path and, if applicable, the block.
    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Self::Header,
    ) -> Result<impl Iterator<Item = Result<Self::Block>> + 'w>;

    /// Finds the blocks that begin at or after `from`: the position of the first block, or the end of the blocks
    /// returned by [`Format::decode_front`].
    ///
    /// # Errors
    /// As for [`Format::walk`].
    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Self::Header,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Self::Block>> + 'w> {
        let behind = move |block: &Result<Self::Block>| block.as_ref().map_or(true, |b| self.extent(b).offset >= from);
        Ok(self.walk(file, header)?.filter(behind))
    }

    /// Returns the position and row count of a block.
    fn extent(&self, block: &Self::Block) -> Extent;

    /// Checks that block `number`, which declares no rows, is really empty. It is never read again, so damage would go
    /// unnoticed. `stored` contains the bytes of its extent, and `pool` provides memory.
    ///
    /// # Errors
    /// Malformed if the block isn't valid and empty.
    fn check_empty(
        &self,
        header: &Self::Header,
        number: u64,
        block: &Self::Block,
        stored: &[u8],
        pool: &BufferPool,
    ) -> Result<()>;

    /// Encodes the blocks of a file for the index cache.
    ///
    /// # Errors
    /// If memory can't be allocated.
    fn encode(&self, header: &Self::Header, blocks: &[Self::Block]) -> Result<Vec<u8>>;

    /// Decodes the blocks of a file of `size` bytes, or returns `None` if they belong to a file with another header.
    /// The bytes are untrusted: the result is always one that a walk over a file of this size could have.
    ///
    /// # Errors
    /// Malformed if the bytes aren't an index, or contain blocks that such a file couldn't have.
    fn decode(&self, header: &Self::Header, index: &[u8], size: u64) -> Result<Option<Vec<Self::Block>>>;

    /// Decodes the first blocks of a file that has grown, from the index of the smaller file. These are at least one,
    /// and equal the first blocks of a walk through the whole file. Returns `None` if the indexed part isn't found in
    /// the file, if no block is certain to be unchanged, or if the format doesn't support this.
    ///
    /// # Errors
    /// As for [`Format::decode`], and errors of reading the file.
    fn decode_front(
        &self,
        _file: &dyn ReadAt,
        _header: &Self::Header,
        _index: &[u8],
    ) -> Result<Option<Vec<Self::Block>>> {
        Ok(None)
    }
}
