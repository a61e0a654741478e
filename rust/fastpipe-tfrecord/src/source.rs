//! TFRecord files as a [`Source`]. A unit is a chunk of records.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, Chunk, Chunks, Contents, Error, Feature, Fetched, FileStamp, Pass, Pick, Result, Row, Sink, Source,
    SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work, own_units,
};

use crate::plan::Program;
use crate::unit::Records;

/// A file whose records were found.
#[derive(Clone, Debug)]
pub struct TfRecordFile {
    /// The path of the file.
    pub path: Arc<str>,
    /// The chunks of its records.
    pub chunks: Vec<Chunk>,
}

/// Chunks of TFRecord files, read as the same columns.
pub struct TfRecordSource {
    program: Arc<Program>,
    chunks: Chunks,
    facts: SourceFacts,
}

impl TfRecordSource {
    /// Creates a source that reads `features` from files. If `all` names all features of the records, a record with
    /// another feature is an error when it is read.
    ///
    /// # Errors
    /// [`fastpipe_batch::ErrorKind::Schema`] if lists can't be read as a feature;
    /// [`fastpipe_batch::ErrorKind::OutOfMemory`].
    pub fn new(features: &[Feature], all: Option<&[String]>, files: &[TfRecordFile]) -> Result<TfRecordSource> {
        let program = Program::new(features, all)?;
        let work = Work {
            open: "opening",
            place: "decoding",
        };
        let mut source = TfRecordSource {
            facts: SourceFacts {
                locations: files.iter().map(|file| file.path.clone()).collect(),
                ..SourceFacts::new(&*program.specs, "tfrecord", work)
            },
            program: Arc::new(program),
            chunks: Chunks::default(),
        };
        for file in files {
            source.chunks.add(&file.path, file.chunks.iter().copied())?;
        }
        Ok(source)
    }

    /// Sets the stamps of the files, taken before their records were found, and the bytes of the files that are in
    /// memory.
    #[must_use]
    pub fn with_storage(mut self, stamps: Vec<FileStamp>, contents: Vec<Option<Contents>>) -> TfRecordSource {
        (self.facts.stamps, self.facts.contents) = (stamps, contents);
        self
    }

    /// Returns the chunks of all files.
    pub fn chunks(&self) -> &Chunks {
        &self.chunks
    }
}

impl Source for TfRecordSource {
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
        let chunk = self.chunks.get(unit);
        Ok(Box::new(Records {
            program: self.program.clone(),
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
        let own = own_units::<Records>(units).map_err(at(slots.start))?;
        let Some(first) = own.first() else { return Ok(()) };
        let mut scratch = first.scratch().map_err(at(slots.start))?;
        let claimed = out.claim(slots.start as u32..slots.end as u32);
        claimed.map_err(|overflow| at(slots.start)(overflow.into()))?;
        for slot in slots {
            let Row { unit, record } = rows[slot];
            let pick = Pick {
                record,
                slot: slot as u32,
            };
            own[unit as usize].pick(pick, &mut scratch, out).map_err(at(slot))?;
        }
        Ok(())
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        // Users count rows from the start of a file.
        let error = match error.location().record {
            Some(record) => error.with_record(self.chunks.row_in_file(unit, record).1),
            None => error,
        };
        self.chunks.locate(unit, error)
    }
}
