//! Measures the decoding time of each column, by decoding the same records with and without the column.

use std::sync::Arc;
use std::time::Instant;

use fastpipe_batch::{Buffer, BufferPool, Fragment, Mark, Part, Pick, Result, Rows, Sink, SlabPool};

use crate::decode;
use crate::layout::Column;
use crate::plan::{Emit, Plan};
use crate::source::AvroSource;

/// Maximum number of records to decode.
const RECORDS: u32 = 1024;

/// Number of rounds. The fastest round counts, because disturbances can only make a round slower.
const ROUNDS: usize = 5;

/// Nanoseconds per record.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnTimes {
    /// Time with all columns.
    pub all: f64,
    /// Time without each column, which is then skipped.
    pub without: Vec<f64>,
}

/// Decodes the first records of a unit from its stored bytes, with all columns and without each of them.
pub fn column_times(source: &AvroSource, unit: u64, bytes: Buffer) -> Result<ColumnTimes> {
    let block = source.open_block(unit, None, bytes, &BufferPool::default())?;
    let features: Vec<_> = source.avro_columns().iter().map(|column| &column.feature).collect();
    let variant = |left_out: Option<usize>| -> Result<Variant> {
        let some = features.iter().enumerate().filter(|&(i, _)| Some(i) != left_out);
        let some: Vec<_> = some.map(|(_, feature)| *feature).collect();
        let (columns, plan) = source.compile_for(unit, &some)?;
        let folders = source.folder_constants(unit, &columns)?;
        Ok(Variant::new(plan, &columns, folders))
    };
    let left_out = std::iter::once(None).chain((0..features.len()).map(Some));
    let mut variants: Vec<Variant> = left_out.map(variant).collect::<Result<_>>()?;
    // The variants take turns, so that all of them run under the same conditions.
    for _ in 0..ROUNDS {
        for variant in &mut variants {
            variant.decode(&block.block())?;
        }
    }
    let records = f64::from(block.block().rows.clamp(1, RECORDS));
    let mut times = variants.iter().map(|variant| variant.fastest / records);
    Ok(ColumnTimes {
        all: times.next().unwrap_or(0.0),
        without: times.collect(),
    })
}

/// A set of columns, and its decoding time.
struct Variant {
    plan: Arc<Plan>,
    folders: Vec<Emit>,
    parts: Arc<[Part]>,
    /// All rounds reuse the same memory, so that page faults don't count.
    pool: Arc<SlabPool>,
    fragment: Fragment,
    /// Nanoseconds of the fastest round.
    fastest: f64,
}

impl Variant {
    fn new(plan: Arc<Plan>, columns: &[Column], folders: Vec<Emit>) -> Variant {
        let parts: Arc<[_]> = columns.iter().flat_map(|column| column.spec.parts()).collect();
        Variant {
            plan,
            folders,
            pool: SlabPool::new(parts.len() + 1),
            parts,
            fragment: Fragment::default(),
            fastest: f64::INFINITY,
        }
    }

    /// Decodes the first records of a block.
    fn decode(&mut self, block: &decode::Block<'_>) -> Result<()> {
        let block = decode::Block {
            plan: &self.plan,
            folders: &self.folders,
            ..*block
        };
        let records = block.rows.min(RECORDS);
        let picks: Vec<_> = (0..records).map(|record| Pick { record, slot: record }).collect();
        let rows = Rows::new(self.parts.clone(), records as usize, &self.pool)?;
        let mut sink = Sink::new(&rows, std::mem::take(&mut self.fragment))?;
        let start = Instant::now();
        decode::place(&block, Mark::START, &picks, &mut sink)?;
        self.fastest = self.fastest.min(start.elapsed().as_nanos() as f64);
        self.fragment = sink.finish();
        self.fragment.clear();
        Ok(())
    }
}
