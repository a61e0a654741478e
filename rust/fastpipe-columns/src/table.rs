//! A source that reads tables in memory.

use std::any::Any;
use std::hash::Hasher;
use std::ops::Range;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use fastpipe_batch::{
    Access, BufferPool, ColumnSpec, Error, ErrorKind, Feature, Fetched, Fragment, Mark, Pass, Pick, Result, Row, Rows,
    Sink, SlabPool, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work, own_units, try_collect, try_reserve,
    try_with_capacity,
};
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::binding::Binding;
use crate::columns::{Chunks, Columns, PICKED};
use crate::gather::{At, Stretch};

/// Number of rows in a unit of a table in memory. Orders depend on this constant, but not on the record batches of a
/// table.
pub const UNIT_ROWS: u64 = 1 << 15;

/// Maximum number of rows that are hashed for the digest of a table.
const DIGESTED: u64 = 256;

/// The names of the operations of column sources.
pub(crate) const GATHERING: Work = Work {
    open: "opening",
    place: "gathering",
};

/// A unit that consists of rows of bound record batches.
pub(crate) struct OpenRows {
    pub(crate) columns: Arc<Columns>,
    pub(crate) chunks: Arc<Chunks>,
    /// The first row of the unit.
    pub(crate) first: usize,
    pub(crate) rows: u32,
    /// The memory that only this unit uses, in bytes.
    pub(crate) held: usize,
}

#[cold]
fn missing(record: u32) -> Error {
    Error::new(
        ErrorKind::Internal,
        format!("record {record} was picked that isn't in its unit"),
    )
}

/// Returns the number of picks at the beginning that have consecutive slots.
fn consecutive(picks: &[Pick]) -> usize {
    let behind = picks.windows(2).take_while(|pair| pair[1].slot == pair[0].slot + 1);
    behind.count() + usize::from(!picks.is_empty())
}

/// The first rows of a unit, which are in one record batch.
#[derive(Clone, Copy)]
struct UnitPlace {
    start: At,
    rows: u32,
}

impl OpenRows {
    /// Returns the place of the first rows, in record batches whose indices begin with `base`.
    fn place_of_all(&self, base: u32) -> UnitPlace {
        let (start, rows) = self.chunks.find_with_rest(self.first).unwrap_or_default();
        UnitPlace {
            start: At {
                chunk: start.chunk + base,
                row: start.row,
            },
            rows: u32::try_from(rows).unwrap_or(u32::MAX).min(self.rows),
        }
    }

    /// Returns the place of a row, in record batches whose indices begin with `base`.
    fn place_of(&self, record: u32, base: u32) -> Result<At> {
        let found = (record < self.rows).then(|| self.chunks.find(self.first + record as usize));
        let found = found.flatten().ok_or_else(|| missing(record))?;
        Ok(At {
            chunk: found.chunk + base,
            row: found.row,
        })
    }

    /// Groups the picked rows into the minimum number of contiguous ranges.
    fn stretches(&self, picks: &[Pick]) -> Result<Vec<Stretch>> {
        let mut found = Vec::new();
        for run in picks.chunk_by(|pick, next| next.record.checked_sub(1) == Some(pick.record)) {
            let (mut record, last) = (run[0].record, run[run.len() - 1].record);
            if last >= self.rows {
                return Err(missing(record.max(self.rows)));
            }
            while record <= last {
                let start = self.chunks.find_with_rest(self.first + record as usize);
                let (start, rest) = start.ok_or_else(|| missing(record))?;
                let len = rest.min((last - record) as usize + 1);
                try_reserve(&mut found, 1, PICKED)?;
                found.push(Stretch { start, len });
                record += len as u32;
            }
        }
        Ok(found)
    }
}

impl Unit for OpenRows {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.held
    }

    /// Returns 0. The unit knows the location of each row, so marks count only rows.
    fn bytes(&self) -> usize {
        0
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        let chunks: Vec<&[Binding]> = self.chunks.binding.iter().map(|chunk| &chunk[..]).collect();
        let mut rest = picks;
        while !rest.is_empty() {
            let (some, behind) = rest.split_at(consecutive(rest));
            let stretches = self.stretches(some)?;
            let mut at = try_with_capacity(some.len(), PICKED)?;
            for stretch in &stretches {
                let chunk = stretch.start.chunk;
                at.extend(stretch.rows().map(|row| At { chunk, row }));
            }
            let slots = some[0].slot..some[0].slot + some.len() as u32;
            self.columns
                .write(&chunks, (&at, &stretches), slots, out)
                .map_err(|fault| fault.error.with_record(u64::from(some[fault.at].record)))?;
            rest = behind;
        }
        let record = picks.last().map_or(from.record, |pick| pick.record + 1);
        Ok(Mark { record, byte: 0 })
    }

    fn advance(&self, _from: Mark, record: u32) -> Result<Mark> {
        Ok(Mark { record, byte: 0 })
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        Ok(known.unwrap_or_default())
    }
}

/// Picks rows of open units. See [`Source::pick`].
pub(crate) fn pick(
    columns: &Columns,
    units: &[&dyn Unit],
    rows: &[Row],
    slots: Range<usize>,
    out: &mut Sink<'_>,
) -> std::result::Result<(), Unpicked> {
    let at_start = |error| Unpicked {
        slot: slots.start,
        error,
    };
    let open = own_units::<OpenRows>(units).map_err(at_start)?;
    // Consecutive units may share their record batches. The shared record batches are listed only once.
    let mut chunks: Vec<&[Binding]> = Vec::new();
    let mut bases: Vec<u32> = try_with_capacity(open.len(), PICKED).map_err(at_start)?;
    let mut last: Option<(&Arc<Chunks>, u32)> = None;
    for unit in &open {
        let base = match last {
            Some((same, base)) if Arc::ptr_eq(same, &unit.chunks) => base,
            _ => {
                let base = chunks.len() as u32;
                chunks.extend(unit.chunks.binding.iter().map(|chunk| &chunk[..]));
                base
            }
        };
        last = Some((&unit.chunks, base));
        bases.push(base);
    }
    let places = open.iter().zip(&bases).map(|(unit, &base)| unit.place_of_all(base));
    let places: Vec<UnitPlace> = try_collect(places, PICKED).map_err(at_start)?;
    let mut failed = None;
    let found = rows[slots.clone()].iter().map(|&Row { unit, record }| {
        let place = places[unit as usize];
        if record < place.rows {
            return At {
                chunk: place.start.chunk,
                row: place.start.row + record as usize,
            };
        }
        let found = open[unit as usize].place_of(record, bases[unit as usize]);
        found.unwrap_or_else(|error| {
            failed.get_or_insert(error);
            At::default()
        })
    });
    let at = try_collect(found, PICKED).map_err(at_start)?;
    if let Some(error) = failed {
        return Err(at_start(error));
    }
    let written = columns.write(&chunks, (&at, &[]), slots.start as u32..slots.end as u32, out);
    written.map_err(|fault| {
        let slot = slots.start + fault.at;
        Unpicked {
            slot,
            error: fault.error.with_record(u64::from(rows[slot].record)),
        }
    })
}

/// A table in memory. Each unit is a range of [`UNIT_ROWS`] rows.
pub struct TableSource {
    columns: Arc<Columns>,
    chunks: Arc<Chunks>,
    facts: SourceFacts,
}

impl TableSource {
    /// Creates a source of these features. All record batches must have the given schema.
    pub fn new(schema: SchemaRef, batches: &[RecordBatch], features: &[Feature]) -> Result<TableSource> {
        let columns = Columns::new(schema, features)?;
        columns.check(batches)?;
        let columns = columns.with_unified(batches)?;
        let chunks = columns.bind(batches)?;
        Ok(TableSource::of(columns, Arc::new(chunks)))
    }

    fn of(columns: Columns, chunks: Arc<Chunks>) -> TableSource {
        TableSource {
            facts: SourceFacts {
                access: Access::Random,
                ..SourceFacts::new(columns.specs(), "table", GATHERING)
            },
            columns: Arc::new(columns),
            chunks,
        }
    }

    /// Returns the texts of the codes of each feature that consists of dictionary codes. The texts are the values of
    /// the dictionaries of all record batches, in the order of first occurrence.
    pub fn categories(&self) -> impl Iterator<Item = (&str, &[Arc<str>])> {
        self.columns.categories()
    }

    /// Returns the table row of a record in a unit, or `None` if it doesn't exist.
    pub fn row_of(&self, unit: u64, record: u32) -> Option<u64> {
        let row = unit.checked_mul(UNIT_ROWS)?.checked_add(u64::from(record))?;
        (u64::from(record) < UNIT_ROWS && row < self.chunks.rows as u64).then_some(row)
    }

    /// Returns a digest of the number of rows, the columns, and the contents of some evenly spaced rows. SipHash has a
    /// specification, so the digest is the same in all versions.
    pub fn digest(&self) -> Result<[u8; 16]> {
        let mut hasher = SipHasher24::new();
        hasher.write(&(self.chunks.rows as u64).to_le_bytes());
        for spec in self.columns.specs() {
            hasher.write(&(spec.name.len() as u64).to_le_bytes());
            hasher.write(spec.name.as_bytes());
        }
        let rows = self.chunks.rows as u64;
        let looked_at = rows.min(DIGESTED);
        for i in 0..looked_at {
            let row = (u128::from(i) * u128::from(rows) / u128::from(looked_at)) as u64;
            self.hash_row(row, &mut hasher)?;
        }
        Ok(hasher.finish128().as_bytes())
    }

    fn hash_row(&self, row: u64, hasher: &mut SipHasher24) -> Result<()> {
        let (unit, record) = (row / UNIT_ROWS, (row % UNIT_ROWS) as u32);
        let buffers = BufferPool::default();
        let parts = self.columns.specs().iter().flat_map(ColumnSpec::parts).collect();
        let batch = Rows::new(parts, 1, &SlabPool::new(1))?;
        let mut sink = Sink::new(&batch, Fragment::default())?;
        let open = self.open(unit, Pass::default(), Fetched::Nothing, &buffers)?;
        // Rows that can't be read are left out of the digest.
        if open.place(Mark::START, &[Pick { record, slot: 0 }], &mut sink).is_err() {
            return Ok(());
        }
        let fragment = sink.finish();
        let parts = batch.parts().len();
        let filled = batch.complete()?;
        for part in 0..parts {
            let placed = filled.place(part).map(|place| &filled.bytes()[place]);
            let bytes = placed.unwrap_or_else(|| fragment.arena(part).0);
            hasher.write(&(bytes.len() as u64).to_le_bytes());
            hasher.write(bytes);
        }
        Ok(())
    }
}

impl Source for TableSource {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let table = |columns| Arc::new(TableSource::of(columns, self.chunks.clone())) as Arc<dyn Source>;
        Ok(self.columns.in_csr()?.map(table))
    }

    fn units(&self) -> u64 {
        (self.chunks.rows as u64).div_ceil(UNIT_ROWS)
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        let left = (self.chunks.rows as u64).saturating_sub(unit.saturating_mul(UNIT_ROWS));
        UnitInfo {
            rows: left.min(UNIT_ROWS) as u32,
            range: None,
            class: 0,
            apart: false,
            // The table is in memory in any case.
            held: Some(0),
        }
    }

    fn open(&self, unit: u64, _pass: Pass, _fetched: Fetched, _pool: &BufferPool) -> Result<Box<dyn Unit>> {
        Ok(Box::new(OpenRows {
            columns: self.columns.clone(),
            chunks: self.chunks.clone(),
            first: (unit * UNIT_ROWS) as usize,
            rows: self.describe(unit).rows,
            held: 0,
        }))
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        pick(&self.columns, units, rows, slots, out)
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        let other = (other as &dyn Any).downcast_ref::<TableSource>();
        other.is_some_and(|other| self.columns.is_like(&other.columns))
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        match error.location().record {
            // Tables have rows and no blocks, so errors count rows from the start of the table.
            Some(record) => error.with_record(unit * UNIT_ROWS + record),
            None => error,
        }
    }
}
