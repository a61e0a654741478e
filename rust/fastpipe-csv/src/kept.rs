//! Rows that were picked from a file, stored as a separate file in memory. They are parsed like any file, but errors
//! refer to their original positions.

use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{Error, Result, try_reserve};

use crate::file::{CsvChunk, CsvFile};
use crate::header::Header;
use crate::scan::CHUNK_BYTES;

/// The original positions of the rows in a [`KeptRows`].
#[derive(Debug, Default)]
pub struct Origins {
    /// The current and the original offset of each row.
    starts: Vec<(u64, u64)>,
    /// The original indices of the rows, if they are known.
    numbers: Vec<u64>,
}

impl Origins {
    /// Returns the original index of a row, if it is known.
    pub(crate) fn number(&self, row: u64) -> Option<u64> {
        self.numbers.get(row as usize).copied()
    }

    /// Changes the location of an error to the row's original position.
    pub(crate) fn locate(&self, row: Option<u64>, mut error: Error) -> Error {
        if let Some(offset) = error.location().offset {
            let next = self.starts.partition_point(|&(now, _)| now <= offset);
            if let Some(&(now, before)) = next.checked_sub(1).and_then(|i| self.starts.get(i)) {
                error = error.with_offset(before + (offset - now));
            }
        } else if let Some(&(_, before)) = row.and_then(|row| self.starts.get(row as usize)) {
            error = error.at_offset(before);
        }
        match row.and_then(|row| self.number(row)) {
            Some(number) => error.with_record(number),
            None => error.without_record(),
        }
    }
}

/// Collects rows of a file.
#[derive(Debug, Default)]
pub struct KeptRows {
    bytes: Vec<u8>,
    origins: Origins,
    chunks: Vec<CsvChunk>,
}

impl KeptRows {
    /// Reserves room for this many bytes of rows.
    ///
    /// # Errors
    /// Returns an error if memory is exhausted.
    pub fn reserve(&mut self, bytes: usize) -> Result<()> {
        try_reserve(&mut self.bytes, bytes, "the rows that are kept")
    }

    /// Adds a row with its text, its byte offset in the file, and its index in the file. The index must be given for
    /// all rows or for none.
    ///
    /// # Errors
    /// Returns an error if memory is exhausted.
    pub fn push(&mut self, text: &[u8], offset: u64, number: Option<u64>) -> Result<()> {
        let start = self.bytes.len() as u64;
        try_reserve(&mut self.bytes, text.len() + 1, "the rows that are kept")?;
        self.bytes.extend_from_slice(text);
        // The last row of a file may lack its newline.
        if text.last() != Some(&b'\n') {
            self.bytes.push(b'\n');
        }
        try_reserve(&mut self.origins.starts, 1, "the positions of rows")?;
        self.origins.starts.push((start, offset));
        if let Some(number) = number {
            try_reserve(&mut self.origins.numbers, 1, "the indices of rows")?;
            self.origins.numbers.push(number);
        }
        let len = (self.bytes.len() as u64 - start) as u32;
        match self.chunks.last_mut() {
            Some(last) if (last.len as usize) < CHUNK_BYTES => {
                last.len += len;
                last.rows += 1;
            }
            _ => {
                try_reserve(&mut self.chunks, 1, "the list of all chunks")?;
                self.chunks.push(CsvChunk {
                    offset: start,
                    len,
                    rows: 1,
                    skipped: 0,
                });
            }
        }
        Ok(())
    }

    /// Returns a file with these rows under the given path, its bytes, and the original positions of the rows.
    pub fn file(self, path: &Arc<str>, header: &Header) -> (CsvFile, Bytes, Arc<Origins>) {
        let header = Header {
            first: 0,
            size: self.bytes.len() as u64,
            ..header.clone()
        };
        let file = CsvFile {
            path: path.clone(),
            header,
            chunks: self.chunks,
        };
        (file, self.bytes.into(), Arc::new(self.origins))
    }
}
