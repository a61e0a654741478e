//! The compressed bytes in front of a decoder.

use fastpipe_batch::{ReadAt, Result, try_filled};

/// Compressed bytes that are read at once.
const CHUNK: usize = 64 << 10;

/// Bytes of a file from a position on, a chunk of which is at hand.
pub(crate) struct Input {
    chunk: Vec<u8>,
    /// What is at hand and not used yet.
    from: usize,
    to: usize,
    /// The byte of the file behind what is at hand.
    next: u64,
}

impl Input {
    pub(crate) fn at(offset: u64) -> Result<Input> {
        Ok(Input {
            chunk: try_filled(0, CHUNK, "a piece of a compressed file")?,
            from: 0,
            to: 0,
            next: offset,
        })
    }

    /// The byte of the file that comes next.
    pub(crate) fn offset(&self) -> u64 {
        self.next - (self.to - self.from) as u64
    }

    /// What is at hand.
    pub(crate) fn bytes(&self) -> &[u8] {
        &self.chunk[self.from..self.to]
    }

    /// Has at least this many bytes at hand, which are few; false if the file ends before.
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

    /// Goes behind bytes that are at hand.
    pub(crate) fn used(&mut self, count: usize) {
        self.from = self.to.min(self.from + count);
    }

    /// Goes behind bytes, most of which may not be at hand; false if the file ends before.
    pub(crate) fn skip(&mut self, file: &dyn ReadAt, count: u64) -> Result<bool> {
        let at_hand = (self.to - self.from) as u64;
        if count <= at_hand {
            self.used(count as usize);
            return Ok(true);
        }
        let Some(last) = self.next.checked_add(count - at_hand - 1) else {
            return Ok(false);
        };
        // The last of them is read, so that it is known to be there.
        (self.from, self.to, self.next) = (0, 0, last);
        let there = self.fill(file, 1)?;
        self.used(1);
        Ok(there)
    }
}
