//! A chunk of records as a [`Unit`].

use std::sync::Arc;

use fastpipe_batch::{
    Buffer, BufferPool, Error, ErrorKind, Mark, Pick, Result, Sink, Starts, Unit, fewer_rows, fitting_starts,
    try_with_capacity,
};

use crate::decode::{Failed, Scratch, record};
use crate::framing::{TAIL, data_at, verify};
use crate::plan::Program;
use crate::wire::Cursor;

/// An open chunk of records.
pub(crate) struct Records {
    pub(crate) program: Arc<Program>,
    pub(crate) data: Buffer,
    /// The offset of the chunk in its file.
    pub(crate) offset: u64,
    pub(crate) rows: u32,
    /// The starts of the records, if they are known.
    pub(crate) starts: Starts,
}

impl Records {
    /// Returns the memory for decoding records of chunks with the same program.
    pub(crate) fn scratch<'d>(&self) -> Result<Scratch<'d>> {
        Scratch::new(&self.program)
    }

    fn at(&self, byte: usize, record: u32, error: Error) -> Error {
        error.at_offset(self.offset + byte as u64).at_record(record.into())
    }

    /// Returns a cursor for the message of the record that starts at `start`, and the end of the record. Verifies its
    /// checksums.
    #[inline]
    pub(crate) fn message(&self, start: usize, number: u32) -> Result<(Cursor<'_>, usize)> {
        let data = data_at(&self.data, start).map_err(|error| self.at(start, number, error))?;
        verify(&self.data, &data).map_err(|error| self.at(start, number, error))?;
        Ok((Cursor::new(&self.data, data.start, data.end), data.end + TAIL))
    }

    /// Decodes the record that starts at `start`. Returns the end of the record.
    #[inline]
    fn decode<'d>(&'d self, start: usize, pick: Pick, scratch: &mut Scratch<'d>, out: &mut Sink<'_>) -> Result<usize> {
        let (message, end) = self.message(start, pick.record)?;
        out.begin_row(pick.slot)?;
        record(&self.program, message, scratch, out).map_err(|failed| self.failed(failed, start, pick.record))?;
        out.end_row()?;
        Ok(end)
    }

    #[cold]
    fn failed(&self, failed: Failed, start: usize, number: u32) -> Error {
        let error = self.at(start, number, failed.trouble.into_error(self.offset));
        match failed.feature {
            Some(feature) => error.at_feature(&feature),
            None => error,
        }
    }

    /// Decodes one record. The starts of records must be known.
    pub(crate) fn pick<'d>(&'d self, pick: Pick, scratch: &mut Scratch<'d>, out: &mut Sink<'_>) -> Result<()> {
        let start = self.starts.get(pick.record as usize).copied();
        let start = start
            .filter(|_| pick.record < self.rows)
            .ok_or_else(|| fewer_rows(pick.record, self.rows))?;
        self.decode(start as usize, pick, scratch, out).map(drop)
    }

    /// Returns the start of the next record. Returns an error after the last one.
    #[inline]
    fn next(&self, at: u64, record: u32) -> Result<usize> {
        match (at as usize) < self.data.len() {
            true => Ok(at as usize),
            false => Err(fewer_rows(record, self.rows)),
        }
    }

    /// Returns an error if bytes follow the last record.
    fn check_end(&self, mark: Mark) -> Result<()> {
        if mark.record == self.rows && mark.byte as usize != self.data.len() {
            let reason = "more records follow than when the file was indexed: the file changed";
            return Err(self.at(mark.byte as usize, mark.record, Error::new(ErrorKind::Storage, reason)));
        }
        Ok(())
    }
}

impl Unit for Records {
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
        let (mut mark, mut scratch) = (from, self.scratch()?);
        for &pick in picks {
            if mark.record < pick.record {
                mark = self.advance(mark, pick.record)?;
            }
            let start = self.next(mark.byte, pick.record)?;
            let end = self.decode(start, pick, &mut scratch, out)?;
            mark = Mark {
                record: pick.record + 1,
                byte: end as u64,
            };
        }
        self.check_end(mark)?;
        Ok(mark)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        let mut mark = from;
        while mark.record < record {
            let start = self.next(mark.byte, mark.record)?;
            let data = data_at(&self.data, start).map_err(|error| self.at(start, mark.record, error))?;
            mark = Mark {
                record: mark.record + 1,
                byte: (data.end + TAIL) as u64,
            };
        }
        Ok(mark)
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        if let Some(known) = fitting_starts(known, self.rows, self.data.len()) {
            self.starts = known;
            return Ok(self.starts.clone());
        }
        let mut starts = try_with_capacity(self.rows as usize + 1, "the starts of a chunk's records")?;
        let mut mark = Mark::START;
        for record in 1..=self.rows {
            // A chunk has fewer than 2^32 bytes.
            starts.push(mark.byte as u32);
            mark = self.advance(mark, record)?;
        }
        self.check_end(mark)?;
        starts.push(mark.byte as u32);
        self.starts = Arc::new(starts);
        Ok(self.starts.clone())
    }

    fn recycle(&mut self, pool: &BufferPool) {
        pool.put(std::mem::take(&mut self.data));
    }
}
