//! Units and records as they stand.

use std::fmt;
use std::sync::Arc;

use crate::{BatchPlan, Run};

/// The sequential order: every unit in turn, every record in turn, cut into batches.
///
/// Random access to any batch takes a binary search over the units' first rows (8 bytes a unit).
#[derive(Clone, Debug)]
pub struct Sequential {
    /// First row of each unit, and the total behind them.
    firsts: Arc<[u64]>,
    batch_size: u32,
    drop_last: bool,
}

/// More rows in all than can be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TooLong;

impl fmt::Display for TooLong {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("the units have more than 2^63 rows in all")
    }
}

impl std::error::Error for TooLong {}

impl Sequential {
    /// The order of units with these numbers of rows. A `batch_size` of 0 counts as 1.
    ///
    /// # Errors
    ///
    /// [`TooLong`] if the rows can't be counted in 63 bits.
    pub fn new(unit_rows: impl IntoIterator<Item = u32>, batch_size: u32, drop_last: bool) -> Result<Self, TooLong> {
        let mut total = 0u64;
        let mut firsts = vec![0];
        for rows in unit_rows {
            total = total
                .checked_add(u64::from(rows))
                .filter(|&t| t < 1 << 63)
                .ok_or(TooLong)?;
            firsts.push(total);
        }
        Ok(Sequential {
            firsts: firsts.into(),
            batch_size: batch_size.max(1),
            drop_last,
        })
    }

    /// Rows in all units.
    pub fn rows(&self) -> u64 {
        self.firsts[self.firsts.len() - 1]
    }

    /// Batches an epoch.
    pub fn batches(&self) -> u64 {
        let size = u64::from(self.batch_size);
        if self.drop_last {
            self.rows() / size
        } else {
            self.rows().div_ceil(size)
        }
    }

    /// What stands in batch `step`; `None` past the last.
    pub fn batch(&self, step: u64) -> Option<BatchPlan> {
        if step >= self.batches() {
            return None;
        }
        let start = step * u64::from(self.batch_size);
        let end = (start + u64::from(self.batch_size)).min(self.rows());
        // The last unit that starts at or before `start`; of empty ones that start there too, the one behind them.
        let mut unit = self.firsts.partition_point(|&first| first <= start) - 1;
        let mut row = start;
        let mut runs = Vec::new();
        while row < end {
            let stop = self.firsts[unit + 1].min(end);
            if stop > row {
                // Units have at most 2^32 - 1 rows and batches, too: the differences fit.
                let narrow = |n: u64| u32::try_from(n).unwrap_or(u32::MAX);
                runs.push(Run {
                    unit: unit as u64,
                    record: narrow(row - self.firsts[unit]),
                    slot: narrow(row - start),
                    rows: narrow(stop - row),
                });
                row = stop;
            }
            unit += 1;
        }
        Some(BatchPlan {
            step,
            rows: u32::try_from(end - start).unwrap_or(u32::MAX),
            runs,
        })
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The naive oracle: write all (unit, record) down and cut them into chunks.
        #[test]
        fn batches_are_the_chunks_of_all_rows(
            units in proptest::collection::vec(prop_oneof![Just(0u32), 0..4u32, 0..50u32], 0..20),
            batch_size in 1..40u32,
            drop_last: bool,
        ) {
            let rows: Vec<(u64, u32)> = units
                .iter()
                .enumerate()
                .flat_map(|(u, &n)| (0..n).map(move |r| (u as u64, r)))
                .collect();
            let chunks: Vec<_> = rows
                .chunks(batch_size as usize)
                .filter(|c| !drop_last || c.len() == batch_size as usize)
                .collect();
            let order = Sequential::new(units.iter().copied(), batch_size, drop_last).unwrap();
            prop_assert_eq!(order.rows(), rows.len() as u64);
            prop_assert_eq!(order.batches(), chunks.len() as u64);
            for (step, chunk) in chunks.iter().enumerate() {
                let batch = order.batch(step as u64).unwrap();
                prop_assert_eq!(batch.rows as usize, chunk.len());
                let mut got = Vec::new();
                for run in &batch.runs {
                    prop_assert_eq!(run.slot as usize, got.len());
                    prop_assert!(run.rows > 0);
                    got.extend((0..run.rows).map(|i| (run.unit, run.record + i)));
                }
                prop_assert_eq!(&got[..], *chunk);
            }
            prop_assert_eq!(order.batch(chunks.len() as u64), None);
        }
    }

    #[test]
    fn rows_beyond_counting_are_an_error() {
        let many = std::iter::repeat_n(u32::MAX, 10);
        assert_eq!(
            Sequential::new(many, 1, false).unwrap().rows(),
            10 * u64::from(u32::MAX)
        );
        assert!(Sequential::new([], 1, false).unwrap().batch(0).is_none());
    }
}
