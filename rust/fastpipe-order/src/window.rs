//! Window order: units in random order, cut into windows of equal numbers of rows. Each window is a uniform
//! permutation.

use std::cmp::Ordering;
use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};

use fastpipe_random::{Draws, Key, Purpose};

use crate::failure::{Patience, Result, copied, reserve, with_room};
use crate::packed::PackedRows;
use crate::permutation::{Permutation, SOME};
use crate::plan::{Content, Mark, Numbering, Picks};
use crate::units::Units;

/// Maximum number of windows whose start positions are remembered: several for each of many ranks.
const REMEMBERED: usize = 1 << 12;

/// Walking over more than this fraction of all units (1/16) to find a window isn't worthwhile. The table is built
/// instead, once per epoch.
const LONG_WALK: u64 = 16;

/// The start of a window in the random order of units.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Place {
    /// Number of units before the unit in which the window starts.
    pub unit: u64,
    /// Index within that unit of the window's first row.
    pub record: u32,
}

/// Bytes per unit of a window: its index, the range of its rows in the window, and its mark. A growing list may have
/// twice the required capacity.
const UNIT_BYTES: u64 = 2 * (size_of::<u64>() + 2 * size_of::<u32>()) as u64 + size_of::<Mark>() as u64;

/// The windows of an epoch.
#[derive(Debug)]
pub(crate) struct Windows {
    units: Arc<Units>,
    permutation: Permutation,
    key: Key,
    /// Rows per window. The last window may have fewer.
    rows: u64,
    batch_size: u32,
    /// Number of rows before every 64th unit of the random order.
    table: OnceLock<Vec<u64>>,
}

impl Windows {
    /// Creates windows of `rows` rows, which must be a multiple of the batch size.
    pub(crate) fn new(units: Arc<Units>, key: Key, rows: u64, batch_size: u32) -> Result<Windows> {
        Ok(Windows {
            permutation: Permutation::new(units.len(), key)?,
            units,
            key,
            rows,
            batch_size,
            table: OnceLock::new(),
        })
    }

    /// Returns the bytes for the list of rows of a window.
    pub(crate) fn list_bytes(units: &Units, rows: u64) -> u64 {
        rows.min(units.total()).saturating_mul(PackedRows::bytes_each(units))
    }

    /// Returns the additional bytes for windows of `rows` rows: for the units of a window, and for finding windows.
    pub(crate) fn unit_bytes(units: &Units, rows: u64) -> u64 {
        let within = (units.len() as u64).min(rows);
        let tables = Permutation::bytes(units.len()) + 8 * (units.len() / SOME + 1) as u64;
        within.saturating_mul(UNIT_BYTES).saturating_add(tables)
    }

    /// Returns the number of rows in a window.
    fn len(&self, window: u64) -> usize {
        let left = self.units.total().saturating_sub(window.saturating_mul(self.rows));
        left.min(self.rows) as usize
    }

    /// Returns the position `rows` rows after another one.
    fn walk(&self, from: Place, rows: u64) -> Place {
        let mut left = rows + u64::from(from.record);
        let mut at = from.unit as usize;
        let mut units = [0; SOME];
        'walk: while at < self.permutation.len() {
            for &unit in self.permutation.some(at, &mut units) {
                let here = u64::from(self.units.rows(unit as usize));
                if left < here {
                    break 'walk;
                }
                left -= here;
                at += 1;
            }
        }
        Place {
            unit: at as u64,
            // The index is less than the unit's row count. The last window may end before it is full.
            record: if at < self.permutation.len() { left as u32 } else { 0 },
        }
    }

    /// Returns the table, and builds it if necessary by visiting each unit once.
    fn table(&self) -> Result<&[u64]> {
        if let Some(table) = self.table.get() {
            return Ok(table);
        }
        let mut sum = 0;
        let mut sums = with_room(self.permutation.len() / SOME + 1)?;
        let mut units = [0; SOME];
        for from in (0..self.permutation.len()).step_by(SOME) {
            sums.push(sum);
            let some = self.permutation.some(from, &mut units);
            sum += some
                .iter()
                .map(|&unit| u64::from(self.units.rows(unit as usize)))
                .sum::<u64>();
        }
        Ok(self.table.get_or_init(|| sums))
    }

    /// Returns the position of a row of the random order, using the table.
    fn search(&self, row: u64) -> Result<Place> {
        let table = self.table()?;
        let chunk = table.partition_point(|&sum| sum <= row).saturating_sub(1);
        let start = Place {
            unit: (chunk * SOME) as u64,
            record: 0,
        };
        Ok(self.walk(start, row - table.get(chunk).copied().unwrap_or(0)))
    }
}

/// The window that is being drawn.
#[derive(Debug, Default)]
struct Drawn {
    window: u64,
    /// Its units, in the sequence in which their rows are listed.
    units: Vec<u64>,
    /// Its rows, with indices into `units`. The first `done` rows are in their final order.
    rows: PackedRows,
    done: usize,
}

/// Iterates over batches. Moving to the next batch is fastest.
#[derive(Debug)]
pub(crate) struct WindowWalker {
    windows: Arc<Windows>,
    places: BTreeMap<u64, Place>,
    drawn: Option<Drawn>,
    numbering: Numbering,
    /// Marks of the window's units.
    marks: Vec<Mark>,
}

impl WindowWalker {
    pub(crate) fn new(windows: Arc<Windows>) -> Self {
        WindowWalker {
            windows,
            places: BTreeMap::new(),
            drawn: None,
            numbering: Numbering::default(),
            marks: Vec::new(),
        }
    }

    /// Whether a window may start at a position, as far as that can be checked without visiting the units before it.
    pub(crate) fn may_start(&self, window: u64, place: Place) -> bool {
        let Windows {
            units,
            permutation,
            rows,
            ..
        } = &*self.windows;
        let Ok(at) = usize::try_from(place.unit) else {
            return false;
        };
        match at.cmp(&permutation.len()) {
            Ordering::Less => place.record < units.rows(permutation.at(at)),
            Ordering::Equal => place.record == 0 && window.saturating_mul(*rows) >= units.total(),
            Ordering::Greater => false,
        }
    }

    /// Remembers the start of a window, so that no search is needed.
    pub(crate) fn remember(&mut self, window: u64, place: Place) {
        self.places.insert(window, place);
        if self.places.len() > REMEMBERED {
            // Windows at the front are mostly finished.
            self.places.pop_first();
        }
    }

    /// Returns the start of a window.
    pub(crate) fn place(&mut self, window: u64) -> Result<Place> {
        let nearest = self.places.range(..=window).next_back();
        let windows = &self.windows;
        let (from, start) = match nearest {
            Some((window, place)) => (*window, *place),
            None => (0, windows.walk(Place::default(), 0)),
        };
        let place = if from == window {
            start
        } else {
            let rows = (window - from).saturating_mul(windows.rows);
            if rows.saturating_mul(LONG_WALK) > windows.units.total() || windows.table.get().is_some() {
                windows.search(window.saturating_mul(windows.rows).min(windows.units.total()))?
            } else {
                windows.walk(start, rows)
            }
        };
        self.remember(window, place);
        Ok(place)
    }

    /// Forgets the current position and frees the memory of the window.
    pub(crate) fn forget(&mut self) {
        self.drawn = None;
    }

    /// Returns the rows of an existing batch, and the units that are no longer needed.
    pub(crate) fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<(Content, Vec<u64>)> {
        let size = u64::from(self.windows.batch_size);
        let per_window = self.windows.rows / size;
        let (window, within) = (batch / per_window, batch % per_window);
        let mut released = Vec::new();
        let mut drawn = match self.drawn.take() {
            Some(drawn) if drawn.window == window => drawn,
            before => {
                let before = before.unwrap_or_default();
                let drawn = self.enter(window, before.rows, patience)?;
                released = before.units;
                // Keep a unit that is split between the two windows.
                let edges = [drawn.units.first().copied(), drawn.units.last().copied()];
                released.retain(|unit| !edges.contains(&Some(*unit)));
                drawn
            }
        };
        let from = (within * size) as usize;
        // A corrupt state with wrong positions may result in windows of other lengths. Its rows are wrong as well.
        let from = from.min(drawn.rows.len());
        let to = (from + size as usize).min(drawn.rows.len());
        self.draw(&mut drawn, to, patience)?;
        let mut rows = drawn.rows.get(from.min(to)..to)?;
        let picks = if drawn.units.len() <= rows.len() / 4 {
            // The batch has rows of nearly all units of the window, so they need no new indices.
            Picks {
                units: copied(&drawn.units)?,
                rows,
            }
        } else {
            let marks = &mut self.marks;
            let units = drawn.units.len();
            reserve(marks, units.saturating_sub(marks.len()))?;
            marks.resize(units.max(marks.len()), Mark::default());
            let mut numbers = self.numbering.batch(rows.len(), units, |mark| marks.fill(mark))?;
            for row in &mut rows {
                let index = row.unit as usize;
                row.unit = numbers.number(&mut marks[index], drawn.units[index]);
            }
            Picks {
                units: numbers.units(),
                rows,
            }
        };
        self.drawn = Some(drawn);
        Ok((Content::Picks(picks), released))
    }

    /// Lists the rows of a window. Reuses the memory of the previous window.
    fn enter(&mut self, window: u64, mut rows: PackedRows, patience: &mut Patience<'_>) -> Result<Drawn> {
        let place = self.place(window)?;
        let windows = &self.windows;
        let len = windows.len(window);
        // For each unit, the range of its rows that belong to the window.
        let (mut units, mut records) = (Vec::new(), Vec::new());
        let mut taken = 0;
        let (mut at, mut record) = (place.unit as usize, place.record);
        let (mut some, mut counts) = ([0; SOME], [0; SOME]);
        'fill: while at < windows.permutation.len() {
            let some = windows.permutation.some(at, &mut some);
            // Load all counts in one loop, because they are scattered over memory.
            for (count, &unit) in counts.iter_mut().zip(some) {
                *count = windows.units.rows(unit as usize);
            }
            reserve(&mut units, SOME)?;
            reserve(&mut records, SOME)?;
            for (&unit, &rows) in some.iter().zip(&counts) {
                let left = u32::try_from(len - taken).unwrap_or(u32::MAX);
                let stop = rows.min(record.saturating_add(left));
                if record < stop {
                    units.push(u64::from(unit));
                    records.push(record..stop);
                    taken += (stop - record) as usize;
                }
                if stop < rows {
                    record = stop;
                    break 'fill;
                }
                (at, record) = (at + 1, 0);
                if taken == len {
                    break 'fill;
                }
            }
        }
        let end = Place {
            unit: at as u64,
            record,
        };
        // Skip units without rows, so that each position has a unique representation.
        let next = windows.walk(end, 0);
        self.remember(window + 1, next);
        rows.fill(&records, taken, patience)?;
        Ok(Drawn {
            window,
            units,
            rows,
            done: 0,
        })
    }

    /// Brings the first `to` rows of a window into their final order by continuing its Fisher-Yates shuffle.
    fn draw(&self, drawn: &mut Drawn, to: usize, patience: &mut Patience<'_>) -> Result<()> {
        if drawn.done < to {
            let draws = Draws::new(self.windows.key, Purpose::Window, drawn.window);
            drawn.rows.shuffle(&draws, drawn.done, to, patience)?;
            drawn.done = to;
        }
        Ok(())
    }
}
