//! Units that are read whole, and large units that are read in slices.
//!
//! A sequential pass needs only the next rows of a unit. So a large unit is cut into slices, and the engine treats each
//! slice as a unit. The reader gets the unit and the range of rows for each slice. The order of rows is unchanged, and
//! so are the batches.

use std::ops::Range;

use fastpipe_batch::{Error, Result, try_with_capacity};

/// Maximum number of slices per unit. The number depends on the declared size of the unit, which may be wrong.
const MOST: u64 = 1024;

/// Names the allocated memory in out-of-memory errors.
const SLICES: &str = "the slices of units";

/// A range of rows of a unit.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Slice {
    /// Index of the unit.
    pub unit: u64,
    /// The range of its rows.
    pub rows: Range<u32>,
    /// Whether the slice contains all rows of the unit.
    pub whole: bool,
}

/// The division of units into slices.
#[derive(Debug)]
pub(crate) struct Slices {
    /// Number of rows of each unit.
    rows: Vec<u32>,
    /// The unit and the first row of each slice. Empty if no unit is cut.
    cuts: Vec<(u64, u32)>,
}

impl Slices {
    /// Creates slices that each contain a whole unit.
    pub(crate) fn whole(rows: Vec<u32>) -> Slices {
        Slices { rows, cuts: Vec::new() }
    }

    /// Cuts units of more than twice `slice_bytes` bytes into slices of about `slice_bytes` bytes.
    pub(crate) fn cut(rows: Vec<u32>, bytes: impl Fn(u64, u32) -> u64, slice_bytes: u64) -> Result<Slices> {
        let rows_of = |unit: u64, rows: u32| -> u32 {
            let bytes = bytes(unit, rows);
            if bytes <= slice_bytes.saturating_mul(2) || rows == 0 {
                return rows;
            }
            let fitting = u128::from(rows) * u128::from(slice_bytes) / u128::from(bytes);
            (fitting.min(u128::from(rows)) as u64).max(u64::from(rows).div_ceil(MOST)) as u32
        };
        let mut cuts: Vec<(u64, u32)> = try_with_capacity(rows.len(), SLICES)?;
        for (unit, &all) in (0u64..).zip(&rows) {
            let step = rows_of(unit, all).max(1);
            let more = all.div_ceil(step).max(1) as usize;
            let room = cuts.try_reserve(more);
            room.map_err(|_| Error::out_of_memory(more.saturating_mul(size_of::<(u64, u32)>()), SLICES))?;
            cuts.extend((0..all.max(1)).step_by(step as usize).map(|first| (unit, first)));
        }
        if cuts.len() == rows.len() {
            cuts = Vec::new();
        }
        Ok(Slices { rows, cuts })
    }

    /// Returns the number of slices.
    pub(crate) fn len(&self) -> usize {
        if self.cuts.is_empty() {
            self.rows.len()
        } else {
            self.cuts.len()
        }
    }

    /// Returns the number of rows of each unit.
    pub(crate) fn units(&self) -> &[u32] {
        &self.rows
    }

    /// Returns a slice. It has no rows if the index is out of range.
    pub(crate) fn get(&self, slice: u64) -> Slice {
        let at = usize::try_from(slice).unwrap_or(usize::MAX);
        let rows_of = |unit: u64| self.rows.get(unit as usize).copied().unwrap_or(0);
        let Some(&(unit, first)) = self.cuts.get(at) else {
            return Slice {
                unit: slice,
                rows: 0..if self.cuts.is_empty() { rows_of(slice) } else { 0 },
                whole: true,
            };
        };
        let all = rows_of(unit);
        let next = self.cuts.get(at + 1).filter(|next| next.0 == unit);
        let end = next.map_or(all, |next| next.1);
        Slice {
            unit,
            rows: first..end,
            whole: first == 0 && end == all,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn all(slices: &Slices) -> Vec<(u64, Range<u32>, bool)> {
        let all = (0..slices.len() as u64).map(|i| slices.get(i));
        all.map(|slice| (slice.unit, slice.rows, slice.whole)).collect()
    }

    #[test]
    fn only_large_units_are_sliced() {
        let bytes = |unit: u64, rows: u32| if unit == 3 { 0 } else { u64::from(rows) * 10 };
        let slices = Slices::cut(vec![20, 0, 45, 1_000_000, 21], bytes, 100).unwrap();
        let expected = [
            (0, 0..20, true),
            (1, 0..0, true),
            (2, 0..10, false),
            (2, 10..20, false),
            (2, 20..30, false),
            (2, 30..40, false),
            (2, 40..45, false),
            (3, 0..1_000_000, true),
            (4, 0..10, false),
            (4, 10..20, false),
            (4, 20..21, false),
        ];
        assert_eq!(all(&slices), expected);
        assert_eq!(slices.get(99).rows.len(), 0);
    }

    #[test]
    fn small_units_are_not_sliced() {
        for slices in [
            Slices::whole(vec![5, 0, 7]),
            Slices::cut(vec![5, 0, 7], |_, _| 1, 100).unwrap(),
        ] {
            assert_eq!(all(&slices), [(0, 0..5, true), (1, 0..0, true), (2, 0..7, true)]);
            assert_eq!(slices.get(3).rows.len(), 0);
            assert!(slices.cuts.is_empty());
        }
    }

    #[test]
    fn declared_sizes_create_at_most_a_thousand_slices() {
        let slices = Slices::cut(vec![u32::MAX; 3], |_, _| u64::MAX, 1).unwrap();
        assert!(slices.len() <= 3 * MOST as usize);
        let rows: u64 = (0..slices.len() as u64).map(|i| slices.get(i).rows.len() as u64).sum();
        assert_eq!(rows, 3 * u64::from(u32::MAX));
    }
}
