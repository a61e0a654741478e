//! The contents of a batch as positions of rows.

use crate::failure::{Result, collected, filled, reserve, with_room};

/// Consecutive rows of one unit that are placed into consecutive slots of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// Index of the unit.
    pub unit: u64,
    /// Index of the first row within the unit.
    pub record: u32,
    /// First slot in the batch.
    pub slot: u32,
    /// Number of rows.
    pub rows: u32,
}

/// The position of one row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Row {
    /// Index of the unit in [`Picks::units`].
    pub unit: u32,
    /// Index of the row within the unit.
    pub record: u32,
}

/// Rows in any sequence, one for each slot.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Picks {
    /// Units that contain the rows. The list may contain a few units without rows in the batch.
    pub units: Vec<u64>,
    /// The row of each slot.
    pub rows: Vec<Row>,
}

/// The positions of a batch's rows in the units.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Ranges of units, by ascending slot. The next batch continues where this batch ended, unless the unit has been
    /// released.
    Runs(Vec<Run>),
    /// Single rows.
    Picks(Picks),
}

/// The groups of a batch's rows, if each row of the order is a group of rows. See [`Packing`](crate::Packing).
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Groups {
    /// Number of rows of each group. Groups follow each other. Empty if the order has no groups.
    pub sizes: Vec<u32>,
    /// For each row, its first element that belongs to the group. Empty without sizes.
    pub starts: Vec<u32>,
}

/// A batch as a walker plans it.
#[derive(Debug)]
pub(crate) struct Planned {
    pub(crate) content: Content,
    /// Units that this batch is the last to use.
    pub(crate) released: Vec<u64>,
    pub(crate) groups: Groups,
}

impl From<(Content, Vec<u64>)> for Planned {
    fn from((content, released): (Content, Vec<u64>)) -> Self {
        Planned {
            content,
            released,
            groups: Groups::default(),
        }
    }
}

impl Content {
    /// Returns the number of rows.
    pub fn len(&self) -> usize {
        match self {
            Content::Runs(runs) => runs.iter().map(|run| run.rows as usize).sum(),
            Content::Picks(picks) => picks.rows.len(),
        }
    }

    /// Whether the batch has no rows.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Returns the unit of a slot, and the index of the row within it.
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

    /// Returns the rows one by one.
    pub(crate) fn into_picks(self) -> Result<Picks> {
        let rows = self.len();
        match self {
            Content::Picks(picks) => Ok(picks),
            Content::Runs(runs) => {
                let mut picks = Picks {
                    units: with_room(runs.len())?,
                    rows: with_room(rows)?,
                };
                for run in runs {
                    if picks.units.last() != Some(&run.unit) {
                        picks.units.push(run.unit);
                    }
                    let unit = picks.units.len() as u32 - 1;
                    let records = run.record..run.record + run.rows;
                    picks.rows.extend(records.map(|record| Row { unit, record }));
                }
                Ok(picks)
            }
        }
    }

    /// Pads the batch to `rows` rows with other rows of its units; `rows_of` returns a unit's row count. Padding rows
    /// are spread evenly over each unit. Repeating the rows of a short batch instead would concentrate on a few rows of
    /// an embedding.
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
                // Only units that have rows in the batch. `picks.units` may contain others.
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
                    // The result is below `there`, because `turn` is below `turns`.
                    let record = (u64::from(turn) * there / turns) as u32;
                    Row { unit, record }
                }));
            }
        }
        Ok(())
    }
}

/// Assigns indices to the units of each batch, in the sequence of their first rows.
#[derive(Clone, Debug)]
pub(crate) struct Numbering {
    /// Marks below this value belong to earlier batches.
    base: u32,
}

/// A mark that a walker stores with each of its units: the index within a batch plus the base of that batch.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Mark(u32);

impl Default for Numbering {
    fn default() -> Self {
        // 1 exceeds the default mark of units that no batch has used.
        Numbering { base: 1 }
    }
}

impl Numbering {
    /// Begins a batch with `rows` rows from at most `units` units. Calls `reset` to clear all marks before they would
    /// overflow.
    pub(crate) fn batch(&mut self, rows: usize, units: usize, reset: impl FnOnce(Mark)) -> Result<Numbers<'_>> {
        let most = rows.min(units);
        if (u32::MAX - self.base) as usize <= most {
            reset(Mark::default());
            *self = Numbering::default();
        }
        // One extra element: `number` writes unconditionally, because a branch on whether a unit is new would be
        // unpredictable.
        let (found, count) = (filled(0, most + 1)?, 0);
        Ok(Numbers {
            numbering: self,
            found,
            count,
        })
    }
}

/// The indices of the units of one batch.
#[derive(Debug)]
pub(crate) struct Numbers<'a> {
    numbering: &'a mut Numbering,
    /// The units, and one extra element.
    found: Vec<u64>,
    count: u32,
}

impl Numbers<'_> {
    /// Returns the index of the unit with this mark.
    #[inline(always)]
    pub(crate) fn number(&mut self, mark: &mut Mark, unit: u64) -> u32 {
        let base = self.numbering.base;
        self.found[self.count as usize] = unit;
        // For marks of earlier batches, the difference wraps around to a large number.
        let number = mark.0.wrapping_sub(base).min(self.count);
        self.count += u32::from(number == self.count);
        mark.0 = base + number;
        number
    }

    /// Returns all units of the batch, by index.
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
    fn the_rows_that_fill_a_batch_are_spread_over_its_units() {
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
                    "the batch has no rows of these units"
                );
            }
        }
        let mut nothing = Content::Runs(Vec::new());
        nothing.fill_up(3, sizes).unwrap();
        assert!(nothing.is_empty());
    }

    #[test]
    fn units_are_numbered_in_order_of_occurrence_and_renumbered_if_marks_run_out() {
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
