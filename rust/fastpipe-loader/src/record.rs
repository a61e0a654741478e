//! The status of each worker: its current activity and how it has spent its time.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::clock::nanos;

/// Number of slowest items that are recorded for each worker.
const SLOWEST: usize = 4;

/// The activity of a worker.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Activity {
    /// The worker hasn't started.
    Starting = 0,
    /// The worker waits for work.
    Waiting = 1,
    /// The worker produces an item.
    Making = 2,
    /// The worker joins the items of a batch.
    Joining = 3,
    /// The worker has ended.
    Ended = 4,
}

impl Activity {
    fn of(number: u32) -> Activity {
        match number {
            1 => Activity::Waiting,
            2 => Activity::Making,
            3 => Activity::Joining,
            4 => Activity::Ended,
            _ => Activity::Starting,
        }
    }
}

/// A worker's record. Only this worker writes it, except for `stealable`.
#[repr(C, align(128))]
pub(crate) struct Record {
    /// The rows that it has claimed and not begun, see `work_stealing.rs`. Idle workers steal some of them.
    pub(crate) stealable: AtomicU64,
    /// The slot of the batch that contains these rows.
    pub(crate) held_slot: AtomicU64,
    activity: AtomicU32,
    row: AtomicU32,
    batch: AtomicU64,
    index: AtomicI64,
    since: AtomicU64,
    items: AtomicU64,
    making: AtomicU64,
    placing: AtomicU64,
    joining: AtomicU64,
    waiting: AtomicU64,
    slowest: [Slow; SLOWEST],
}

#[repr(C)]
struct Slow {
    nanos: AtomicU64,
    batch: AtomicU64,
    index: AtomicI64,
    row: AtomicU32,
}

/// An item and the time it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowItem {
    /// Nanoseconds that the item took.
    pub nanos: u64,
    /// The index of the batch that contains it.
    pub batch: u64,
    /// Its row in the batch.
    pub row: u32,
    /// Its index in the dataset, if it is an integer.
    pub index: i64,
}

/// A snapshot of a worker's status.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerView {
    /// The current activity.
    pub activity: Activity,
    /// The batch that it is working on.
    pub batch: u64,
    /// The row that it produces.
    pub row: u32,
    /// The index of the item that it produces, if it is an integer.
    pub index: i64,
    /// Nanoseconds since the current activity began.
    pub for_nanos: u64,
    /// Number of items produced.
    pub items: u64,
    /// Nanoseconds spent producing items.
    pub making: u64,
    /// Nanoseconds spent writing items to their rows.
    pub placing: u64,
    /// Nanoseconds spent joining batches.
    pub joining: u64,
    /// Nanoseconds spent waiting.
    pub waiting: u64,
    /// Its slowest items.
    pub slowest: Vec<SlowItem>,
}

/// The value that represents an index that isn't an integer.
pub(crate) const NO_INDEX: i64 = i64::MIN;

impl Record {
    pub(crate) fn has_begun(&self) -> bool {
        self.activity.load(Ordering::Relaxed) != Activity::Starting as u32
    }

    pub(crate) fn makes(&self) -> bool {
        self.activity.load(Ordering::Relaxed) == Activity::Making as u32
    }

    /// Nanoseconds for which it has been producing the current item; 0 if it isn't producing one.
    pub(crate) fn makes_for(&self) -> u64 {
        match self.makes() {
            true => nanos().saturating_sub(self.since.load(Ordering::Relaxed)),
            false => 0,
        }
    }

    /// The batch that it is working on.
    pub(crate) fn batch(&self) -> u64 {
        self.batch.load(Ordering::Relaxed)
    }

    /// Records that another activity begins.
    pub(crate) fn turn_to(&self, activity: Activity, now: u64) {
        self.since.store(now, Ordering::Relaxed);
        self.activity.store(activity as u32, Ordering::Relaxed);
    }

    /// Records that the worker begins to produce an item.
    #[inline]
    pub(crate) fn make(&self, batch: u64, row: u32, index: i64, now: u64) {
        self.batch.store(batch, Ordering::Relaxed);
        self.row.store(row, Ordering::Relaxed);
        self.index.store(index, Ordering::Relaxed);
        self.turn_to(Activity::Making, now);
    }

    /// Records that an item was produced in `taken` nanoseconds.
    #[inline]
    pub(crate) fn made(&self, taken: u64) {
        add(&self.items, 1);
        add(&self.making, taken);
        if taken > self.slowest[SLOWEST - 1].nanos.load(Ordering::Relaxed) {
            self.note_slow(taken);
        }
    }

    #[cold]
    fn note_slow(&self, taken: u64) {
        let mut at = SLOWEST - 1;
        while at > 0 && self.slowest[at - 1].nanos.load(Ordering::Relaxed) < taken {
            let (from, to) = (&self.slowest[at - 1], &self.slowest[at]);
            to.nanos.store(from.nanos.load(Ordering::Relaxed), Ordering::Relaxed);
            to.batch.store(from.batch.load(Ordering::Relaxed), Ordering::Relaxed);
            to.index.store(from.index.load(Ordering::Relaxed), Ordering::Relaxed);
            to.row.store(from.row.load(Ordering::Relaxed), Ordering::Relaxed);
            at -= 1;
        }
        let slow = &self.slowest[at];
        slow.nanos.store(taken, Ordering::Relaxed);
        slow.batch.store(self.batch.load(Ordering::Relaxed), Ordering::Relaxed);
        slow.index.store(self.index.load(Ordering::Relaxed), Ordering::Relaxed);
        slow.row.store(self.row.load(Ordering::Relaxed), Ordering::Relaxed);
    }

    pub(crate) fn placed(&self, taken: u64) {
        add(&self.placing, taken);
    }

    pub(crate) fn joined(&self, taken: u64) {
        add(&self.joining, taken);
    }

    pub(crate) fn waited(&self, taken: u64) {
        add(&self.waiting, taken);
    }

    /// Returns a snapshot of the record.
    pub(crate) fn view(&self) -> WorkerView {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        let slow = |slow: &Slow| SlowItem {
            nanos: get(&slow.nanos),
            batch: get(&slow.batch),
            row: slow.row.load(Ordering::Relaxed),
            index: slow.index.load(Ordering::Relaxed),
        };
        WorkerView {
            activity: Activity::of(self.activity.load(Ordering::Relaxed)),
            batch: get(&self.batch),
            row: self.row.load(Ordering::Relaxed),
            index: self.index.load(Ordering::Relaxed),
            for_nanos: nanos().saturating_sub(get(&self.since)),
            items: get(&self.items),
            making: get(&self.making),
            placing: get(&self.placing),
            joining: get(&self.joining),
            waiting: get(&self.waiting),
            slowest: self.slowest.iter().map(slow).filter(|slow| slow.nanos > 0).collect(),
        }
    }
}

/// Adds to a number that only this worker writes.
#[inline]
fn add(number: &AtomicU64, more: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
