//! How long items and batches take, and what follows: whether one item worker makes and joins a whole batch, or item
//! workers write rows that batch workers read.
//!
//! Writing rows for somebody else costs a copy of each. So cheap batches are made and joined by one item worker. But
//! where joining takes long, item workers alone would do it while batch workers idle; then the batch is split.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{busy_nanos, nanos};
use crate::control::Joining;
use crate::control_block::ControlBlock;
use crate::record::Activity;

/// Nanoseconds that rows claimed at once may take together. A claim costs less than a thousandth of it.
const CLAIM_NANOS: u64 = 200_000;

/// Nanoseconds in which one worker makes all rows of a batch that is to be joined, and joins it: that takes less than
/// to write them for somebody else. And in which one that others wait for makes them: that takes less than to wait.
const WHOLE_NANOS: u64 = 2_000_000;

/// Nanoseconds that an item takes before others make those that its item worker has claimed behind it. Threads may be
/// without Python's lock for half as long, whatever their item takes.
pub(crate) const LONG_NANOS: u64 = 10_000_000;

/// How many times as fast batches must be when they are split, in quarters: estimates are rough.
const GAIN: u64 = 5;

/// What a decision depends on: nanoseconds, and numbers of workers.
#[derive(Clone, Copy, Debug)]
struct Costs {
    rows: u64,
    item: u64,
    placing: u64,
    joining: u64,
    joining_busy: u64,
    item_workers: u64,
    batch_workers: u64,
    processors: u64,
}

impl Costs {
    /// Whether batches are made faster if item workers write rows, and batch workers join them, than if item workers do
    /// both.
    ///
    /// Either way the processors must do all the work, and each group of workers its part.
    fn split_is_faster(&self) -> bool {
        let items = self.rows.saturating_mul(self.item);
        let copies = self.rows.saturating_mul(self.placing);
        let whole = items
            .saturating_add(self.joining)
            .div_ceil(self.item_workers)
            .max(items.saturating_add(self.joining_busy).div_ceil(self.processors));
        let split = items
            .saturating_add(copies)
            .div_ceil(self.item_workers)
            .max(self.joining.div_ceil(self.batch_workers))
            .max(
                items
                    .saturating_add(copies)
                    .saturating_add(self.joining_busy)
                    .div_ceil(self.processors),
            );
        split.saturating_mul(GAIN) < whole.saturating_mul(4)
    }
}

/// Since when a worker joins a batch.
#[derive(Clone, Copy, Debug)]
pub struct JoinTimer {
    begun: u64,
    busy: u64,
}

impl JoinTimer {
    /// Starts now.
    pub fn start() -> Self {
        JoinTimer {
            begun: nanos(),
            busy: busy_nanos(),
        }
    }
}

impl ControlBlock {
    /// How many of so many rows a worker claims at once: fewer towards the end of a batch, and only one where items
    /// take long. Whether it makes the batch of them, too, if they are all.
    pub(crate) fn at_once(&self, rows: u32) -> (u32, bool) {
        if self.header().whole.load(Ordering::Relaxed) != 0 {
            return (rows, true);
        }
        let each = self.header().work.costs.item.load(Ordering::Relaxed);
        let is_cheap = each > 0 && each.saturating_mul(rows.into()) <= WHOLE_NANOS;
        if is_cheap {
            match self.joining() {
                Joining::InPlace if self.take_turns() => return (rows, false),
                Joining::InPlace => {}
                Joining::ByMakers | Joining::ByJoiners => {
                    if !self.splits(each, rows.into()) {
                        return (rows, true);
                    }
                }
            }
        }
        let by_time = match each {
            0 => 1,
            each => u32::try_from(CLAIM_NANOS / each).unwrap_or(u32::MAX),
        };
        (
            by_time.clamp(1, rows.div_ceil(self.item_workers().max(1) as u32)),
            false,
        )
    }

    /// Whether item workers take turns.
    pub(crate) fn take_turns(&self) -> bool {
        self.header().turns.load(Ordering::Relaxed) != 0
    }

    /// Whether batch workers shall join batches of so many cheap items.
    fn splits(&self, item: u64, rows: u64) -> bool {
        let costs = &self.header().work.costs;
        let joining = costs.joining.load(Ordering::Relaxed);
        if self.batch_workers() == 0 || rows.saturating_mul(item).saturating_add(joining) <= WHOLE_NANOS {
            return false;
        }
        let costs = Costs {
            rows,
            item,
            placing: costs.placing.load(Ordering::Relaxed),
            joining,
            joining_busy: costs.joining_busy.load(Ordering::Relaxed).min(joining),
            item_workers: self.item_workers().max(1) as u64,
            batch_workers: self.batch_workers() as u64,
            processors: u64::from(self.header().processors.load(Ordering::Relaxed)).max(1),
        };
        costs.split_is_faster()
    }

    /// Notes how long the items of a claim took each, which says how many are claimed at once.
    pub fn note_pace(&self, nanos: u64) {
        average(&self.header().work.costs.item, nanos);
    }

    /// A worker has written so many rows, in this time.
    pub fn note_placing(&self, item_worker: usize, nanos: u64, rows: u64) {
        self.record(item_worker).placed(nanos);
        if let Some(each) = nanos.checked_div(rows) {
            average(&self.header().work.costs.placing, each);
        }
    }

    /// A worker that has made all items of a batch begins to join them.
    pub fn begin_joining(&self, worker: usize) -> JoinTimer {
        let timer = JoinTimer::start();
        self.record(worker).turn_to(Activity::Joining, timer.begun);
        timer
    }

    /// A worker has joined a batch.
    pub fn note_joining(&self, worker: usize, timer: &JoinTimer) {
        let taken = nanos().saturating_sub(timer.begun);
        self.record(worker).joined(taken);
        let costs = &self.header().work.costs;
        average(&costs.joining, taken);
        average(&costs.joining_busy, busy_nanos().saturating_sub(timer.busy));
    }
}

/// Several may write at once: then one of them counts.
fn average(number: &AtomicU64, nanos: u64) {
    let before = number.load(Ordering::Relaxed);
    let now = if before == 0 {
        nanos
    } else {
        before - before / 4 + nanos / 4
    };
    number.store(now.max(1), Ordering::Relaxed);
}

#[cfg(test)]
mod tests {
    use super::*;

    const MICRO: u64 = 1_000;
    const MILLI: u64 = 1_000_000;

    const CHEAP: Costs = Costs {
        rows: 32,
        item: MICRO,
        placing: MICRO,
        joining: 20 * MILLI,
        joining_busy: 20 * MILLI,
        item_workers: 2,
        batch_workers: 2,
        processors: 16,
    };

    #[test]
    fn joiners_join_what_makers_would_be_slower_at() {
        // As many item workers as batch workers: nothing is gained.
        assert!(!CHEAP.split_is_faster());
        let many = Costs {
            batch_workers: 6,
            ..CHEAP
        };
        assert!(many.split_is_faster());
        let few = Costs {
            item_workers: 1,
            ..CHEAP
        };
        assert!(few.split_is_faster());
    }

    #[test]
    fn processors_that_are_busy_gain_nothing() {
        let many = Costs {
            batch_workers: 6,
            processors: 2,
            ..CHEAP
        };
        assert!(!many.split_is_faster());
        // While joining waits for something else, they aren't.
        let waits = Costs {
            joining_busy: MILLI,
            ..many
        };
        assert!(waits.split_is_faster());
    }

    #[test]
    fn rows_that_are_dear_to_copy_stay_where_they_are() {
        let large = Costs {
            batch_workers: 6,
            placing: MILLI,
            ..CHEAP
        };
        assert!(!large.split_is_faster());
    }

    #[test]
    fn no_number_overflows() {
        let huge = Costs {
            rows: u64::from(u32::MAX),
            item: u64::MAX / 8,
            placing: u64::MAX,
            joining: u64::MAX / 2,
            joining_busy: u64::MAX / 2,
            item_workers: 1,
            batch_workers: 1,
            processors: 1,
        };
        assert!(!huge.split_is_faster());
    }
}
