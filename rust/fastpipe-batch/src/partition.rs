//! Some of a source's units as a source.

use std::ops::Range;
use std::sync::Arc;

use crate::Result;
use crate::buffers::BufferPool;
use crate::error::Error;
use crate::sink::Sink;
use crate::source::{Fetched, Pass, Row, Source, SourceFacts, Unit, UnitInfo, Unpicked};

/// Consecutive units of a source. They are numbered from 0; what is drawn for them, and what errors say of them, stays
/// what it is in the whole.
pub struct UnitRange {
    source: Arc<dyn Source>,
    units: Range<u64>,
}

impl UnitRange {
    /// Those of `units` that there are.
    pub fn new(source: Arc<dyn Source>, units: Range<u64>) -> UnitRange {
        let end = units.end.min(source.units());
        UnitRange {
            source,
            units: units.start.min(end)..end,
        }
    }
}

/// Divides a source into partitions that cost about the same, one behind the other: at most `count`, none of them
/// empty. A unit costs its bytes, or its rows where those aren't known beforehand. Units that follow another stay with
/// it.
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
    let (mut found, mut start, mut sum) = (Vec::new(), 0, 0);
    for unit in 0..source.units() {
        let middle = 2 * sum + cost(unit);
        // The unit in whose middle a partition should end belongs to the one behind it.
        let end = u128::from(found.len() as u64 + 1) * total * 2;
        if unit > start && middle * u128::from(count) >= end && !source.follows(unit) {
            found.push(start..unit);
            start = unit;
        }
        sum += cost(unit);
    }
    if start < source.units() {
        found.push(start..source.units());
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

    fn locate(&self, unit: u64, error: Error) -> Error {
        self.source.locate(self.units.start + unit, error)
    }
}
