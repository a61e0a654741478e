//! The compressed input of a decoder.

use fastpipe_batch::{ReadAt, Result, try_filled};

/// Bytes of compressed data that are read at once.
const CHUNK: usize = 64 << 10;

/// A buffered reader of a file's bytes from a position on.
pub(crate) struct Input {
    chunk: Vec<u8>,
    /// The range of `chunk` that is buffered and not consumed yet.
    from: usize,
    to: usize,
    /// Position in the file after the buffered bytes.
    next: u64,
}

impl Input {
    pub(crate) fn at(offset: u64) -> Result<Input> {
        Input::reading(offset, CHUNK)
    }

    /// Returns an input that reads up to `bytes` bytes at once.
    pub(crate) fn reading(offset: u64, bytes: usize) -> Result<Input> {
        Ok(Input {
            chunk: try_filled(0, bytes, "a chunk of a compressed file")?,
            from: 0,
            to: 0,
            next: offset,
        })
    }

    /// Returns the position in the file of the next byte.
    pub(crate) fn offset(&self) -> u64 {
        self.next - (self.to - self.from) as u64
    }

    /// Returns the buffered bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.chunk[self.from..self.to]
    }

    /// Buffers at least `least` bytes, which must be few. Returns false if the file ends before that.
    pub(crate) fn fill(&mut self, file: &dyn ReadAt, least: usize) -> Result<bool> {
        if self.to - self.from < least {
            self.chunk.copy_within(self.from..self.to, 0);
            (self.from, self.to) = (0, self.to - self.from);
            let found = file.read_at(self.next, &mut self.chunk[self.to..])?;
            self.to += found;
            self.next += found as u64;
        }
        Ok(self.to - self.from >= least)
    }

    /// Consumes buffered bytes.
    pub(crate) fn used(&mut self, count: usize) {
        self.from = self.to.min(self.from + count);
    }

    /// Skips bytes, most of which may not be buffered. Returns false if the file ends before that.
    pub(crate) fn skip(&mut self, file: &dyn ReadAt, count: u64) -> Result<bool> {
        let at_hand = (self.to - self.from) as u64;
        if count <= at_hand {
            self.used(count as usize);
            return Ok(true);
        }
        let Some(last) = self.next.checked_add(count - at_hand - 1) else {
            return Ok(false);
        };
        // Read the last skipped byte to ensure that it exists.
        (self.from, self.to, self.next) = (0, 0, last);
        let there = self.fill(file, 1)?;
        self.used(1);
        Ok(there)
    }
}
