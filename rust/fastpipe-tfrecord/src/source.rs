//! TFRecord files as a [`Source`]. A unit is a chunk of records.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{
    BufferPool, ByteRange, Error, ErrorKind, Feature, Fetched, FileStamp, Pass, Pick, Result, Row, Sink, Source,
    SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work, own_units, try_reserve,
};

use crate::chunk::Chunk;
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

struct File {
    path: Arc<str>,
    first_unit: u64,
    first_row: u64,
}

/// Chunks of TFRecord files, read as the same columns.
pub struct TfRecordSource {
    program: Arc<Program>,
    files: Vec<File>,
    chunks: Vec<Chunk>,
    /// The number of rows before each chunk, counted over all files.
    rows_before: Vec<u64>,
    facts: SourceFacts,
}

impl TfRecordSource {
    /// Creates a source that reads `features` from files.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if lists can't be read as a feature; [`ErrorKind::OutOfMemory`].
    pub fn new(features: &[Feature], files: &[TfRecordFile]) -> Result<TfRecordSource> {
        let program = Program::new(features)?;
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
            files: Vec::with_capacity(files.len()),
            chunks: Vec::new(),
            rows_before: Vec::new(),
        };
        let mut rows = 0;
        for file in files {
            source.files.push(File {
                path: file.path.clone(),
                first_unit: source.chunks.len() as u64,
                first_row: rows,
            });
            let count = file.chunks.len();
            try_reserve(&mut source.chunks, count, "the list of all chunks").map_err(|e| e.at_path(&file.path))?;
            try_reserve(&mut source.rows_before, count, "the list of all chunks").map_err(|e| e.at_path(&file.path))?;
            for chunk in &file.chunks {
                source.chunks.push(*chunk);
                source.rows_before.push(rows);
                rows += u64::from(chunk.rows);
            }
        }
        Ok(source)
    }

    /// Sets the stamps of the files, taken before their records were found.
    #[must_use]
    pub fn with_stamps(mut self, stamps: Vec<FileStamp>) -> TfRecordSource {
        self.facts.stamps = stamps;
        self
    }

    /// Sets the bytes of the files that are in memory.
    #[must_use]
    pub fn with_contents(mut self, contents: Vec<Option<Bytes>>) -> TfRecordSource {
        self.facts.contents = contents;
        self
    }

    /// Returns the file of a row and the index of the row in that file.
    pub fn place_of(&self, unit: u64, record: u32) -> (&Arc<str>, u64) {
        let (file, _) = self.file(unit);
        let row = self.rows_before[unit as usize] - file.first_row + u64::from(record);
        (&file.path, row)
    }

    /// Returns the number of chunks of each file.
    pub fn units_by_file(&self) -> Vec<u64> {
        let firsts = self.files.iter().map(|file| file.first_unit);
        let ends = firsts.clone().skip(1).chain([self.chunks.len() as u64]);
        firsts.zip(ends).map(|(first, end)| end - first).collect()
    }

    /// Writes the positions and the row counts of all chunks to `out`, for a digest.
    pub fn write_layout(&self, mut out: impl FnMut(&[u8])) {
        for file in &self.files {
            out(&file.first_unit.to_le_bytes());
        }
        for chunk in &self.chunks {
            out(&chunk.offset.to_le_bytes());
            out(&chunk.len.to_le_bytes());
            out(&chunk.rows.to_le_bytes());
        }
    }

    fn file(&self, unit: u64) -> (&File, usize) {
        let i = self.files.partition_point(|f| f.first_unit <= unit).saturating_sub(1);
        (&self.files[i], i)
    }
}

impl Source for TfRecordSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.chunks.len() as u64
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let chunk = self.chunks[unit as usize];
        let (_, location) = self.file(unit);
        let range = ByteRange {
            location: location as u32,
            offset: chunk.offset,
            len: chunk.len.into(),
        };
        UnitInfo {
            rows: chunk.rows,
            range: Some(range),
            class: 0,
            apart: false,
            held: None,
        }
    }

    fn open(&self, unit: u64, _pass: Pass, fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        let chunk = self.chunks[unit as usize];
        let data = fetched.into_bytes();
        if data.len() != chunk.len as usize {
            let reason = format!("a chunk of {} bytes was read as {} bytes", chunk.len, data.len());
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        Ok(Box::new(Records {
            program: self.program.clone(),
            data,
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
        let (file, _) = self.file(unit);
        let first = self.rows_before[unit as usize] - file.first_row;
        // Users count rows from the start of a file.
        let error = match error.location().record {
            Some(record) => error.with_record(first + record),
            None => error,
        };
        let error = error.at_block(unit - file.first_unit, self.chunks[unit as usize].offset);
        error.at_path(&file.path).at_unit(unit)
    }
}
