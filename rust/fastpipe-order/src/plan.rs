//! What stands in one batch.

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

    /// Fills the batch up to `rows` rows with its own, from the first on, again and again.
    pub fn fill_up(&mut self, rows: u32) {
        let mut missing = rows.saturating_sub(self.len() as u32);
        match self {
            Content::Runs(runs) => {
                let own = runs.clone();
                for run in own.iter().cycle().take_while(|_| !own.is_empty()) {
                    if missing == 0 {
                        break;
                    }
                    let take = run.rows.min(missing);
                    let slot = rows - missing;
                    runs.push(Run {
                        slot,
                        rows: take,
                        ..*run
                    });
                    missing -= take;
                }
            }
            Content::Picks(picks) => {
                let own = picks.rows.clone();
                picks.rows.extend(own.iter().cycle().take(missing as usize));
            }
        }
    }
}

/// Numbers the units of a batch in the order in which they are met.
#[derive(Clone, Debug, Default)]
pub(crate) struct Numbering {
    /// For each of the walker's units, the batch that met it last, and its number there.
    met: Vec<(u32, u32)>,
    batch: u32,
}

impl Numbering {
    /// A batch of rows of the walker's units, which it counts below `units`: for each row its unit as the walker counts,
    /// the unit itself, and the record.
    pub(crate) fn picks(&mut self, units: usize, rows: impl ExactSizeIterator<Item = (usize, u64, u32)>) -> Picks {
        self.batch = self.batch.wrapping_add(1);
        if self.batch == 0 {
            self.met.clear();
            self.batch = 1;
        }
        if self.met.len() < units {
            self.met.resize(units, (0, 0));
        }
        // Room for one more than can be met, since there is no branch on whether a unit is new, which can't be predicted.
        let mut found = vec![0; units.min(rows.len()) + 1];
        let mut count = 0;
        let rows = rows.map(|(index, unit, record)| {
            let met = &mut self.met[index];
            let is_new = met.0 != self.batch;
            found[count] = unit;
            let number = if is_new { count as u32 } else { met.1 };
            count += usize::from(is_new);
            *met = (self.batch, number);
            Row { unit: number, record }
        });
        let rows = rows.collect();
        found.truncate(count);
        Picks { units: found, rows }
    }
}
