//! A chunk of rows as a [`Unit`].

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    Buffer, BufferPool, Error, ErrorKind, Mark, Pick, Result, Sink, Starts, Unit, fewer_rows, fitting_starts,
    try_with_capacity,
};
use memchr::memchr_iter;

use crate::dialect::Lines;
use crate::field_error::FieldError;
use crate::fields::{Ended, Fields, LoneReturn};
use crate::file::Reading;
use crate::header::lone_return;
use crate::plan::Program;
use crate::rows::Next;

/// An open chunk of rows.
pub(crate) struct Rows {
    pub(crate) reading: Arc<Reading>,
    pub(crate) lines: Lines,
    pub(crate) program: Arc<Program>,
    pub(crate) data: Buffer,
    /// The offset of the chunk in its file.
    pub(crate) offset: u64,
    pub(crate) rows: u32,
    /// The starts of the rows, if they are known.
    pub(crate) starts: Starts,
}

impl Rows {
    /// Returns the next row from `at` on, which must be the start of a line.
    pub(crate) fn next(&self, at: usize) -> Next {
        self.lines.next(&self.data, at)
    }

    fn fields(&self, at: usize) -> Fields<'_> {
        Fields::new(&self.lines, &self.data, at)
    }

    /// Returns the start of the next row. Returns an error after the last row.
    #[inline(always)]
    fn start_of_next(&self, at: usize, record: u32) -> Result<usize> {
        let start = match self.lines.fields {
            None => self.lines.past_others(&self.data, at),
            Some(_) => match self.next(at) {
                Next::Row { start, .. } => start,
                Next::Open { start } => start,
                Next::End => self.data.len(),
            },
        };
        if start < self.data.len() {
            Ok(start)
        } else {
            Err(self.fewer(record))
        }
    }

    #[cold]
    fn fewer(&self, record: u32) -> Error {
        fewer_rows(record, self.rows)
    }

    /// Parses the row at `start` into a slot. Returns the end of the row.
    #[inline]
    fn row(&self, start: usize, pick: Pick, out: &mut Sink<'_>) -> Result<usize> {
        out.begin_row(pick.slot)?;
        let mut fields = self.fields(start);
        let program = &*self.program;
        let last = program.fields.len().wrapping_sub(1);
        for (number, targets) in program.fields.iter().enumerate() {
            let at = fields.at;
            let read = match program.targets.get(targets.clone()).unwrap_or_default() {
                [] => fields.skip().map_err(FieldError::from),
                [target] => self.field(&mut fields, target, out),
                several => self.several(&mut fields, several, out),
            };
            let ended = read.map_err(|fault| self.fault(fault, at, number, pick.record))?;
            if (ended == Ended::Row) != (number == last) {
                return Err(self.ragged(start, pick.record));
            }
        }
        out.end_row()?;
        Ok(fields.at)
    }

    /// Returns the error for a field that starts at `at`.
    #[cold]
    fn fault(&self, fault: FieldError, at: usize, number: usize, record: u32) -> Error {
        let error = match fault {
            FieldError::Overflow(overflow) => overflow.into(),
            FieldError::Value(kind, reason) => Error::new(kind, reason).at_offset(self.offset + at as u64),
            FieldError::LoneReturn(LoneReturn(at)) => lone_return(LoneReturn(self.offset as usize + at)),
        };
        error.at_record(record.into()).at_feature(&self.program.names[number])
    }

    /// Returns the error for a row whose number of fields differs from the number of columns, or that contains a lone
    /// carriage return.
    #[cold]
    fn ragged(&self, start: usize, record: u32) -> Error {
        let mut fields = self.fields(start);
        let mut count = 0u64;
        let error = loop {
            count += 1;
            match fields.skip() {
                Ok(Ended::Row) => {
                    let reason = format!(
                        "the row has {count} fields, but the file has {} columns: on_ragged=\"skip\" skips such rows",
                        self.program.fields.len()
                    );
                    break Error::new(ErrorKind::Malformed, reason).at_offset(self.offset + start as u64);
                }
                Ok(Ended::Field) => {}
                Err(LoneReturn(at)) => break lone_return(LoneReturn(self.offset as usize + at)),
            }
        };
        error.at_record(record.into())
    }

    /// Calls `each` with the text of each field of the first rows, until the end or the first damaged row.
    pub(crate) fn texts(&self, rows: u32, mut each: impl FnMut(usize, Cow<'_, [u8]>)) {
        let mut at = 0;
        for _ in 0..rows.min(self.rows) {
            let Next::Row { start, end } = self.next(at) else {
                return;
            };
            let mut fields = self.fields(start);
            for number in 0.. {
                let Ok((text, ended)) = fields.next() else { return };
                each(number, text);
                if ended == Ended::Row {
                    break;
                }
            }
            at = end;
        }
    }

    /// Parses one row. The starts of rows must be known.
    pub(crate) fn pick(&self, record: u32, slot: u32, out: &mut Sink<'_>) -> Result<()> {
        let start = self
            .starts
            .get(record as usize)
            .map_or(self.data.len(), |&start| start as usize);
        if start >= self.data.len() {
            return Err(self.fewer(record));
        }
        self.row(start, Pick { record, slot }, out).map(drop)
    }
}

/// Returns the slots of the picks if they are consecutive.
fn consecutive(picks: &[Pick]) -> Option<Range<u32>> {
    let first = picks.first()?.slot;
    let end = first.checked_add(u32::try_from(picks.len()).ok()?)?;
    let ascend = picks.iter().zip(first..).all(|(pick, slot)| pick.slot == slot);
    ascend.then_some(first..end)
}

impl Unit for Rows {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.data.capacity() + 4 * self.starts.len()
    }

    fn bytes(&self) -> usize {
        self.data.len()
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        out.choose_cells(&self.reading.layout.cells)?;
        if let Some(slots) = consecutive(picks) {
            out.claim(slots)?;
        }
        let mut mark = from;
        for &pick in picks {
            if mark.record < pick.record {
                mark = self.advance(mark, pick.record)?;
            }
            let start = self.start_of_next(mark.byte as usize, pick.record)?;
            let end = self.row(start, pick, out)?;
            mark = Mark {
                record: pick.record + 1,
                byte: end as u64,
            };
        }
        if mark.record == self.rows && self.next(mark.byte as usize) != Next::End {
            return Err(self.fewer(self.rows + 1));
        }
        Ok(mark)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        let mut mark = from;
        while mark.record < record {
            match self.next(mark.byte as usize) {
                Next::Row { end, .. } => {
                    mark = Mark {
                        record: mark.record + 1,
                        byte: end as u64,
                    }
                }
                Next::Open { .. } | Next::End => return Err(self.fewer(mark.record)),
            }
        }
        Ok(mark)
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        if let Some(known) = fitting_starts(known, self.rows, self.data.len()) {
            self.starts = known;
            return Ok(self.starts.clone());
        }
        let mut starts = try_with_capacity(self.rows as usize + 1, "the starts of a chunk's rows")?;
        let mut at = 0;
        if self.lines.are_rows(&self.data) {
            // Finds all newlines in a single pass.
            for end in memchr_iter(b'\n', &self.data) {
                // Empty lines and comments are not rows.
                if starts.len() < self.rows as usize && self.lines.past_others(&self.data[..=end], at) == at {
                    starts.push(at as u32);
                }
                at = end + 1;
            }
        }
        loop {
            match self.next(at) {
                Next::Row { start, end } if starts.len() < self.rows as usize => {
                    // A chunk has fewer than 2^32 bytes.
                    starts.push(start as u32);
                    at = end;
                }
                Next::End if starts.len() == self.rows as usize => break,
                _ => return Err(self.fewer(starts.len() as u32)),
            }
        }
        starts.push(self.data.len() as u32);
        self.starts = Arc::new(starts);
        Ok(self.starts.clone())
    }

    fn recycle(&mut self, pool: &BufferPool) {
        pool.put(std::mem::take(&mut self.data));
    }
}
