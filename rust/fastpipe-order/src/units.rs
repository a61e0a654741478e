//! The row counts of the units of a dataset. An order knows nothing else about the data.

use std::fmt;

use crate::failure::{PlanError, collected, with_room};

/// Number of units between two stored sums.
const STRIDE: usize = 64;

/// The row counts of units, in storage order. Uses slightly more than four bytes per unit.
#[derive(Clone, Debug, Default)]
pub struct Units {
    rows: Vec<u32>,
    /// Number of rows before every 64th unit.
    sums: Vec<u64>,
    total: u64,
    largest: u32,
}

/// The reason why units can't be counted.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum UnitsError {
    /// There are too many rows or units to count.
    TooLong,
    /// Memory for the row counts can't be allocated.
    Plan(PlanError),
}

impl fmt::Display for UnitsError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            UnitsError::TooLong => {
                f.write_str("the units have more than 2^62 rows in all, or there are more than 2^32 units")
            }
            UnitsError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for UnitsError {}

impl From<PlanError> for UnitsError {
    fn from(error: PlanError) -> Self {
        UnitsError::Plan(error)
    }
}

impl Units {
    /// Creates units with these row counts.
    ///
    /// # Errors
    ///
    /// [`UnitsError`] if there are more than 2^32 units or 2^62 rows, or if memory for the row counts can't be
    /// allocated.
    pub fn new(unit_rows: impl IntoIterator<Item = u32>) -> Result<Units, UnitsError> {
        let rows: Vec<u32> = collected(unit_rows)?;
        let (mut sums, mut total) = (with_room(rows.len() / STRIDE + 1)?, 0u64);
        if u32::try_from(rows.len()).is_err() {
            return Err(UnitsError::TooLong);
        }
        for chunk in rows.chunks(STRIDE) {
            sums.push(total);
            // There are at most 2^32 units of less than 2^32 rows each, so the sum can't wrap past the limit unnoticed.
            total = total.wrapping_add(chunk.iter().map(|&n| u64::from(n)).sum());
            if total >= 1 << 62 {
                return Err(UnitsError::TooLong);
            }
        }
        let largest = rows.iter().copied().max().unwrap_or(0);
        Ok(Units {
            rows,
            sums,
            total,
            largest,
        })
    }

    /// Returns every `step`-th unit from `first` on: the units of one of `step` ranks.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory for the row counts can't be allocated.
    pub fn share(&self, first: usize, step: usize) -> Result<Units, PlanError> {
        let rows = self.rows.iter().copied().skip(first).step_by(step.max(1));
        match Units::new(rows) {
            Err(UnitsError::Plan(error)) => Err(error),
            // These are fewer units than before, so they can't be too many.
            shared => Ok(shared.unwrap_or_default()),
        }
    }

    /// Returns the number of units.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there are no units.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Returns the number of rows in all units.
    pub fn total(&self) -> u64 {
        self.total
    }

    /// Returns the number of rows in the largest unit.
    pub fn largest(&self) -> u32 {
        self.largest
    }

    /// Returns the number of rows in a unit, or 0 if the unit doesn't exist.
    #[inline]
    pub fn rows(&self, unit: usize) -> u32 {
        self.rows.get(unit).copied().unwrap_or(0)
    }

    /// Returns the number of rows before a unit. For the index after the last unit, returns the total.
    pub fn first(&self, unit: usize) -> u64 {
        let chunk = (unit / STRIDE).min(self.sums.len().saturating_sub(1));
        let from = chunk * STRIDE;
        let inside = self.rows.get(from..unit.min(self.rows.len())).unwrap_or_default();
        self.sums.get(chunk).copied().unwrap_or(0) + inside.iter().map(|&n| u64::from(n)).sum::<u64>()
    }

    /// Returns the unit that contains a row, and the index of the row within it. For a row past the end, returns the
    /// index after the last unit, and 0.
    pub fn find(&self, row: u64) -> (usize, u32) {
        if row >= self.total {
            return (self.rows.len(), 0);
        }
        let chunk = self.sums.partition_point(|&sum| sum <= row) - 1;
        let mut left = row - self.sums[chunk];
        let mut unit = chunk * STRIDE;
        while left >= u64::from(self.rows[unit]) {
            left -= u64::from(self.rows[unit]);
            unit += 1;
        }
        // The index is less than the unit's row count.
        (unit, left as u32)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn rows_are_found_where_they_stand(counts in proptest::collection::vec(prop_oneof![Just(0u32), 0..5u32], 0..300)) {
            let units = Units::new(counts.iter().copied()).unwrap();
            let mut row = 0;
            for (unit, &n) in counts.iter().enumerate() {
                prop_assert_eq!(units.first(unit), row);
                for record in 0..n {
                    prop_assert_eq!(units.find(row), (unit, record));
                    row += 1;
                }
            }
            prop_assert_eq!(units.total(), row);
            prop_assert_eq!(units.first(counts.len()), row);
            prop_assert_eq!(units.find(row), (counts.len(), 0));
            let third = units.share(1, 3).unwrap();
            prop_assert_eq!(third.rows(2), counts.get(7).copied().unwrap_or(0));
        }
    }

    #[test]
    fn rows_beyond_counting_are_an_error() {
        assert_eq!(Units::new([u32::MAX; 10]).unwrap().total(), 10 * u64::from(u32::MAX));
        assert_eq!(Units::new([]).unwrap().find(0), (0, 0));
    }
}
