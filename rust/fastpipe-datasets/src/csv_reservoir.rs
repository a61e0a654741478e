//! A random sample of the rows of a CSV stream, drawn while the stream is read.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Feature, Result, try_collect, try_filled, try_reserve};
use fastpipe_csv::{CsvFile, CsvSource, Dialect, Keep, KeptRows, RowStream};
use fastpipe_order::{Key, Reservoir};

use crate::csv_files::CsvFiles;

/// A row in the sample.
struct Row {
    number: u64,
    offset: u64,
    text: Box<[u8]>,
}

/// The sample so far.
struct Kept {
    reservoir: Reservoir,
    /// The next row that will enter, and its slot.
    next: (u64, u64),
    rows: Vec<Row>,
    /// Total bytes of the rows' texts.
    bytes: usize,
    memory_limit: Option<u64>,
}

impl Kept {
    /// Checks the memory limit against the peak at the end, when texts are joined.
    fn check(&self, held: usize) -> Result<()> {
        let needed = 2 * self.bytes as u64 + (self.rows.len() * size_of::<Row>() + held) as u64;
        match self.memory_limit {
            Some(limit) if needed > limit => Err(Error::over_memory_limit(format!(
                "the {} rows sampled so far need {needed} bytes, more than memory_limit={limit}: draw fewer rows, or \
                 raise the limit",
                self.rows.len()
            ))),
            _ => Ok(()),
        }
    }
}

impl Keep for Kept {
    fn next(&self) -> u64 {
        self.next.0
    }

    fn keep(&mut self, number: u64, offset: u64, text: &[u8]) -> Result<()> {
        let mut copy = try_filled(0, text.len(), "the sampled rows")?;
        copy.copy_from_slice(text);
        let row = Row {
            number,
            offset,
            text: copy.into(),
        };
        self.bytes += row.text.len();
        let slot = self.next.1 as usize;
        if slot == self.rows.len() {
            try_reserve(&mut self.rows, 1, "the sampled rows")?;
            self.rows.push(row);
        } else {
            self.bytes -= self.rows[slot].text.len();
            self.rows[slot] = row;
        }
        // After the last row that can be counted, no row enters.
        self.next = self.reservoir.next().unwrap_or((u64::MAX, 0));
        self.check(0)
    }
}

/// Samples the rows of a stream while its bytes are pushed.
pub struct CsvReservoir {
    name: Arc<str>,
    dialect: Dialect,
    features: Vec<Feature>,
    stream: RowStream,
    kept: Kept,
    /// Whether the header has been checked against the features.
    checked: bool,
}

impl CsvReservoir {
    /// Creates a sample of this many rows. `features` are the features to read later; if empty, they are inferred.
    pub fn new(
        name: Arc<str>,
        dialect: Dialect,
        features: Vec<Feature>,
        rows: u64,
        seed: u64,
        memory_limit: Option<u64>,
    ) -> CsvReservoir {
        let mut reservoir = Reservoir::new(rows, Key { seed, epoch: 0 });
        CsvReservoir {
            stream: RowStream::new(&name, &dialect),
            kept: Kept {
                next: reservoir.next().unwrap_or((u64::MAX, 0)),
                reservoir,
                rows: Vec::new(),
                bytes: 0,
                memory_limit,
            },
            name,
            dialect,
            features,
            checked: false,
        }
    }

    /// Processes the next bytes of the stream.
    ///
    /// # Errors
    /// Errors of the text; features that the header lacks; errors of memory or its limit.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.push(bytes, &mut self.kept)?;
        if let (false, Some(header)) = (self.checked, self.stream.header()) {
            // Fail early, before the rest of the stream is read.
            let file = CsvFile {
                path: self.name.clone(),
                header: header.clone(),
                chunks: Vec::new(),
            };
            CsvSource::new(&self.features, &self.dialect, &[file])?;
            self.checked = true;
        }
        self.kept.check(self.stream.held_bytes())
    }

    /// Ends the stream. Returns its number of rows, and the number of ragged rows that were skipped.
    ///
    /// # Errors
    /// Errors of the text or of memory.
    pub fn end(&mut self) -> Result<(u64, u64)> {
        self.stream.end(&mut self.kept)?;
        Ok((self.stream.rows(), self.stream.skipped()))
    }

    /// Returns the sampled rows as files, and their indices in the stream. Call it only once.
    ///
    /// # Errors
    /// If the stream hasn't ended; errors of memory.
    pub fn take(&mut self) -> Result<(CsvFiles, Vec<i64>)> {
        let mut rows = std::mem::take(&mut self.kept.rows);
        rows.sort_unstable_by_key(|row| row.number);
        let numbers = try_collect(rows.iter().map(|row| row.number as i64), "the indices of rows")?;
        let mut kept = KeptRows::default();
        kept.reserve(self.kept.bytes + 1)?;
        for row in rows {
            kept.push(&row.text, row.offset, Some(row.number))?;
        }
        let header = self.stream.header().cloned();
        let header = header.ok_or_else(|| Error::new(ErrorKind::Closed, "the stream has not ended"))?;
        let picked = vec![(self.name.clone(), header, kept)];
        Ok((CsvFiles::picked(self.dialect.clone(), picked), numbers))
    }
}
