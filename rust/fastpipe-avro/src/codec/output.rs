//! The output buffer of codecs that write in steps. It starts at an estimated size and grows up to a limit.

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
    /// Room for one byte beyond the limit. Some codecs report the end of their output only if they have room for more.
    beyond: [u8; 1],
}

impl<'p> Output<'p> {
    /// Creates an output of at most `most` bytes.
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

    /// Returns the memory to write to, which is never empty.
    pub(super) fn room(&mut self) -> &mut [u8] {
        if self.written < self.bytes.len() {
            &mut self.bytes[self.written..]
        } else {
            &mut self.beyond
        }
    }

    /// Records that `bytes` bytes were written to the memory that `room` returned.
    pub(super) fn wrote(&mut self, bytes: usize) -> Result<(), Error> {
        if self.written + bytes > self.bytes.len() {
            return Err(too_large(self.codec, self.most));
        }
        self.written += bytes;
        Ok(())
    }

    /// Whether the buffer must grow before more can be written.
    pub(super) fn is_full(&self) -> bool {
        self.written == self.bytes.len() && self.written < self.most
    }

    /// Grows the buffer. Returns whether the contents were discarded, so that the codec must start again.
    pub(super) fn grow(&mut self) -> Result<bool, Error> {
        let larger = self.bytes.len().saturating_mul(4).max(4096).min(self.most);
        if self.most < MAX_BLOCK_BYTES {
            // Memory is limited, so the old buffer is released before the new one is allocated.
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

    /// Returns the bytes written.
    pub(super) fn finish(mut self) -> Buffer {
        self.bytes.truncate(self.written);
        self.bytes
    }
}
