//! What a codec writes to piece by piece: it starts at a guess and grows up to what is allowed.

use fastpipe_batch::{Buffer, BufferPool, Error};

use super::{Codec, first_size, too_large};
use crate::limits::MAX_BLOCK_BYTES;

/// A buffer that grows as it is written.
pub(super) struct Output<'p> {
    codec: Codec,
    bytes: Buffer,
    written: usize,
    most: usize,
    pool: &'p BufferPool,
    /// Where a byte more than is allowed would go: some codecs say only when they have room that they have no more to
    /// write.
    beyond: [u8; 1],
}

impl<'p> Output<'p> {
    /// Output of this many bytes at most.
    pub(super) fn new(
        codec: Codec,
        input: &[u8],
        guess: usize,
        most: usize,
        pool: &'p BufferPool,
    ) -> Result<Output<'p>, Error> {
        const RATIO: usize = 1 << 16;
        Ok(Output {
            codec,
            bytes: pool.take(first_size(input.len(), guess, RATIO, most))?,
            written: 0,
            most,
            pool,
            beyond: [0],
        })
    }

    /// Where to write: never empty.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.written < self.bytes.len() {
            &mut self.bytes[self.written..]
        } else {
            &mut self.beyond
        }
    }

    /// Notes what was written to the room.
    pub(super) fn wrote(&mut self, bytes: usize) -> Result<(), Error> {
        if self.written + bytes > self.bytes.len() {
            return Err(too_large(self.codec, self.most));
        }
        self.written += bytes;
        Ok(())
    }

    /// Whether more can be written only once it has grown.
    pub(super) fn is_full(&self) -> bool {
        self.written == self.bytes.len() && self.written < self.most
    }

    /// Makes room for more. Whether what was written is gone and has to be written again.
    pub(super) fn grow(&mut self) -> Result<bool, Error> {
        let larger = self.bytes.len().saturating_mul(4).max(4096).min(self.most);
        if self.most < MAX_BLOCK_BYTES {
            // Memory is limited: what is there isn't held beside what takes its place.
            self.pool.put(std::mem::take(&mut self.bytes));
            self.bytes = self.pool.take(larger)?;
            self.written = 0;
            return Ok(true);
        }
        let mut more = self.pool.take(larger)?;
        more[..self.written].copy_from_slice(&self.bytes);
        self.pool.put(std::mem::replace(&mut self.bytes, more));
        Ok(false)
    }

    /// What was written.
    pub(super) fn finish(mut self) -> Buffer {
        self.bytes.truncate(self.written);
        self.bytes
    }
}
