//! A sample of the rows of a CSV stream, drawn as they come.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Feature, Result, try_collect, try_filled, try_reserve};
use fastpipe_csv::{CsvFile, CsvSource, Dialect, Keep, KeptRows, RowStream};
use fastpipe_order::{Key, Reservoir};

use crate::csv_files::CsvFiles;

/// A row that is kept.
struct Row {
    number: u64,
    offset: u64,
    text: Box<[u8]>,
}

/// The rows that are kept so far.
struct Kept {
    reservoir: Reservoir,
    /// The row that enters next, and its place.
    next: (u64, u64),
    rows: Vec<Row>,
    /// Bytes of their texts.
    bytes: usize,
    memory_limit: Option<u64>,
}

impl Kept {
    /// Bytes that are needed at the end, when texts are joined.
    fn check(&self, held: usize) -> Result<()> {
        let needed = 2 * self.bytes as u64 + (self.rows.len() * size_of::<Row>() + held) as u64;
        match self.memory_limit {
            Some(limit) if needed > limit => Err(Error::over_memory_limit(format!(
                "the {} rows that are kept so far take {needed} bytes, more than memory_limit={limit}: draw fewer rows, or raise \
                 the limit",
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
        let mut copy = try_filled(0, text.len(), "the rows that are kept")?;
        copy.copy_from_slice(text);
        let row = Row {
            number,
            offset,
            text: copy.into(),
        };
        self.bytes += row.text.len();
        let slot = self.next.1 as usize;
        if slot == self.rows.len() {
            try_reserve(&mut self.rows, 1, "the rows that are kept")?;
            self.rows.push(row);
        } else {
            self.bytes -= self.rows[slot].text.len();
            self.rows[slot] = row;
        }
        // No row follows the last one that could be counted.
        self.next = self.reservoir.next().unwrap_or((u64::MAX, 0));
        self.check(0)
    }
}

/// Draws rows of a stream while its bytes are pushed.
pub struct CsvReservoir {
    name: Arc<str>,
    dialect: Dialect,
    features: Vec<Feature>,
    stream: RowStream,
    kept: Kept,
    /// Whether its header was held against the features.
    checked: bool,
}

impl CsvReservoir {
    /// Draws this many rows. `features` are the features to read later; empty to infer them.
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

    /// Passes over more bytes.
    ///
    /// # Errors
    /// Of the text; of features that its header doesn't have; of memory, or its limit.
    pub fn push(&mut self, bytes: &[u8]) -> Result<()> {
        self.stream.push(bytes, &mut self.kept)?;
        if let (false, Some(header)) = (self.checked, self.stream.header()) {
            // Before all the rest is read for nothing.
            let file = CsvFile {
                path: self.name.clone(),
                header: header.clone(),
                stretches: Vec::new(),
            };
            CsvSource::new(&self.features, &self.dialect, &[file])?;
            self.checked = true;
        }
        self.kept.check(self.stream.held_bytes())
    }

    /// Ends the stream. Returns how many rows it had.
    ///
    /// # Errors
    /// Of the text, or of memory.
    pub fn end(&mut self) -> Result<u64> {
        self.stream.end(&mut self.kept)?;
        Ok(self.stream.rows())
    }

    /// The rows that are kept, as files, and their numbers. They are handed out once.
    ///
    /// # Errors
    /// If the stream hasn't ended; of memory.
    pub fn take(&mut self) -> Result<(CsvFiles, Vec<i64>)> {
        let mut rows = std::mem::take(&mut self.kept.rows);
        rows.sort_unstable_by_key(|row| row.number);
        let numbers = try_collect(rows.iter().map(|row| row.number as i64), "the numbers of rows")?;
        let mut kept = KeptRows::default();
        kept.reserve(self.kept.bytes + 1)?;
        for row in rows {
            kept.push(&row.text, row.offset, Some(row.number))?;
        }
        let header = self.stream.header().cloned();
        let header = header.ok_or_else(|| Error::new(ErrorKind::Closed, "the stream hasn't ended"))?;
        let picked = vec![(self.name.clone(), header, kept)];
        Ok((CsvFiles::picked(self.dialect.clone(), picked), numbers))
    }
}
