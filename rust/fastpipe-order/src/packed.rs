//! A compact list of the rows of a window. Memory matters because a window may be as long as an epoch.

use std::ops::Range;

use fastpipe_random::Draws;

use crate::failure::{Patience, Result, STEPS_AT_ONCE, reserve_all, with_room};
use crate::plan::Row;
use crate::units::Units;

/// Rows of units, each packed into one integer: the index of the unit in the high bits, and the index of the row within
/// the unit in the low bits. Uses 32 bits per row if that suffices for all rows, otherwise 64.
#[derive(Debug, Default)]
pub(crate) struct PackedRows {
    /// One of the two lists is empty.
    narrow: Vec<u32>,
    wide: Vec<u64>,
    /// Number of low bits, for the index within the unit.
    bits: u32,
}

/// Returns the number of bits needed for integers below `n`.
fn bits(n: u64) -> u32 {
    u64::BITS - n.saturating_sub(1).leading_zeros()
}

impl PackedRows {
    /// Returns the maximum number of bytes per row for these units.
    pub(crate) fn bytes_each(units: &Units) -> u64 {
        match bits(units.len() as u64) + bits(u64::from(units.largest())) {
            ..=u32::BITS => 4,
            _ => 8,
        }
    }

    /// Fills the list with these ranges of each unit, one after another, `len` rows in total. Reuses the memory.
    pub(crate) fn fill(&mut self, records: &[Range<u32>], len: usize, patience: &mut Patience<'_>) -> Result<()> {
        self.narrow.clear();
        self.wide.clear();
        let most = records.iter().map(|records| records.end).max().unwrap_or(0);
        self.bits = bits(u64::from(most));
        if bits(records.len() as u64) + self.bits <= u32::BITS {
            self.wide = Vec::new();
            reserve_all(&mut self.narrow, len)?;
            let bits = self.bits;
            list(&mut self.narrow, records, patience, |unit, record| {
                (unit << bits) as u32 | record
            })
        } else {
            self.narrow = Vec::new();
            self.bits = u32::BITS;
            reserve_all(&mut self.wide, len)?;
            list(&mut self.wide, records, patience, |unit, record| {
                unit << u32::BITS | u64::from(record)
            })
        }
    }

    pub(crate) fn len(&self) -> usize {
        self.narrow.len().max(self.wide.len())
    }

    /// Returns rows with the indices of their units.
    pub(crate) fn get(&self, rows: Range<usize>) -> Result<Vec<Row>> {
        let bits = self.bits;
        let row = |packed: u64| Row {
            unit: (packed >> bits) as u32,
            record: (packed & ((1 << bits) - 1)) as u32,
        };
        let mut out = with_room(rows.len())?;
        if self.wide.is_empty() {
            out.extend(self.narrow[rows].iter().map(|&packed| row(u64::from(packed))));
        } else {
            out.extend(self.wide[rows].iter().map(|&packed| row(packed)));
        }
        Ok(out)
    }

    /// Runs steps `done..to` of a Fisher-Yates shuffle.
    pub(crate) fn shuffle(&mut self, draws: &Draws, done: usize, to: usize, patience: &mut Patience<'_>) -> Result<()> {
        let len = self.len() as u64;
        let span = |position| len - position;
        patience.stretches(done as u64, to as u64, |from, to| {
            let (at, count) = (from as usize, (to - from) as usize);
            if self.wide.is_empty() {
                draws.swap(from, count, &mut self.narrow[at..], span);
            } else {
                draws.swap(from, count, &mut self.wide[at..], span);
            }
            Ok(())
        })
    }
}

/// Appends rows to a list that has room for them.
fn list<T>(
    out: &mut Vec<T>,
    records: &[Range<u32>],
    patience: &mut Patience<'_>,
    pack: impl Fn(u64, u32) -> T,
) -> Result<()> {
    let mut since = 0;
    for (unit, records) in (0..).zip(records) {
        since += records.len();
        if since < STEPS_AT_ONCE {
            out.extend(records.clone().map(|record| pack(unit, record)));
            continue;
        }
        since = 0;
        patience.look()?;
        patience.stretches(records.start.into(), records.end.into(), |from, to| {
            // Both bounds came from `u32`, so the casts are lossless.
            out.extend((from as u32..to as u32).map(|record| pack(unit, record)));
            Ok(())
        })?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use fastpipe_random::{Key, Purpose};

    use super::*;

    fn rows(packed: &PackedRows) -> Vec<(u32, u32)> {
        let rows = packed.get(0..packed.len()).unwrap();
        rows.iter().map(|row| (row.unit, row.record)).collect()
    }

    #[test]
    fn packed_rows_round_trip() {
        let mut packed = PackedRows::default();
        let many: Vec<_> = (0..70_000).map(|unit| unit % 3..unit % 3 + 2).collect();
        let (far, all) = (u32::MAX - 2..u32::MAX, [0..3, 0..0, 7..9]);
        for records in [
            &[][..],
            &all,
            &[0..1, 0..1],
            std::slice::from_ref(&far),
            &[far.clone(), 0..1],
            &many,
            &[0..1 << 16, 0..1 << 16],
            &all,
        ] {
            let expected: Vec<_> = (0..)
                .zip(records)
                .flat_map(|(unit, r)| r.clone().map(move |r| (unit, r)))
                .collect();
            packed
                .fill(records, expected.len(), &mut Patience(&mut || false))
                .unwrap();
            assert_eq!(rows(&packed), expected);
            assert_eq!(packed.len(), expected.len());
        }
        assert!(packed.wide.is_empty());
        packed.fill(&[far, 0..1], 3, &mut Patience(&mut || false)).unwrap();
        assert!(packed.narrow.is_empty(), "33 bits must not be packed into 32");
    }

    #[test]
    fn the_order_does_not_depend_on_the_packing_of_rows() {
        let draws = Draws::new(Key { seed: 3, epoch: 1 }, Purpose::Window, 2);
        let (mut narrow, mut wide) = (PackedRows::default(), PackedRows::default());
        let (mut go_on, mut as_well) = (|| false, || false);
        let (patience, too) = (&mut Patience(&mut go_on), &mut Patience(&mut as_well));
        narrow.fill(&[0..500, 0..300], 800, patience).unwrap();
        let far = u32::MAX - 300..u32::MAX;
        wide.fill(&[0..500, far.clone()], 800, too).unwrap();
        assert!(narrow.wide.is_empty() && wide.narrow.is_empty());
        for (done, to) in [(0, 100), (100, 101), (101, 800)] {
            narrow.shuffle(&draws, done, to, patience).unwrap();
            wide.shuffle(&draws, done, to, too).unwrap();
        }
        let moved = |(unit, record)| (unit, if unit == 1 { record + far.start } else { record });
        assert_eq!(rows(&narrow).into_iter().map(moved).collect::<Vec<_>>(), rows(&wide));
        assert_ne!(rows(&narrow)[..3], [(0, 0), (0, 1), (0, 2)]);
    }
}
