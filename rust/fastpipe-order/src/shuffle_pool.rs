//! Block and buffer order: rows pass through a buffer, and each draw removes a random row of the buffer.
//!
//! Rows are numbered in storage order. Before draw `i`, positions `0..i` contain the rows drawn so far, and the buffer
//! consists of the positions `i..end(i)`. The draw swaps position `i` with a uniformly chosen position of the buffer.
//! For a *buffer* of `n` rows, `end(i) = i + n`. This has the distribution of `tf.data.Dataset.shuffle(n)`: each draw
//! removes one of `n` rows, and the next row replaces it. For a *pool* of units, `end(i)` is rounded up to the end of
//! the unit that contains `i + n - 1`, so whole units enter. A draw then yields the next row of the chosen row's unit
//! instead of the chosen row. Units are thus drawn in proportion to their remaining rows, and each unit is read from
//! its first row to its last.
//!
//! # Why it needs no state
//!
//! Draw `k` is a pure function of `k`, so the content of a position before draw `i` can be traced backward. Draw `k`
//! moved the content of position `k` into the chosen position and changed nothing else that is still in the buffer. A
//! position can't be affected by any draw before the first one whose buffer includes it. Before that draw, the position
//! contains the row of the same index. Each backward pass over one buffer length of draws resolves more than a third of
//! the open positions. A seek therefore examines a few dozen buffer lengths of draws, anywhere in the epoch. See
//! [`ShufflePoolWalker::seek`].

use std::collections::HashMap;
use std::sync::Arc;

use fastpipe_random::{AT_ONCE, Draws, Key, Purpose, below};

use crate::failure::{Patience, PlanError, Result, STEPS_AT_ONCE, reserve, with_room};
use crate::plan::{Content, Mark, Numbering, Picks, Row};
use crate::units::Units;

/// The unit of entry into the buffer.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Grain {
    /// Single rows: the buffer order.
    Row,
    /// Whole units, whose rows leave in storage order: the block order.
    Unit,
}

/// The draws of an epoch.
#[derive(Debug)]
pub(crate) struct ShufflePool {
    units: Arc<Units>,
    grain: Grain,
    /// Number of rows in the buffer. A pool has at least this many.
    rows: u64,
    batch_size: u32,
    draws: Draws,
}

impl ShufflePool {
    /// Returns the draws of one shard.
    pub(crate) fn new(
        units: Arc<Units>,
        grain: Grain,
        key: Key,
        shard: u64,
        rows: u64,
        batch_size: u32,
    ) -> ShufflePool {
        ShufflePool {
            units,
            grain,
            rows: rows.max(1),
            batch_size,
            draws: Draws::new(key, Purpose::Buffer, shard),
        }
    }

    /// Returns the end of the buffer before draw `i`, which must exist.
    fn end(&self, i: u64) -> u64 {
        let end = i.saturating_add(self.rows).min(self.units.total());
        match self.grain {
            Grain::Row => end,
            Grain::Unit => self.units.first(self.units.find(end - 1).0 + 1),
        }
    }
}

/// A unit with rows in the buffer.
#[derive(Clone, Copy, Debug)]
struct Live {
    unit: u32,
    /// Index of the next row, if rows leave in storage order.
    next: u32,
    /// Number of rows that have not left. For the unit that is entering, this includes rows that have not entered.
    left: u32,
    /// Mark of the last batch that used the unit.
    mark: Mark,
}

/// A row in the buffer.
#[derive(Clone, Copy, Debug)]
struct Item {
    live: u32,
    record: u32,
}

/// Bytes per row of the buffer. Up to half of the listed rows have already left.
const ROW_BYTES: u64 = 2 * size_of::<Item>() as u64;

/// Bytes per unit with rows in the buffer. A growing list may have twice the required capacity.
const LIVE_BYTES: u64 = 2 * (size_of::<Live>() + size_of::<u32>() + size_of::<u64>()) as u64;

/// Approximate bytes per unit in the hash table of units: key, value and one control byte, doubled for spare capacity.
const FOUND_BYTES: usize = 2 * (size_of::<(usize, u32)>() + 1);

/// Returns the maximum number of rows in a buffer or pool of `rows` rows. Units enter a pool as a whole.
fn held(units: &Units, grain: Grain, rows: u64) -> u64 {
    match grain {
        Grain::Row => rows.min(units.total()),
        Grain::Unit => rows.saturating_add(units.largest().into()).min(units.total()),
    }
}

/// Returns the size of a table for all positions within reach of a draw, plus two. It is a power of two, so that the
/// low bits of a position are its index.
fn reach(held: u64) -> u64 {
    (held + 2).next_power_of_two()
}

/// Returns the bytes for the rows in a buffer or pool of `rows` rows.
pub(crate) fn list_bytes(units: &Units, grain: Grain, rows: u64) -> u64 {
    held(units, grain, rows).saturating_mul(ROW_BYTES)
}

/// Returns the bytes for the rows that enter with a batch.
pub(crate) fn entering_bytes(rows: u64) -> u64 {
    rows.saturating_mul(ROW_BYTES)
}

/// Returns the bytes for the units of the rows in the buffer.
pub(crate) fn unit_bytes(units: &Units, grain: Grain, rows: u64) -> u64 {
    (units.len() as u64)
        .min(held(units, grain, rows))
        .saturating_mul(LIVE_BYTES)
}

/// Returns the additional bytes for seeking to any batch of an epoch.
pub(crate) fn seek_bytes(units: &Units, grain: Grain, rows: u64) -> u64 {
    let held = held(units, grain, rows);
    let sought = reach(held).saturating_mul(4);
    let found = (units.len() as u64).min(held).saturating_mul(FOUND_BYTES as u64);
    sought.saturating_add(held.saturating_mul(8)).saturating_add(found)
}

/// Iterates over batches. Moving to the next batch is fastest.
#[derive(Debug)]
pub(crate) struct ShufflePoolWalker {
    sliding: Arc<ShufflePool>,
    /// Index of the next draw.
    at: u64,
    /// The buffer: positions `at..entered`, stored in `items` from `head` on.
    items: Vec<Item>,
    head: usize,
    entered: u64,
    /// End of the buffer at the last draw and, for the block order, the index of the unit that starts there.
    end: u64,
    behind: usize,
    live: Vec<Live>,
    free: Vec<u32>,
    /// Units whose last row was in the last batch.
    finished: Vec<u64>,
    /// The unit that is entering: its index in `live`, its index among all units, and its next row.
    entering: (u32, usize, u32),
    numbering: Numbering,
}

impl ShufflePoolWalker {
    pub(crate) fn new(sliding: Arc<ShufflePool>) -> Self {
        let mut walker = ShufflePoolWalker {
            sliding,
            at: 0,
            items: Vec::new(),
            head: 0,
            entered: 0,
            end: 0,
            behind: 0,
            live: Vec::new(),
            free: Vec::new(),
            finished: Vec::new(),
            entering: (0, 0, 0),
            numbering: Numbering::default(),
        };
        walker.restart(0);
        walker
    }

    fn restart(&mut self, row: u64) {
        self.items.clear();
        self.live.clear();
        self.free.clear();
        (self.head, self.at, self.entered) = (0, row, row);
        (self.end, self.behind) = (0, 0);
        let (unit, record) = self.sliding.units.find(row);
        self.entering = (u32::MAX, unit, record);
    }

    /// Forgets the current position and frees the memory of the buffer.
    pub(crate) fn forget(&mut self) {
        *self = ShufflePoolWalker::new(self.sliding.clone());
    }

    /// Returns the rows of an existing batch, and the units that are no longer needed.
    pub(crate) fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<(Content, Vec<u64>)> {
        let size = u64::from(self.sliding.batch_size);
        let mut released = std::mem::take(&mut self.finished);
        if batch.saturating_mul(size) != self.at {
            released.extend(self.live.iter().filter(|l| l.left > 0).map(|l| u64::from(l.unit)));
            self.seek(batch.saturating_mul(size).min(self.sliding.units.total()), patience)?;
        }
        let picks = self.draw(self.sliding.units.total().min(self.at + size), patience)?;
        Ok((Content::Picks(picks), released))
    }

    fn admit(&mut self, unit: usize, next: u32, left: u32) -> Result<u32> {
        let live = Live {
            // There are at most 2^32 units.
            unit: unit as u32,
            next,
            left,
            mark: Mark::default(),
        };
        if let Some(free) = self.free.pop() {
            self.live[free as usize] = live;
            return Ok(free);
        }
        reserve(&mut self.live, 1)?;
        self.live.push(live);
        Ok((self.live.len() - 1) as u32)
    }

    /// Adds rows to the buffer up to position `end`.
    fn feed(&mut self, end: u64, patience: &mut Patience<'_>) -> Result<()> {
        // One allocation of the required size. Later it grows by at most a batch at a time.
        reserve(&mut self.items, (end - self.entered.min(end)) as usize)?;
        let mut since = 0;
        while self.entered < end {
            let (mut live, unit, record) = self.entering;
            let rows = self.sliding.units.rows(unit);
            if record >= rows {
                self.entering = (u32::MAX, unit + 1, 0);
                continue;
            }
            if live == u32::MAX {
                live = self.admit(unit, record, rows - record)?;
            }
            let most = u64::from(rows - record).min(STEPS_AT_ONCE as u64);
            let stop = record + (end - self.entered).min(most) as u32;
            self.items.extend((record..stop).map(|record| Item { live, record }));
            self.entered += u64::from(stop - record);
            self.entering = (live, unit, stop);
            since += (stop - record) as usize;
            if since >= STEPS_AT_ONCE {
                since = 0;
                patience.look()?;
            }
        }
        Ok(())
    }

    /// Runs the draws up to `to`.
    fn draw(&mut self, to: u64, patience: &mut Patience<'_>) -> Result<Picks> {
        let from = self.at;
        if from >= to {
            return Ok(Picks::default());
        }
        let sliding = self.sliding.clone();
        let total = sliding.units.total();
        self.feed(sliding.end(to - 1), patience)?;
        // Two separate loops, first to move rows and then to look up their units, so that their cache misses don't add
        // up.
        let drawn = (to - from) as usize;
        let picks = match sliding.grain {
            Grain::Row => {
                let (items, rows) = (&mut self.items[self.head..], sliding.rows);
                patience.stretches(from, to, |at, to| {
                    let items = &mut items[(at - from) as usize..];
                    sliding
                        .draws
                        .swap(at, (to - at) as usize, items, |i| rows.min(total - i));
                    Ok(())
                })?;
                self.take(drawn, |_, item| item.record)?
            }
            Grain::Unit => {
                let items = &mut self.items[self.head..];
                let (mut end, mut behind) = (self.end, self.behind);
                patience.stretches(from, to, |at, to| {
                    let items = &mut items[(at - from) as usize..];
                    sliding.draws.swap(at, (to - at) as usize, items, |i| {
                        // The end stays the same until the unit there doesn't suffice.
                        let least = i.saturating_add(sliding.rows).min(total);
                        while end < least {
                            end += u64::from(sliding.units.rows(behind));
                            behind += 1;
                        }
                        end - i
                    });
                    Ok(())
                })?;
                (self.end, self.behind) = (end, behind);
                self.take(drawn, |live, _| {
                    live.next += 1;
                    live.next - 1
                })?
            }
        };
        (self.at, self.head) = (to, self.head + drawn);
        // At most half of the memory is used by rows that have left, so each row is moved once on average.
        if self.head > self.items.len() / 2 {
            self.items.drain(..self.head);
            self.head = 0;
        }
        Ok(picks)
    }

    /// Converts the first `drawn` rows of the buffer to picks. `record` returns a row's index within its unit.
    #[inline(always)]
    fn take(&mut self, drawn: usize, record: impl Fn(&mut Live, &Item) -> u32) -> Result<Picks> {
        let mut numbers = self.numbering.batch(drawn, self.live.len(), |numbering| {
            self.live.iter_mut().for_each(|live| live.mark = numbering);
        })?;
        let items = &self.items[self.head..self.head + drawn];
        let all = &mut self.live[..];
        let mut rows = with_room(drawn)?;
        rows.extend(items.iter().map(|item| {
            let live = &mut all[item.live as usize];
            live.left -= 1;
            Row {
                unit: numbers.number(&mut live.mark, u64::from(item.live)),
                record: record(live, item),
            }
        }));
        let mut units = numbers.units();
        reserve(&mut self.finished, units.len())?;
        reserve(&mut self.free, units.len())?;
        for unit in &mut units {
            let index = *unit as usize;
            *unit = u64::from(all[index].unit);
            if all[index].left == 0 {
                // This batch still reads the unit, so it is released with the next batch.
                self.finished.push(*unit);
                self.free.push(index as u32);
            }
        }
        Ok(Picks { units, rows })
    }

    /// Moves the walker before draw `i`, from any position. Traces every row of the buffer back to its origin.
    fn seek(&mut self, i: u64, patience: &mut Patience<'_>) -> Result<()> {
        self.restart(i);
        if i == 0 {
            return Ok(());
        }
        let sliding = self.sliding.clone();
        let units = &*sliding.units;
        // End of the positions that the draws so far could reach.
        let stop = sliding.end(i - 1);
        let mut found: HashMap<usize, u32> = HashMap::new();
        let origins = sliding.origins(i, stop, patience)?;
        reserve(&mut self.items, origins.len())?;
        for (n, row) in (1..).zip(origins) {
            let (unit, record) = units.find(row);
            let live = match found.get(&unit) {
                Some(&live) => live,
                None => {
                    let live = self.admit(unit, units.rows(unit), 0)?;
                    remember(&mut found, unit, live)?;
                    live
                }
            };
            let entry = &mut self.live[live as usize];
            // In block order, all rows of a unit that have not left are in the buffer.
            (entry.left, entry.next) = (entry.left + 1, entry.next - 1);
            self.items.push(Item { live, record });
            if n % STEPS_AT_ONCE == 0 {
                patience.look()?;
            }
        }
        let (unit, record) = units.find(stop);
        let live = found.get(&unit).copied().unwrap_or(u32::MAX);
        if let Some(entry) = self.live.get_mut(live as usize) {
            entry.left += units.rows(unit) - record;
        }
        (self.entered, self.entering) = (stop, (live, unit, record));
        (self.end, self.behind) = (stop, unit);
        Ok(())
    }
}

/// Records the index in `live` of a unit.
fn remember(found: &mut HashMap<usize, u32>, unit: usize, live: u32) -> Result<()> {
    found.try_reserve(1).map_err(|_| PlanError::OutOfMemory {
        bytes: 2 * found.len() * FOUND_BYTES,
    })?;
    found.insert(unit, live);
    Ok(())
}

impl ShufflePool {
    /// Returns the rows at positions `i..stop` before draw `i`.
    fn origins(&self, i: u64, stop: u64, patience: &mut Patience<'_>) -> Result<Vec<u64>> {
        let mask = reach(held(&self.units, self.grain, self.rows)) as usize - 1;
        // For each position in reach, by its low bits: one plus the index of the buffer row whose origin is currently
        // traced to that position, or 0.
        let mut sought = patience.filled(0u32, mask + 1)?;
        let mut origins = patience.filled(0, (stop - i) as usize)?;
        patience.stretches(i, stop, |from, to| {
            for position in from..to {
                sought[position as usize & mask] = (position - i) as u32 + 1;
            }
            Ok(())
        })?;
        let (mut left, mut reached) = (origins.len(), stop);
        let mut ends = Ends::new(self, i - 1);
        let mut first = i.next_multiple_of(AT_ONCE);
        'draws: while first > 0 {
            first -= AT_ONCE;
            if first.is_multiple_of(STEPS_AT_ONCE as u64) {
                patience.look()?;
            }
            let words = self.draws.words(first);
            for k in (first..i.min(first + AT_ONCE)).rev() {
                let end = ends.of(k);
                while reached > end {
                    reached -= 1;
                    let n = std::mem::take(&mut sought[reached as usize & mask]);
                    if n > 0 {
                        origins[n as usize - 1] = reached;
                        left -= 1;
                    }
                }
                if left == 0 {
                    break 'draws;
                }
                let met = k + below(words[(k - first) as usize], end - k);
                sought[k as usize & mask] = std::mem::take(&mut sought[met as usize & mask]);
            }
        }
        patience.stretches(0, reached, |from, to| {
            for position in from..if left > 0 { to } else { from } {
                let n = std::mem::take(&mut sought[position as usize & mask]);
                if n > 0 {
                    origins[n as usize - 1] = position;
                    left -= 1;
                }
            }
            Ok(())
        })?;
        Ok(origins)
    }
}

/// Returns the ends of the buffer before draws, which must be requested in descending order.
struct Ends<'a> {
    sliding: &'a ShufflePool,
    /// A unit and its first row.
    unit: usize,
    start: u64,
}

impl Ends<'_> {
    fn new(sliding: &ShufflePool, k: u64) -> Ends<'_> {
        let (unit, _) = sliding
            .units
            .find(k.saturating_add(sliding.rows).min(sliding.units.total()) - 1);
        Ends {
            sliding,
            unit,
            start: sliding.units.first(unit),
        }
    }

    #[inline(always)]
    fn of(&mut self, k: u64) -> u64 {
        let units = &self.sliding.units;
        let end = (k + self.sliding.rows).min(units.total());
        if self.sliding.grain == Grain::Row {
            return end;
        }
        while end <= self.start {
            self.unit -= 1;
            self.start -= u64::from(units.rows(self.unit));
        }
        self.start + u64::from(units.rows(self.unit))
    }
}
