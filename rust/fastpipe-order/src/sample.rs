//! Samples: some of all rows, drawn uniformly, in storage order. Rows in a sequence that the caller specified.
//!
//! Without replacement, a sample is a range of a keyed permutation of all rows. No table of all rows is needed, and
//! samples of disjoint ranges have no row in common. With replacement, each draw is independent. In both cases the rows
//! are sorted, so that each unit is read once and the rows of a batch come from neighboring units.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_random::{Draws, Key, Purpose, below};

use crate::failure::{Result, collected, copied, reserve};
use crate::permutation::Permutation;
use crate::plan::{Content, Picks, Row};
use crate::units::Units;

/// The parameters of a sample.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// Number of rows.
    pub(crate) rows: u64,
    /// Number of draws to skip before them.
    pub(crate) skipped: u64,
    /// Whether a row may be drawn several times.
    pub(crate) replace: bool,
}

impl Sample {
    /// Draws rows from `0..total` and sorts them.
    pub(crate) fn draw(&self, total: u64, key: Key) -> Result<Vec<u64>> {
        let places = self.skipped..self.skipped + self.rows;
        let mut rows = if total == 0 {
            Vec::new()
        } else if self.replace {
            let draws = Draws::new(key, Purpose::Sample, 2);
            collected(places.map(|place| below(draws.word(place), total)))?
        } else {
            let all = Permutation::of(total as usize, key, Purpose::Sample)?;
            collected(places.map(|place| all.at(place as usize) as u64))?
        };
        rows.sort_unstable();
        Ok(rows)
    }

    /// Returns the bytes needed to draw `rows` of `total` rows.
    pub(crate) fn list_bytes(total: u64, rows: u64) -> u64 {
        rows.saturating_mul(8)
            .saturating_add(Permutation::bytes(total as usize))
    }
}

/// Rows drawn without replacement, each with the index of its draw.
#[derive(Debug)]
pub struct Drawing {
    total: u64,
    sample: Sample,
    all: Permutation,
}

/// A row that was drawn.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct Drawn {
    /// Index of the row over all units.
    pub row: u64,
    /// Index of the draw, not counting skipped draws.
    pub draw: u64,
}

impl Drawing {
    /// Draws `rows` of `total` rows after skipping `skipped` draws, like an [`Order`](crate::Order) with the same
    /// sample and key. If fewer rows are left, it draws all of them.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the permutation table of a small dataset can't be allocated.
    pub fn new(total: u64, rows: u64, skipped: u64, key: Key) -> Result<Drawing> {
        let skipped = skipped.min(total);
        let rows = rows.min(total - skipped);
        Ok(Drawing {
            total,
            sample: Sample {
                rows,
                skipped,
                replace: false,
            },
            all: Permutation::of(total as usize, key, Purpose::Sample)?,
        })
    }

    /// Returns the drawn rows within `range`, in ascending order. Memory is proportional to the result. Time is
    /// proportional to the smaller of the range's length and the number of draws.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the rows can't be allocated.
    pub fn within(&self, range: Range<u64>) -> Result<Vec<Drawn>> {
        let range = range.start.min(self.total)..range.end.min(self.total);
        let Sample { rows, skipped, .. } = self.sample;
        let len = range.end.saturating_sub(range.start);
        let mut drawn = Vec::new();
        // A step costs about the same in both loops.
        if len < rows && self.all.place_of(0).is_some() {
            for row in range {
                let place = self.all.place_of(row).unwrap_or_default();
                if let Some(draw) = place.checked_sub(skipped).filter(|&draw| draw < rows) {
                    push(&mut drawn, Drawn { row, draw })?;
                }
            }
            return Ok(drawn);
        }
        for draw in 0..rows {
            let row = self.all.at((skipped + draw) as usize) as u64;
            if range.contains(&row) {
                push(&mut drawn, Drawn { row, draw })?;
            }
        }
        drawn.sort_unstable();
        Ok(drawn)
    }
}

/// Index of the random stream for unit 0. Streams of other units follow. Lower indices are reserved for draws from all
/// rows.
const WITHIN_UNITS: u64 = 16;

/// A unit from which some rows are drawn.
#[derive(Clone, Copy, Debug)]
pub struct Part {
    /// Index of the unit.
    pub unit: u64,
    /// Index of its first row over all units.
    pub first: u64,
    /// Number of rows in the unit.
    pub rows: u32,
    /// Number of rows to draw.
    pub drawn: u32,
}

/// Draws some rows of each unit without replacement. The rows of a unit depend only on the key, the index of the unit
/// and its row count. Returns indices over all units, in the sequence of `parts` and ascending within each unit.
///
/// # Errors
///
/// [`PlanError`](crate::PlanError) if memory for the rows can't be allocated.
pub fn drawn_within(parts: &[Part], key: Key) -> Result<Vec<u64>> {
    let mut found = Vec::new();
    let mut table: Vec<u32> = Vec::new();
    for part in parts {
        let count = part.drawn.min(part.rows) as usize;
        reserve(&mut found, count)?;
        table.clear();
        reserve(&mut table, part.rows as usize)?;
        table.extend(0..part.rows);
        if count < table.len() {
            let draws = Draws::new(key, Purpose::Sample, WITHIN_UNITS.wrapping_add(part.unit));
            draws.swap(0, count, &mut table, |place| u64::from(part.rows) - place);
            table[..count].sort_unstable();
        }
        found.extend(table[..count].iter().map(|&record| part.first + u64::from(record)));
    }
    Ok(found)
}

fn push(list: &mut Vec<Drawn>, drawn: Drawn) -> Result<()> {
    if list.len() == list.capacity() {
        reserve(list, list.len().max(64))?;
    }
    list.push(drawn);
    Ok(())
}

/// Iterates over the batches of a sample.
#[derive(Debug)]
pub(crate) struct SampleWalker {
    units: Arc<Units>,
    sample: Sample,
    key: Key,
    batch_size: u32,
    /// Rows of the sample: set if the caller specified them, or after the first batch was requested.
    rows: Option<Arc<Vec<u64>>>,
    /// Units of the previous batch.
    open: Vec<u64>,
}

impl SampleWalker {
    pub(crate) fn new(
        units: Arc<Units>,
        sample: Sample,
        key: Key,
        batch_size: u32,
        given: Option<Arc<Vec<u64>>>,
    ) -> SampleWalker {
        SampleWalker {
            units,
            sample,
            key,
            batch_size,
            rows: given,
            open: Vec::new(),
        }
    }

    /// Forgets the current position.
    pub(crate) fn forget(&mut self) {
        self.open.clear();
    }

    /// Returns the rows of an existing batch, and the units of the previous batch that are no longer needed.
    pub(crate) fn batch(&mut self, batch: u64) -> Result<(Content, Vec<u64>)> {
        let rows = match &mut self.rows {
            Some(rows) => rows,
            none => none.insert(Arc::new(self.sample.draw(self.units.total(), self.key)?)),
        };
        let size = self.batch_size as usize;
        let start = (batch as usize).saturating_mul(size).min(rows.len());
        let end = start.saturating_add(size).min(rows.len());
        let mut picks = Picks::default();
        reserve(&mut picks.rows, end - start)?;
        // Rows of the last unit found.
        let mut here = 0..0;
        for &row in &rows[start..end] {
            if !here.contains(&row) {
                let (unit, record) = self.units.find(row);
                let first = row - u64::from(record);
                here = first..first + u64::from(self.units.rows(unit));
                reserve(&mut picks.units, 1)?;
                picks.units.push(unit as u64);
            }
            picks.rows.push(Row {
                // The index is less than the number of rows in the batch.
                unit: picks.units.len() as u32 - 1,
                // The index is less than the number of rows in the unit.
                record: (row - here.start) as u32,
            });
        }
        if !picks.units.is_sorted() {
            // A sequence may return to a unit.
            let found = std::mem::take(&mut picks.units);
            picks.units = copied(&found)?;
            picks.units.sort_unstable();
            picks.units.dedup();
            for row in &mut picks.rows {
                row.unit = picks.units.partition_point(|unit| *unit < found[row.unit as usize]) as u32;
            }
        }
        let open = copied(&picks.units)?;
        let mut released = std::mem::replace(&mut self.open, open);
        // The batch may have rows of units of the previous one.
        released.retain(|unit| picks.units.binary_search(unit).is_err());
        Ok((Content::Picks(picks), released))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::order::Order;
    use crate::settings::{Kind, Settings, ShardBy};

    fn order(units: &[u32], rows: u64, skipped: u64, replace: bool, seed: u64) -> Arc<Order> {
        let settings = Settings {
            kind: if replace { Kind::Bootstrap } else { Kind::Sample },
            batch_size: 7,
            shuffle_buffer: rows,
            seed,
            shard_by: ShardBy::Batch,
            skipped,
            ..Settings::default()
        };
        let units = Arc::new(Units::new(units.iter().copied()).unwrap());
        Arc::new(Order::new(&units, settings).unwrap())
    }

    /// Returns the rows of all batches.
    fn walked(order: &Arc<Order>, units: &[u32]) -> Vec<u64> {
        let first = |unit: u64| units[..unit as usize].iter().map(|&rows| u64::from(rows)).sum::<u64>();
        let (mut rows, mut used) = (Vec::new(), Vec::new());
        for plan in order.epoch(3).unwrap() {
            let plan = plan.unwrap();
            let Content::Picks(picks) = &plan.content else {
                panic!("picks")
            };
            assert!(picks.units.is_sorted() && picks.units.iter().skip(1).all(|unit| !used.contains(unit)));
            rows.extend((0..plan.content.len()).map(|slot| {
                let (unit, record) = plan.content.at(slot).unwrap();
                assert!(record < units[unit as usize]);
                first(unit) + u64::from(record)
            }));
            assert!(!plan.released.iter().any(|unit| picks.units.contains(unit)));
            used.retain(|unit| !plan.released.contains(unit));
            assert!(used.len() < 2);
            used = picks.units.clone();
        }
        rows
    }

    proptest! {
        #[test]
        fn batches_have_the_rows_of_the_sample(
            units in proptest::collection::vec(0u32..50, 0..20),
            rows in 1u64..100,
            replace in any::<bool>(),
            seed in any::<u64>(),
        ) {
            let total: u64 = units.iter().map(|&rows| u64::from(rows)).sum();
            let order = order(&units, rows, 0, replace, seed);
            let sample = order.sample(3).unwrap().unwrap();
            let expected = if total == 0 { 0 } else if replace { rows } else { rows.min(total) };
            prop_assert_eq!(sample.len() as u64, expected);
            prop_assert_eq!(&walked(&order, &units), &sample);
            if !replace {
                prop_assert!(sample.windows(2).all(|pair| pair[0] < pair[1]));
            }
        }

        #[test]
        fn samples_behind_each_other_share_no_row(
            parts in proptest::collection::vec(1u64..40, 1..6),
            more in 0u32..20,
            seed in any::<u64>(),
        ) {
            let total: u64 = parts.iter().sum::<u64>() + u64::from(more);
            let units = [total as u32];
            let mut all = Vec::new();
            let mut skipped = 0;
            for rows in parts {
                all.extend(order(&units, rows, skipped, false, seed).sample(0).unwrap().unwrap());
                skipped += rows;
            }
            let drawn = all.len();
            all.sort_unstable();
            all.dedup();
            prop_assert_eq!(all.len(), drawn);
            let rest = order(&units, 1000, skipped, false, seed).sample(0).unwrap().unwrap();
            prop_assert_eq!(rest.len(), more as usize);
        }
    }

    proptest! {
        #[test]
        fn drawings_have_the_rows_of_samples(
            total in prop_oneof![0..200u64, 65_000..67_000u64],
            rows in 1u64..70_000,
            skipped in 0u64..300,
            cut in any::<prop::sample::Index>(),
            seed in any::<u64>(),
        ) {
            let drawing = Drawing::new(total, rows, skipped, Key { seed, epoch: 0 }).unwrap();
            let drawn = drawing.within(0..u64::MAX).unwrap();
            let found: Vec<u64> = drawn.iter().map(|drawn| drawn.row).collect();
            prop_assert_eq!(&found, &order(&[total as u32], rows, skipped, false, seed).sample(0).unwrap().unwrap());
            let mut draws: Vec<u64> = drawn.iter().map(|drawn| drawn.draw).collect();
            draws.sort_unstable();
            prop_assert!(draws.iter().copied().eq(0..draws.len() as u64));
            // A smaller sample consists of the first draws of a larger one.
            let few = Drawing::new(total, rows / 2, skipped, Key { seed, epoch: 0 }).unwrap();
            let first: Vec<Drawn> = drawn.iter().copied().filter(|drawn| drawn.draw < rows / 2).collect();
            prop_assert_eq!(few.within(0..total).unwrap(), first);
            let cut = cut.index(total as usize + 1) as u64;
            let parts = [drawing.within(0..cut).unwrap(), drawing.within(cut..total).unwrap()];
            prop_assert_eq!(parts.concat(), drawn);
        }
    }

    proptest! {
        #[test]
        fn given_rows_keep_their_sequence(
            units in proptest::collection::vec(0u32..9, 1..9),
            places in proptest::collection::vec(any::<prop::sample::Index>(), 0..90),
            batch_size in 1u32..20,
        ) {
            let total: u64 = units.iter().map(|&rows| u64::from(rows)).sum();
            prop_assume!(total > 0);
            let rows: Vec<u64> = places.iter().map(|place| place.index(total as usize) as u64).collect();
            let settings = Settings { batch_size, ..Settings::default() };
            let known = Arc::new(Units::new(units.iter().copied()).unwrap());
            let order = Arc::new(Order::of_rows(&known, settings, Arc::new(rows.clone())).unwrap());
            prop_assert_eq!(&order.sample(9).unwrap().unwrap(), &rows);
            prop_assert_eq!((order.epoch_rows(), order.left_out()), (rows.len() as u64, 0));
            let (mut found, mut open) = (Vec::new(), Vec::new());
            for plan in order.epoch(1).unwrap() {
                let plan = plan.unwrap();
                let Content::Picks(picks) = &plan.content else { panic!("picks") };
                prop_assert!(picks.units.is_sorted_by(|unit, next| unit < next));
                let (kept, released): (Vec<u64>, Vec<u64>) = open.iter().partition(|unit| picks.units.contains(unit));
                prop_assert_eq!(&plan.released, &released);
                prop_assert!(kept.len() <= picks.units.len());
                open = picks.units.clone();
                found.extend((0..plan.content.len()).map(|slot| {
                    let (unit, record) = plan.content.at(slot).unwrap();
                    known.first(unit as usize) + u64::from(record)
                }));
            }
            prop_assert_eq!(found, rows);
        }
    }

    #[test]
    fn rows_of_units_are_drawn_uniformly_and_independently() {
        let part = |unit, rows, drawn| Part {
            unit,
            first: unit * 100,
            rows,
            drawn,
        };
        let mut counts = [0u32; 40];
        for seed in 0..4000 {
            let key = Key { seed, epoch: 0 };
            let both = drawn_within(&[part(3, 40, 8), part(5, 10, 4)], key).unwrap();
            assert_eq!(both[..8], drawn_within(&[part(3, 40, 8)], key).unwrap());
            assert!(both.windows(2).all(|pair| pair[0] < pair[1]) && both[8] >= 500 && both[11] < 510);
            both[..8].iter().for_each(|row| counts[(row - 300) as usize] += 1);
        }
        // Each count results from 4,000 draws with probability 1/5. The tolerance is five standard deviations.
        assert!(
            counts
                .iter()
                .all(|&count| (f64::from(count) - 800.0).abs() < 5.0 * 640f64.sqrt()),
            "{counts:?}"
        );
        let all = drawn_within(&[part(1, 3, 9), part(2, 0, 1), part(7, 2, 0)], Key::default()).unwrap();
        assert_eq!(all, [100, 101, 102]);
    }

    /// Every row is drawn equally often. Tests chi-square to within five standard deviations, with tables and with
    /// keyed permutations.
    #[test]
    fn rows_are_drawn_uniformly() {
        for (total, rows, replace) in [
            (40, 8, false),
            (40, 8, true),
            (100_000, 20_000, false),
            (100_000, 20_000, true),
        ] {
            let mut counts = [0u32; 40];
            let mut drawn = 0;
            for seed in 0..if total == 40 { 4000 } else { 10 } {
                for row in order(&[total], rows, 0, replace, seed).sample(seed).unwrap().unwrap() {
                    counts[row as usize / (total as usize / 40)] += 1;
                    drawn += 1;
                }
            }
            let mean = f64::from(drawn) / 40.0;
            let square: f64 = counts
                .iter()
                .map(|&count| (f64::from(count) - mean).powi(2) / mean)
                .sum();
            // There are 39 degrees of freedom. Without replacement, the variance is smaller.
            assert!(
                (square - 39.0).abs() < 5.0 * (2.0f64 * 39.0).sqrt(),
                "{total} {replace}: {square}"
            );
        }
    }
}
