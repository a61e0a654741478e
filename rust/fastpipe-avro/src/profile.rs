//! What each column takes to decode: found by decoding the same records with it and without it.

use std::sync::Arc;
use std::time::Instant;

use fastpipe_batch::{Buffer, BufferPool, Fragment, Mark, Pick, Result, Rows, Sink, SlabPool};

use crate::compile::compile;
use crate::decode;
use crate::layout::Column;
use crate::plan::Plan;
use crate::source::AvroSource;

/// Records that are decoded at most.
const RECORDS: u32 = 1024;

/// How often; the fastest counts, since nothing but the work itself can make it faster.
const ROUNDS: usize = 5;

/// Nanoseconds that a record takes.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnTimes {
    /// With all columns.
    pub all: f64,
    /// For each column, with all others: what isn't wanted is skipped.
    pub without: Vec<f64>,
}

/// Decodes the first records of a unit, whose stored bytes are given, with all columns and without each of them.
pub fn column_times(source: &AvroSource, unit: u64, bytes: Buffer) -> Result<ColumnTimes> {
    let block = source.open_block(unit, bytes, &BufferPool::default())?;
    let schema = source.schema_of(unit);
    let features: Vec<_> = source.avro_columns().iter().map(|column| &column.feature).collect();
    let time = |left_out: Option<usize>| -> Result<f64> {
        let mut columns = Vec::with_capacity(features.len());
        let mut part = 0;
        for (i, feature) in features.iter().enumerate() {
            if Some(i) != left_out {
                let column = Column::new(schema, feature, part)?;
                part += column.spec.parts().len() as u32;
                columns.push(column);
            }
        }
        decode_time(&compile(schema, &columns)?, &columns, &block.block())
    };
    let all = time(None)?;
    let without = (0..features.len()).map(|i| time(Some(i))).collect::<Result<_>>()?;
    Ok(ColumnTimes { all, without })
}

/// Nanoseconds a record.
fn decode_time(plan: &Plan, columns: &[Column], block: &decode::Block<'_>) -> Result<f64> {
    let block = decode::Block { plan, ..*block };
    let parts: Arc<[_]> = columns.iter().flat_map(|column| column.spec.parts()).collect();
    let records = block.rows.min(RECORDS);
    let picks: Vec<_> = (0..records).map(|record| Pick { record, slot: record }).collect();
    // The same memory every time, so that page faults don't count.
    let pool = SlabPool::new(parts.len() + 1);
    let mut fragment = Fragment::default();
    let mut fastest = f64::INFINITY;
    for _ in 0..ROUNDS {
        let rows = Rows::new(parts.clone(), records as usize, &pool)?;
        let mut sink = Sink::new(&rows, fragment)?;
        let start = Instant::now();
        decode::place(&block, Mark::START, &picks, &mut sink)?;
        fastest = fastest.min(start.elapsed().as_nanos() as f64);
        fragment = sink.finish();
        fragment.clear();
    }
    Ok(fastest / f64::from(records.max(1)))
}
