//! A piece of a file that moves forward.

use fastpipe_batch::{ReadAt, Result, try_reserve};

/// Bytes that are read at once.
const STEP: usize = 4 << 20;

/// Bytes of a file, one behind the other. What two reads have in common is read once: of a compressed file, which can
/// only be read forward, nothing is read twice.
#[derive(Default)]
pub(super) struct FileWindow {
    bytes: Vec<u8>,
    /// Where they begin in the file.
    start: u64,
    /// How many of them are of the file.
    len: usize,
}

impl FileWindow {
    /// What was read last, and perhaps more behind it.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Reads this many bytes from a position on; fewer only at the end of the file. Returns how many there are.
    pub(super) fn read(&mut self, file: &dyn ReadAt, at: u64, want: usize) -> Result<usize> {
        let before = at.checked_sub(self.start).filter(|&before| before <= self.len as u64);
        // All of them were read before, or none.
        let before = before.map_or(self.len, |before| before as usize);
        self.bytes.copy_within(before..self.len, 0);
        (self.start, self.len) = (at, self.len - before);
        while self.len < want {
            // Memory grows with what is there.
            let until = want.min(self.len + STEP);
            let more = until.saturating_sub(self.bytes.len());
            try_reserve(&mut self.bytes, more, "a piece of a file")?;
            self.bytes.resize(self.bytes.len() + more, 0);
            let found = file.read_at(at + self.len as u64, &mut self.bytes[self.len..until])?;
            self.len += found;
            if self.len < until {
                break;
            }
        }
        Ok(self.len.min(want))
    }
}
