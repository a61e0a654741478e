//! Samples: some of all rows, drawn uniformly, as they stand.
//!
//! Without replacement the rows are the first ones of a keyed permutation of all: no table of all rows is made, and samples
//! that begin behind each other's ends have no row in common. With replacement each draw is a row by itself. Either way they
//! are sorted, so that each unit is read once, and rows of a batch lie in units that are neighbours.

use std::sync::Arc;

use fastpipe_random::{Draws, Key, Purpose, below};

use crate::failure::{Result, collected, reserve};
use crate::permutation::Permutation;
use crate::plan::{Content, Picks, Row};
use crate::units::Units;

/// Which rows.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Sample {
    /// How many.
    pub(crate) rows: u64,
    /// Draws in front of them.
    pub(crate) skipped: u64,
    /// Whether they may be drawn several times.
    pub(crate) replace: bool,
}

impl Sample {
    /// Draws them from `0..total`, in ascending order.
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

    /// Bytes that drawing so many of so many takes.
    pub(crate) fn list_bytes(total: u64, rows: u64) -> u64 {
        rows.saturating_mul(8)
            .saturating_add(Permutation::bytes(total as usize))
    }
}

/// Goes through the batches of a sample.
#[derive(Debug)]
pub(crate) struct SampleWalker {
    units: Arc<Units>,
    sample: Sample,
    key: Key,
    batch_size: u32,
    /// Its rows, if they are given, or once a batch was asked for.
    rows: Option<Arc<Vec<u64>>>,
    /// The units of the batch before.
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

    /// Forgets where it stands.
    pub(crate) fn forget(&mut self) {
        self.open.clear();
    }

    /// What stands in a batch that exists, and the units of the batch before that aren't used any more.
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
        // The rows of the unit that was found last.
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
                // Fewer than the batch has rows.
                unit: picks.units.len() as u32 - 1,
                // Less than the unit has.
                record: (row - here.start) as u32,
            });
        }
        let open = collected(picks.units.iter().copied())?;
        let mut released = std::mem::replace(&mut self.open, open);
        // It may begin with the unit that the one before ended with. Whoever went elsewhere in between may need any of them.
        released.retain(|unit| !picks.units.contains(unit) && picks.units.first().is_some_and(|first| unit < first));
        Ok((Content::Picks(picks), released))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::order::Order;
    use crate::settings::{Kind, Settings, ShardBy, Uneven};

    fn order(units: &[u32], rows: u64, skipped: u64, replace: bool, seed: u64) -> Arc<Order> {
        let settings = Settings {
            kind: Kind::Sample { skipped, replace },
            batch_size: 7,
            drop_last: false,
            shuffle_buffer: rows,
            seed,
            rank: 0,
            ranks: 1,
            shard_by: ShardBy::Batch,
            uneven: Uneven::Drop,
            in_step: 1,
        };
        let units = Arc::new(Units::new(units.iter().copied()).unwrap());
        Arc::new(Order::new(&units, settings).unwrap())
    }

    /// The rows of all batches.
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

    #[test]
    fn rows_may_be_given() {
        let settings = *order(&[5, 0, 9], 1, 0, false, 3).settings();
        let units = Arc::new(Units::new([5, 0, 9]).unwrap());
        let rows = vec![0, 0, 3, 4, 5, 6, 7, 8, 13, 13];
        let order = Arc::new(Order::of_rows(&units, settings, rows.clone()).unwrap());
        assert_eq!(order.sample(9).unwrap().unwrap(), rows);
        assert_eq!(walked(&order, &[5, 0, 9]), rows);
        assert_eq!((order.steps(), order.epoch_rows(), order.left_out()), (2, 10, 0));
    }

    /// Every row is drawn equally often: chi-square within five standard deviations, of small tables and of keyed orders.
    #[test]
    fn rows_are_drawn_alike() {
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
            // Of 39 degrees of freedom; without replacement it varies less.
            assert!(
                (square - 39.0).abs() < 5.0 * (2.0f64 * 39.0).sqrt(),
                "{total} {replace}: {square}"
            );
        }
    }
}
