//! A buffer of consecutive bytes of a file that moves forward.

use fastpipe_batch::{ReadAt, Result, try_reserve};

/// Bytes that are read at once.
const STEP: usize = 4 << 20;

/// Consecutive bytes of a file. Bytes shared by two reads are read only once. A compressed file, which can only be read
/// forward, is never read twice.
#[derive(Default)]
pub(super) struct FileWindow {
    bytes: Vec<u8>,
    /// Position of the first byte in the file.
    start: u64,
    /// Number of valid bytes in `bytes`.
    len: usize,
}

impl FileWindow {
    /// Returns the bytes of the last read, and possibly more bytes after them.
    pub(super) fn bytes(&self) -> &[u8] {
        &self.bytes[..self.len]
    }

    /// Reads `want` bytes from a position on, or fewer at the end of the file. Returns their number.
    pub(super) fn read(&mut self, file: &dyn ReadAt, at: u64, want: usize) -> Result<usize> {
        let before = at.checked_sub(self.start).filter(|&before| before <= self.len as u64);
        // If the position is outside of the window, nothing is reused.
        let before = before.map_or(self.len, |before| before as usize);
        self.bytes.copy_within(before..self.len, 0);
        (self.start, self.len) = (at, self.len - before);
        while self.len < want {
            // Memory grows only with the data that really exists.
            let until = want.min(self.len + STEP);
            let more = until.saturating_sub(self.bytes.len());
            try_reserve(&mut self.bytes, more, "a part of a file")?;
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
