//! The costs of items and batches, and the decision that follows from them: either one item worker produces and joins a
//! whole batch, or item workers write rows for batch workers to join.
//!
//! Writing rows for another worker costs a copy of each row, so one item worker produces and joins each cheap batch.
//! But if joining takes long, item workers would do all of it while batch workers idle. Then the batch is split.

use std::sync::atomic::{AtomicU64, Ordering};

use crate::clock::{busy_nanos, nanos};
use crate::control::Joining;
use crate::control_block::ControlBlock;
use crate::record::Activity;

/// The maximum time in nanoseconds for rows that are claimed at once. A claim costs less than a thousandth of this.
const CLAIM_NANOS: u64 = 200_000;

/// Batches that take less than this, in nanoseconds, aren't divided. If one worker produces all rows and joins them,
/// that takes less than writing the rows for another worker. If item workers run one at a time, it takes less than
/// waiting for a turn.
const WHOLE_NANOS: u64 = 2_000_000;

/// Nanoseconds that an item takes before other workers steal the rows that its worker has claimed after it. However
/// short its item is, a thread may wait for half of this time until it gets Python's lock.
pub(crate) const LONG_NANOS: u64 = 10_000_000;

/// The speedup that a split must give, in quarters. It is above 1 because estimates are rough.
const GAIN: u64 = 5;

/// The inputs of the decision: times in nanoseconds and numbers of workers.
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
    /// Whether batches are faster if item workers write rows and batch workers join them, compared with item workers
    /// doing both.
    ///
    /// In both cases the processors must do all the work, and each group of workers its own part.
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

/// The start of joining a batch.
#[derive(Clone, Copy, Debug)]
pub struct JoinTimer {
    begun: u64,
    busy: u64,
}

impl JoinTimer {
    /// Starts the timer now.
    pub fn start() -> Self {
        JoinTimer {
            begun: nanos(),
            busy: busy_nanos(),
        }
    }
}

impl ControlBlock {
    /// Returns how many of `rows` rows a worker claims at once: fewer towards the end of a batch, and only one if items
    /// take long. The flag says whether the worker also joins the batch if the claim contains all of its rows.
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

    /// Whether item workers run one at a time.
    pub(crate) fn take_turns(&self) -> bool {
        self.header().turns.load(Ordering::Relaxed) != 0
    }

    /// Whether batch workers should join batches of `rows` items that take `item` nanoseconds each.
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

    /// Records the average time of a claim's items, which determines how many rows are claimed at once.
    pub fn note_pace(&self, nanos: u64) {
        average(&self.header().work.costs.item, nanos);
    }

    /// Records that a worker has written `rows` rows in `nanos` nanoseconds.
    pub fn note_placing(&self, item_worker: usize, nanos: u64, rows: u64) {
        self.record(item_worker).placed(nanos);
        if let Some(each) = nanos.checked_div(rows) {
            average(&self.header().work.costs.placing, each);
        }
    }

    /// Records that a worker begins to join a batch whose items it has all produced.
    pub fn begin_joining(&self, worker: usize) -> JoinTimer {
        let timer = JoinTimer::start();
        self.record(worker).turn_to(Activity::Joining, timer.begun);
        timer
    }

    /// Records that a worker has joined a batch.
    pub fn note_joining(&self, worker: usize, timer: &JoinTimer) {
        let taken = nanos().saturating_sub(timer.begun);
        self.record(worker).joined(taken);
        let costs = &self.header().work.costs;
        average(&costs.joining, taken);
        average(&costs.joining_busy, busy_nanos().saturating_sub(timer.busy));
    }
}

/// Updates a running average. If several workers write at once, only one of the values counts.
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
    fn batch_workers_collate_if_item_workers_would_be_slower() {
        // The numbers of item workers and batch workers are equal, so a split gains nothing.
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
    fn busy_processors_gain_nothing() {
        let many = Costs {
            batch_workers: 6,
            processors: 2,
            ..CHEAP
        };
        assert!(!many.split_is_faster());
        // If joining mostly waits, the processors are not busy.
        let waits = Costs {
            joining_busy: MILLI,
            ..many
        };
        assert!(waits.split_is_faster());
    }

    #[test]
    fn rows_that_are_expensive_to_copy_stay_in_place() {
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
