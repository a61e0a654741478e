//! What stands in one batch.

use crate::failure::{Result, collected, filled, reserve};

/// Consecutive records of one unit that go to consecutive slots of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The unit.
    pub unit: u64,
    /// Its first record.
    pub record: u32,
    /// The first slot.
    pub slot: u32,
    /// How many.
    pub rows: u32,
}

/// One record.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Which of the batch's units, counted in [`Picks::units`].
    pub unit: u32,
    /// The record's number within the unit.
    pub record: u32,
}

/// Records in any order, slot by slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picks {
    /// The units that the batch takes rows of; there may be a few more.
    pub units: Vec<u64>,
    /// The row of each slot.
    pub rows: Vec<Row>,
}

/// Where the rows of a batch come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Stretches of units, by ascending slot. Successive batches go on where the one before ended, unless the unit is
    /// among the released.
    Runs(Vec<Run>),
    /// Single records.
    Picks(Picks),
}

impl Content {
    /// Number of rows.
    pub fn len(&self) -> usize {
        match self {
            Content::Runs(runs) => runs.iter().map(|run| run.rows as usize).sum(),
            Content::Picks(picks) => picks.rows.len(),
        }
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Unit and record of a slot.
    pub fn at(&self, slot: usize) -> Option<(u64, u32)> {
        match self {
            Content::Runs(runs) => {
                let run = runs[..runs.partition_point(|run| run.slot as usize <= slot)].last()?;
                let behind = slot as u64 - u64::from(run.slot);
                (behind < u64::from(run.rows)).then(|| (run.unit, run.record + behind as u32))
            }
            Content::Picks(picks) => {
                let row = picks.rows.get(slot)?;
                Some((picks.units[row.unit as usize], row.record))
            }
        }
    }

    /// Fills the batch up to `rows` rows with others of its units, of which there are `rows_of`. They are spread over
    /// each unit, so that none comes much more often than others: the rows of a short batch, repeated, would all fall
    /// on few rows of an embedding.
    pub(crate) fn fill_up(&mut self, rows: u32, rows_of: impl Fn(u64) -> u32) -> Result<()> {
        let from = self.len() as u32;
        let missing = rows.saturating_sub(from);
        if missing == 0 || from == 0 {
            return Ok(());
        }
        match self {
            Content::Runs(runs) => {
                let mut units: Vec<u64> = collected(runs.iter().map(|run| run.unit))?;
                units.dedup();
                let mut slot = from;
                for &unit in units.iter().cycle() {
                    if slot == rows {
                        break;
                    }
                    let rows = rows_of(unit).min(rows - slot);
                    reserve(runs, 1)?;
                    runs.push(Run {
                        unit,
                        record: 0,
                        rows,
                        slot,
                    });
                    slot += rows;
                }
            }
            Content::Picks(picks) => {
                // Those that the batch takes rows of; there may be a few more.
                let mut units: Vec<u32> = collected(picks.rows.iter().map(|row| row.unit))?;
                units.sort_unstable();
                units.dedup();
                let count = units.len() as u32;
                reserve(&mut picks.rows, missing as usize)?;
                picks.rows.extend((0..missing).map(|i| {
                    let (turn, which) = (i / count, i % count);
                    let unit = units[which as usize];
                    let turns = u64::from((missing - which).div_ceil(count));
                    let there = u64::from(rows_of(picks.units[unit as usize]));
                    // Below `there`, since `turn` is below `turns`.
                    let record = (u64::from(turn) * there / turns) as u32;
                    Row { unit, record }
                }));
            }
        }
        Ok(())
    }
}

/// Numbers the units of batches, each in the order in which the batch meets them.
#[derive(Clone, Debug)]
pub(crate) struct Numbering {
    /// Marks below are of batches before.
    base: u32,
}

/// What a walker keeps with each of its units: the number that a batch gave it, counted through all batches.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(u32);

impl Default for Numbering {
    fn default() -> Self {
        // Above the mark of units that no batch has met.
        Numbering { base: 1 }
    }
}

impl Numbering {
    /// Begins a batch of `rows` rows, of at most this many units. Where marks have become too large, all are to be
    /// reset.
    pub(crate) fn batch(&mut self, rows: usize, units: usize, reset: impl FnOnce(Mark)) -> Result<Numbers<'_>> {
        let most = rows.min(units);
        if (u32::MAX - self.base) as usize <= most {
            reset(Mark::default());
            *self = Numbering::default();
        }
        // Room for one more than can be met, since there is no branch on whether a unit is new, which can't be
        // predicted.
        let (found, count) = (filled(0, most + 1)?, 0);
        Ok(Numbers {
            numbering: self,
            found,
            count,
        })
    }
}

/// The numbers of a batch's units.
#[derive(Debug)]
pub(crate) struct Numbers<'a> {
    numbering: &'a mut Numbering,
    /// The units, and one more element.
    found: Vec<u64>,
    count: u32,
}

impl Numbers<'_> {
    /// The number of a unit that has this mark.
    #[inline(always)]
    pub(crate) fn number(&mut self, mark: &mut Mark, unit: u64) -> u32 {
        let base = self.numbering.base;
        self.found[self.count as usize] = unit;
        // Marks of batches before are far above.
        let number = mark.0.wrapping_sub(base).min(self.count);
        self.count += u32::from(number == self.count);
        mark.0 = base + number;
        number
    }

    /// All units that were met, by number.
    pub(crate) fn units(mut self) -> Vec<u64> {
        self.numbering.base += self.count;
        self.found.truncate(self.count as usize);
        self.found
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_fills_a_batch_up_is_spread_over_its_units() {
        let sizes = |unit: u64| [10, 0, 40, 7][unit as usize];
        let units = vec![3, 1, 0, 2];
        let rows = [(0, 6), (2, 9)].map(|(unit, record)| Row { unit, record });
        let runs = [(3, 6, 0), (0, 9, 1)].map(|(unit, record, slot)| Run {
            unit,
            record,
            slot,
            rows: 1,
        });
        for missing in 0..60 {
            let contents = [
                Content::Picks(Picks {
                    units: units.clone(),
                    rows: rows.to_vec(),
                }),
                Content::Runs(runs.to_vec()),
            ];
            for mut content in contents {
                content.fill_up(2 + missing, sizes).unwrap();
                assert_eq!(content.len(), 2 + missing as usize);
                assert_eq!((content.at(0), content.at(1)), (Some((3, 6)), Some((0, 9))));
                let filled: Vec<_> = (2..2 + missing as usize).filter_map(|slot| content.at(slot)).collect();
                assert_eq!(filled.len(), missing as usize);
                for (unit, size) in [(0, 10), (3, 7)] {
                    let mut times = vec![0; size];
                    filled
                        .iter()
                        .filter(|row| row.0 == unit)
                        .for_each(|row| times[row.1 as usize] += 1);
                    let (least, most) = (times.iter().min().unwrap(), times.iter().max().unwrap());
                    assert!(most - least <= 1, "{times:?}");
                }
                assert!(
                    filled.iter().all(|row| row.0 != 1 && row.0 != 2),
                    "it takes no rows of these"
                );
            }
        }
        let mut nothing = Content::Runs(Vec::new());
        nothing.fill_up(3, sizes).unwrap();
        assert!(nothing.is_empty());
    }

    #[test]
    fn units_are_numbered_as_they_are_met_and_when_marks_run_out_anew() {
        let mut numbering = Numbering { base: u32::MAX - 12 };
        let mut marks = [Mark::default(); 6];
        for batch in 0..10 {
            let met = [4, batch % 6, 4, 2, 5, 2, batch % 6];
            let mut numbers = numbering
                .batch(met.len(), marks.len(), |mark| marks.fill(mark))
                .unwrap();
            let given = met.map(|unit| numbers.number(&mut marks[unit], unit as u64));
            let units = numbers.units();
            let mut expected: Vec<u64> = Vec::new();
            for (unit, number) in met.iter().zip(given) {
                if !expected.contains(&(*unit as u64)) {
                    expected.push(*unit as u64);
                }
                assert_eq!(expected[number as usize], *unit as u64);
            }
            assert_eq!(units, expected);
        }
        assert!(numbering.base < 100);
    }
}
