//! Sequential order: units and records as they stand.

use std::sync::Arc;

use crate::failure::{Result, reserve};
use crate::plan::{Content, Run};
use crate::units::Units;

/// Goes from batch to batch.
#[derive(Debug)]
pub(crate) struct SequentialWalker {
    units: Arc<Units>,
    batch_size: u32,
    /// The unit in the midst of which the last batch ended, and the row that comes next there.
    open: Option<(u64, u64)>,
}

impl SequentialWalker {
    pub(crate) fn new(units: Arc<Units>, batch_size: u32) -> Self {
        SequentialWalker {
            units,
            batch_size,
            open: None,
        }
    }

    /// Forgets where it stands.
    pub(crate) fn forget(&mut self) {
        self.open = None;
    }

    /// What stands in a batch that exists, and the units that are no longer used.
    pub(crate) fn batch(&mut self, batch: u64) -> Result<(Content, Vec<u64>)> {
        let start = batch.saturating_mul(u64::from(self.batch_size)).min(self.units.total());
        let end = (start + u64::from(self.batch_size)).min(self.units.total());
        let (mut unit, mut record) = self.units.find(start);
        // Of a unit that other ranks read rows of in between, more is read.
        let released = match self.open.take() {
            Some((open, next)) if next != start && open != unit as u64 => vec![open],
            _ => Vec::new(),
        };
        let mut row = start;
        let mut runs = Vec::new();
        while row < end {
            let left = self.units.rows(unit) - record;
            // A batch has fewer than 2^32 rows.
            let rows = left.min((end - row) as u32);
            if rows > 0 {
                reserve(&mut runs, 1)?;
                runs.push(Run {
                    unit: unit as u64,
                    record,
                    slot: (row - start) as u32,
                    rows,
                });
            }
            row += u64::from(rows);
            if rows < left {
                self.open = Some((unit as u64, end));
            }
            (unit, record) = (unit + 1, 0);
        }
        Ok((Content::Runs(runs), released))
    }
}
