//! Avro container files whose indexes also have checksums of the blocks.

use std::sync::Arc;

use fastpipe_avro::{Block, FileInfo};
use fastpipe_batch::{BufferPool, ReadAt, Result};
use fastpipe_files::{Extent, Format};

use crate::avro_format::{AvroFormat, CHECKSUMS_TAG};

/// The format of container files whose walk reads all bytes and computes a checksum of each block. It writes the
/// indexes that [`AvroFormat`] prefers.
pub struct ChecksummedAvro(AvroFormat);

impl Default for ChecksummedAvro {
    fn default() -> Self {
        ChecksummedAvro(AvroFormat::new(true))
    }
}

impl Format for ChecksummedAvro {
    type Header = FileInfo;
    type Block = Block;
    /// Blocks of about a megabyte in total.
    const BLOCKS_AT_ONCE: usize = 16;
    const INDEXES_SMALL_FILES: bool = true;

    fn cache_tag(&self) -> &[u8] {
        CHECKSUMS_TAG
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<FileInfo> {
        self.0.read_header(path, file)
    }

    fn first_block(&self, info: &FileInfo) -> u64 {
        self.0.first_block(info)
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        info: &'w FileInfo,
    ) -> Result<impl Iterator<Item = Result<Block>> + 'w> {
        let blocks = self.0.walk(file, info)?;
        Ok(blocks.map(|block| {
            let mut block = block?;
            block.add_checksum(file)?;
            Ok(block)
        }))
    }

    fn extent(&self, block: &Block) -> Extent {
        self.0.extent(block)
    }

    fn check_empty(&self, info: &FileInfo, number: u64, block: &Block, stored: &[u8], pool: &BufferPool) -> Result<()> {
        self.0.check_empty(info, number, block, stored, pool)
    }

    fn encode(&self, info: &FileInfo, blocks: &[Block]) -> Result<Vec<u8>> {
        self.0.encode(info, blocks)
    }

    fn decode(&self, info: &FileInfo, index: &[u8], size: u64) -> Result<Option<Vec<Block>>> {
        self.0.decode(info, index, size)
    }
}
