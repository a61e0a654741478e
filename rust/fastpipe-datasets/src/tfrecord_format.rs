//! TFRecord files as a [`Format`]: connects `fastpipe-tfrecord` with `fastpipe-files`. A block is a chunk of records.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, Chunk, Error, ErrorKind, ReadAt, Result};
use fastpipe_files::{Extent, Format};
use fastpipe_tfrecord::{Header, Walk, decode_front, decode_index, encode_index};

/// The format of TFRecord files.
pub struct TfRecordFormat;

impl Format for TfRecordFormat {
    type Header = Header;
    type Block = Chunk;
    /// Chunks of a few megabytes in total.
    const BLOCKS_AT_ONCE: usize = 64;

    fn cache_tag(&self) -> &[u8] {
        b"tfrecord"
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<Header> {
        Header::read(file).map_err(|error| error.at_path(path))
    }

    fn first_block(&self, _: &Header) -> u64 {
        0
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Header,
    ) -> Result<impl Iterator<Item = Result<Chunk>> + 'w> {
        self.walk_from(file, header, 0)
    }

    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Header,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Chunk>> + 'w> {
        Ok(Walk::new(file, header.size, from))
    }

    fn extent(&self, chunk: &Chunk) -> Extent {
        Extent {
            offset: chunk.offset,
            len: chunk.len.into(),
            rows: chunk.rows,
        }
    }

    fn check_empty(&self, _: &Header, number: u64, chunk: &Chunk, _: &[u8], _: &BufferPool) -> Result<()> {
        let reason = "it lists a chunk without records";
        Err(Error::new(ErrorKind::Malformed, reason).at_block(number, chunk.offset))
    }

    fn encode(&self, header: &Header, chunks: &[Chunk]) -> Result<Vec<u8>> {
        Ok(encode_index(header, chunks))
    }

    fn decode(&self, header: &Header, index: &[u8], size: u64) -> Result<Option<Vec<Chunk>>> {
        decode_index(index, header, size)
    }

    fn decode_front(&self, file: &dyn ReadAt, header: &Header, index: &[u8]) -> Result<Option<Vec<Chunk>>> {
        decode_front(index, header, file)
    }
}
