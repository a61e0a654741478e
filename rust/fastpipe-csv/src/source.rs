//! CSV files as a [`Source`]. A unit is a chunk of rows.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{
    BufferPool, ByteRange, Error, ErrorKind, Feature, Fetched, FileStamp, Pass, Result, Row, Sink, Source, SourceFacts,
    Starts, Unit, UnitInfo, Unpicked, Work, own_units, try_reserve,
};

use crate::dialect::{Dialect, Lines};
use crate::file::{CsvFile, Reading, Stretch};
use crate::kept::Origins;
use crate::plan::{Layout, Program};
use crate::unit::Rows;

struct File {
    path: Arc<str>,
    program: Arc<Program>,
    lines: Lines,
    first_unit: u64,
    first_row: u64,
    /// The original positions of its rows, if they were picked from another file.
    origins: Option<Arc<Origins>>,
}

/// Chunks of CSV files, read as the same columns.
pub struct CsvSource {
    reading: Arc<Reading>,
    files: Vec<File>,
    stretches: Vec<Stretch>,
    /// The number of rows before each chunk, counted over all files.
    rows_before: Vec<u64>,
    facts: SourceFacts,
}

impl CsvSource {
    /// Creates a source that reads `features` from files. Columns are found by name, so files may have them in any
    /// order and may have additional columns.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if CSV fields can't be read as a feature, or if a file lacks a feature;
    /// [`ErrorKind::OutOfMemory`].
    pub fn new(features: &[Feature], dialect: &Dialect, files: &[CsvFile]) -> Result<CsvSource> {
        let reading = Reading {
            dialect: dialect.clone(),
            layout: Layout::new(features)?,
            decimal: dialect.decimal,
            numeric_nulls: dialect.has_numeric_nulls(),
            lossless: dialect.lossless,
        };
        let work = Work {
            open: "opening",
            place: "parsing",
        };
        let mut source = CsvSource {
            facts: SourceFacts {
                locations: files.iter().map(|file| file.path.clone()).collect(),
                ..SourceFacts::new(&*reading.layout.specs, "csv", work)
            },
            reading: Arc::new(reading),
            files: Vec::with_capacity(files.len()),
            stretches: Vec::new(),
            rows_before: Vec::new(),
        };
        let mut rows = 0;
        let mut programs: Vec<Arc<Program>> = Vec::new();
        for file in files {
            let known = programs.iter().find(|program| program.names == file.header.names);
            let program = match known {
                Some(program) => program.clone(),
                None => {
                    let program = Program::new(&source.reading.layout, &file.header);
                    let program = Arc::new(program.map_err(|e| e.at_path(&file.path))?);
                    programs.push(program.clone());
                    program
                }
            };
            source.files.push(File {
                path: file.path.clone(),
                program,
                lines: Lines::new(dialect, file.header.names.len()),
                first_unit: source.stretches.len() as u64,
                first_row: rows,
                origins: None,
            });
            let count = file.stretches.len();
            try_reserve(&mut source.stretches, count, "the list of all chunks").map_err(|e| e.at_path(&file.path))?;
            try_reserve(&mut source.rows_before, count, "the list of all chunks").map_err(|e| e.at_path(&file.path))?;
            for stretch in &file.stretches {
                source.stretches.push(*stretch);
                source.rows_before.push(rows);
                rows += u64::from(stretch.rows);
            }
        }
        Ok(source)
    }

    /// Sets the stamps of the files, taken before their rows were found.
    #[must_use]
    pub fn with_stamps(mut self, stamps: Vec<FileStamp>) -> CsvSource {
        self.facts.stamps = stamps;
        self
    }

    /// Sets the bytes of the files that are in memory.
    #[must_use]
    pub fn with_contents(mut self, contents: Vec<Option<Bytes>>) -> CsvSource {
        self.facts.contents = contents;
        self
    }

    /// Sets the original positions of the rows of each file whose rows were picked from another file.
    #[must_use]
    pub fn with_origins(mut self, origins: &[Arc<Origins>]) -> CsvSource {
        for (file, origins) in self.files.iter_mut().zip(origins) {
            file.origins = Some(origins.clone());
        }
        self
    }

    /// Returns the file of a row and the index of the row in that file.
    pub fn place_of(&self, unit: u64, record: u32) -> (&Arc<str>, u64) {
        let (file, _) = self.file(unit);
        let row = self.rows_before[unit as usize] - file.first_row + u64::from(record);
        let origin = file.origins.as_ref().and_then(|origins| origins.number(row));
        (&file.path, origin.unwrap_or(row))
    }

    /// Writes the positions and the row counts of all chunks to `out`, for a digest.
    pub fn write_layout(&self, mut out: impl FnMut(&[u8])) {
        for file in &self.files {
            out(&file.first_unit.to_le_bytes());
        }
        for stretch in &self.stretches {
            out(&stretch.offset.to_le_bytes());
            out(&stretch.len.to_le_bytes());
            out(&stretch.rows.to_le_bytes());
        }
    }

    fn file(&self, unit: u64) -> (&File, usize) {
        let i = self.files.partition_point(|f| f.first_unit <= unit).saturating_sub(1);
        (&self.files[i], i)
    }
}

impl Source for CsvSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.stretches.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let stretch = self.stretches[unit as usize];
        let (_, location) = self.file(unit);
        let range = ByteRange {
            location: location as u32,
            offset: stretch.offset,
            len: stretch.len.into(),
        };
        UnitInfo {
            rows: stretch.rows,
            range: Some(range),
            class: 0,
            apart: false,
            held: None,
        }
    }

    fn open(&self, unit: u64, _pass: Pass, fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let (file, _) = self.file(unit);
        let stretch = self.stretches[unit as usize];
        let data = fetched.into_bytes();
        if data.len() != stretch.len as usize {
            let reason = format!("a chunk of {} bytes was read as {} bytes", stretch.len, data.len());
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        Ok(Box::new(Rows {
            reading: self.reading.clone(),
            lines: file.lines.clone(),
            program: file.program.clone(),
            data,
            offset: stretch.offset,
            rows: stretch.rows,
            starts: Starts::default(),
        }))
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        let at = |slot| move |error| Unpicked { slot, error };
        let own = own_units::<Rows>(units).map_err(at(slots.start))?;
        let cells = out.choose_cells(&self.reading.layout.cells);
        cells.map_err(|overflow| at(slots.start)(overflow.into()))?;
        let claimed = out.claim(slots.start as u32..slots.end as u32);
        claimed.map_err(|overflow| at(slots.start)(overflow.into()))?;
        for slot in slots {
            let row = rows[slot];
            own[row.unit as usize]
                .pick(row.record, slot as u32, out)
                .map_err(at(slot))?;
        }
        Ok(())
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        let (file, _) = self.file(unit);
        let first = self.rows_before[unit as usize] - file.first_row;
        // Users count rows from the start of a file.
        let row = error.location().record.map(|record| first + record);
        let error = match (&file.origins, row) {
            (Some(origins), row) => origins.locate(row, error),
            (None, Some(row)) => error.with_record(row),
            (None, None) => error.at_offset(self.stretches[unit as usize].offset),
        };
        error.at_path(&file.path).at_unit(unit)
    }
}
