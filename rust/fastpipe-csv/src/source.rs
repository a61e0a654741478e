//! CSV files as a [`Source`]. A unit is a chunk of rows.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, Chunk, Chunks, Contents, Error, Feature, Fetched, FileStamp, Pass, Result, Row, Sink, Source,
    SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work, own_units,
};

use crate::dialect::{Dialect, Lines};
use crate::file::{CsvFile, Reading};
use crate::kept::Origins;
use crate::plan::{Layout, Program};
use crate::unit::Rows;

struct File {
    program: Arc<Program>,
    lines: Lines,
    /// The original positions of its rows, if they were picked from another file.
    origins: Option<Arc<Origins>>,
}

/// Chunks of CSV files, read as the same columns.
pub struct CsvSource {
    reading: Arc<Reading>,
    files: Vec<File>,
    chunks: Chunks,
    facts: SourceFacts,
}

impl CsvSource {
    /// Creates a source that reads `features` from files. Columns are found by name, so files may have them in any
    /// order and may have additional columns.
    ///
    /// # Errors
    /// [`fastpipe_batch::ErrorKind::Schema`] if CSV fields can't be read as a feature, or if a file lacks a feature;
    /// [`fastpipe_batch::ErrorKind::OutOfMemory`].
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
            chunks: Chunks::default(),
        };
        let mut programs: Vec<Arc<Program>> = Vec::new();
        for file in files {
            let known = programs.iter().find(|program| program.names == file.header.names);
            let program = match known {
                Some(program) => program.clone(),
                None => {
                    let first = files.first().filter(|_| !programs.is_empty());
                    let first = first.map(|first| &*first.path);
                    let program = Program::new(&source.reading.layout, &file.header, first);
                    let program = Arc::new(program.map_err(|e| e.at_path(&file.path))?);
                    programs.push(program.clone());
                    program
                }
            };
            source.files.push(File {
                program,
                lines: Lines::new(dialect, file.header.names.len()),
                origins: None,
            });
            source.chunks.add(&file.path, file.chunks.iter().map(Chunk::from))?;
        }
        Ok(source)
    }

    /// Sets the stamps of the files, taken before their rows were found, and the bytes of the files that are in memory.
    #[must_use]
    pub fn with_storage(mut self, stamps: Vec<FileStamp>, contents: Vec<Option<Contents>>) -> CsvSource {
        (self.facts.stamps, self.facts.contents) = (stamps, contents);
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

    /// Returns the chunks of all files.
    pub fn chunks(&self) -> &Chunks {
        &self.chunks
    }

    /// Returns the file of a row and the index of the row in that file.
    pub fn place_of(&self, unit: u64, record: u32) -> (&Arc<str>, u64) {
        let (path, row) = self.chunks.row_in_file(unit, record.into());
        let origin = self.file(unit).origins.as_ref().and_then(|origins| origins.number(row));
        (path, origin.unwrap_or(row))
    }

    fn file(&self, unit: u64) -> &File {
        &self.files[self.chunks.file(unit)]
    }
}

impl Source for CsvSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.chunks.units()
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        self.chunks.describe(unit)
    }

    fn open(&self, unit: u64, _pass: Pass, fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let (file, chunk) = (self.file(unit), self.chunks.get(unit));
        Ok(Box::new(Rows {
            reading: self.reading.clone(),
            lines: file.lines.clone(),
            program: file.program.clone(),
            data: self.chunks.bytes_of(unit, fetched)?,
            offset: chunk.offset,
            rows: chunk.rows,
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

    fn shares_pick(&self, other: &dyn Source) -> bool {
        // Chunks contain the program by which they are parsed.
        let other = (other as &dyn Any).downcast_ref::<CsvSource>();
        other.is_some_and(|other| other.reading.layout.cells == self.reading.layout.cells)
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        // Users count rows from the start of a file.
        let row = error
            .location()
            .record
            .map(|record| self.chunks.row_in_file(unit, record).1);
        let error = match (&self.file(unit).origins, row) {
            (Some(origins), row) => origins.locate(row, error),
            (None, Some(row)) => error.with_record(row),
            (None, None) => error.at_offset(self.chunks.get(unit).offset),
        };
        error.at_path(self.chunks.unit_in_file(unit).0).at_unit(unit)
    }
}
