//! Sequential order: units and rows in storage order.

use std::sync::Arc;

use crate::failure::{Result, reserve};
use crate::plan::{Content, Run};
use crate::units::Units;

/// Iterates over batches.
#[derive(Debug)]
pub(crate) struct SequentialWalker {
    units: Arc<Units>,
    batch_size: u32,
    /// The unit that the last batch left unfinished, and the row that comes next.
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

    /// Forgets the current position.
    pub(crate) fn forget(&mut self) {
        self.open = None;
    }

    /// Returns the runs of an existing batch, and the units that are no longer needed.
    pub(crate) fn batch(&mut self, batch: u64) -> Result<(Content, Vec<u64>)> {
        let start = batch.saturating_mul(u64::from(self.batch_size)).min(self.units.total());
        let end = (start + u64::from(self.batch_size)).min(self.units.total());
        let (mut unit, mut record) = self.units.find(start);
        // Other ranks may have read the rows in between. The unit is released unless this batch has further rows of it.
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
