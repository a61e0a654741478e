//! A source that consists of some units of another source.

use std::any::Any;
use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::buffers::BufferPool;
use crate::error::Error;
use crate::sink::Sink;
use crate::source::{Fetched, Pass, Row, Source, SourceFacts, Unit, UnitInfo, Unpicked};

/// A range of consecutive units of a source. The units are numbered from 0. Random draws and error locations are the
/// same as in the whole source.
pub struct UnitRange {
    source: Arc<dyn Source>,
    units: Range<u64>,
}

impl UnitRange {
    /// Creates the range. Units beyond the end of the source are ignored.
    pub fn new(source: Arc<dyn Source>, units: Range<u64>) -> UnitRange {
        let end = units.end.min(source.units());
        UnitRange {
            source,
            units: units.start.min(end)..end,
        }
    }
}

/// Divides a source into at most `count` consecutive partitions of about the same cost. Each one has rows. The cost of
/// a unit is its size in bytes, or its number of rows if its size isn't known in advance. A unit that follows another
/// one stays in the same partition.
pub fn partitions(source: &dyn Source, count: u64) -> Vec<Range<u64>> {
    let cost = |unit| {
        let info = source.describe(unit);
        u128::from(
            info.range
                .map(|range| range.len)
                .or(info.held)
                .unwrap_or_default()
                .max(u64::from(info.rows))
                .max(1),
        )
    };
    let total: u128 = (0..source.units()).map(cost).sum();
    let (mut found, mut start, mut sum): (Vec<Range<u64>>, _, _) = (Vec::new(), 0, 0);
    // The rows of the partition that begins at `start`, as far as they are counted.
    let mut rows = 0;
    for unit in 0..source.units() {
        let middle = 2 * sum + cost(unit);
        // If the ideal boundary is in the middle of a unit, the unit belongs to the next partition.
        let end = u128::from(found.len() as u64 + 1) * total * 2;
        if rows > 0 && middle * u128::from(count) >= end && !source.follows(unit) {
            found.push(start..unit);
            (start, rows) = (unit, 0);
        }
        rows += u64::from(source.describe(unit).rows);
        sum += cost(unit);
    }
    match found.last_mut() {
        // Units without rows belong to the partition before them.
        Some(last) if rows == 0 => last.end = source.units(),
        _ if rows > 0 => found.push(start..source.units()),
        _ => {}
    }
    found
}

impl Source for UnitRange {
    fn facts(&self) -> &SourceFacts {
        self.source.facts()
    }

    fn in_csr(&self) -> Result<Option<Arc<dyn Source>>> {
        let partition = |source| Arc::new(UnitRange::new(source, self.units.clone())) as Arc<dyn Source>;
        Ok(self.source.in_csr()?.map(partition))
    }

    fn units(&self) -> u64 {
        self.units.end - self.units.start
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        self.source.describe(self.units.start + unit)
    }

    fn check_random(&self) -> Result<()> {
        self.source.check_random()
    }

    fn follows(&self, unit: u64) -> bool {
        unit > 0 && self.source.follows(self.units.start + unit)
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        self.source.fetch(self.units.start + unit, cancelled)
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        self.source.open(self.units.start + unit, pass, fetched, pool)
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        self.source.pick(units, rows, slots, out)
    }

    fn shares_pick(&self, other: &dyn Source) -> bool {
        let other = (other as &dyn Any)
            .downcast_ref::<UnitRange>()
            .map(|range| &*range.source);
        other.is_some_and(|other| self.source.shares_pick(other))
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        self.source.locate(self.units.start + unit, error)
    }
}
