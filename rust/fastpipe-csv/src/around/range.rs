//! Finds all rows that start in a range of a file.

use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind, Result};

use super::{FIRST_REACH, Surroundings};
use crate::rows::Next;

impl Surroundings<'_> {
    /// Passes on each row that starts in a range of the span, with its offset.
    ///
    /// # Errors
    /// As for [`Surroundings::row_at`], for the byte before the range. [`ErrorKind::Limit`] if a row has more than
    /// `most` bytes, [`ErrorKind::Malformed`] if it is never closed. Any error of `each`.
    pub fn rows_in(
        &mut self,
        range: Range<u64>,
        most: u64,
        mut each: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let mut next = self.boundary(range.start)?;
        let mut behind = FIRST_REACH / 4;
        while next < range.end.min(self.size) {
            let to = next.max(range.end).saturating_add(behind).min(self.size);
            self.read(next, to)?;
            let (whole, mut at) = (to == self.size, 0);
            let unfinished = loop {
                match self.lines.next(&self.window, at) {
                    Next::End => return Ok(()),
                    Next::Row { start, .. } | Next::Open { start } if next + start as u64 >= range.end => return Ok(()),
                    Next::Row { start, end } if whole || self.window[end - 1] == b'\n' => {
                        each(next + start as u64, &self.window[start..end])?;
                        at = end;
                    }
                    Next::Open { start } if whole => {
                        let reason = "a quote is never closed: quote=None reads quotes as ordinary characters";
                        return Err(Error::new(ErrorKind::Malformed, reason).at_offset(next + start as u64));
                    }
                    Next::Row { start, .. } | Next::Open { start } => break start,
                }
            };
            next += unfinished as u64;
            if to - next > most {
                return Err(Error::new(ErrorKind::Limit, format!("a row has more than {most} bytes")).at_offset(next));
            }
            behind = behind.saturating_mul(4);
        }
        Ok(())
    }

    /// Returns the end of the row, comment or empty line that contains the byte before `at`.
    fn boundary(&mut self, at: u64) -> Result<u64> {
        if at <= self.first {
            return Ok(self.first);
        }
        if let Some(row) = self.row_at(at - 1)? {
            return Ok(row.offset + row.len);
        }
        let mut from = at - 1;
        loop {
            let to = from.saturating_add(FIRST_REACH).min(self.size);
            self.read(from, to)?;
            match memchr::memchr(b'\n', &self.window) {
                Some(newline) => return Ok(from + newline as u64 + 1),
                None if to == self.size => return Ok(to),
                None => from = to,
            }
        }
    }
}
