//! What each worker says of itself: what it does just now, and how it has spent its time.

use std::sync::atomic::{AtomicI64, AtomicU32, AtomicU64, Ordering};

use crate::clock::nanos;

/// Items that a worker remembers as its slowest.
const SLOWEST: usize = 4;

/// What a worker does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Activity {
    /// It hasn't begun.
    Starting = 0,
    /// It waits for something to do.
    Waiting = 1,
    /// It makes an item.
    Making = 2,
    /// It makes a batch of items.
    Joining = 3,
    /// It has ended.
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

/// A worker's record. It alone writes it, but for `held`.
#[repr(C, align(128))]
pub(crate) struct Record {
    /// The rows that it has claimed and not begun, see `held.rs`; idle ones take some of them.
    pub(crate) stealable: AtomicU64,
    /// The slot of their batch.
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

/// An item, and how long it took.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlowItem {
    /// Nanoseconds.
    pub nanos: u64,
    /// The number of its batch.
    pub batch: u64,
    /// Its row there.
    pub row: u32,
    /// Its index in the data set, if that is a number.
    pub index: i64,
}

/// What a worker says of itself.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WorkerView {
    /// What it does.
    pub activity: Activity,
    /// The batch that it is at.
    pub batch: u64,
    /// The row that it makes.
    pub row: u32,
    /// The index of the item that it makes, if that is a number.
    pub index: i64,
    /// For how many nanoseconds it has done that.
    pub for_nanos: u64,
    /// Items that it has made.
    pub items: u64,
    /// Nanoseconds that it made items.
    pub making: u64,
    /// Nanoseconds that it wrote them.
    pub placing: u64,
    /// Nanoseconds that it made batches of items.
    pub joining: u64,
    /// Nanoseconds that it waited.
    pub waiting: u64,
    /// Its slowest items.
    pub slowest: Vec<SlowItem>,
}

/// Stands for an index that is no number.
pub(crate) const NO_INDEX: i64 = i64::MIN;

impl Record {
    pub(crate) fn has_begun(&self) -> bool {
        self.activity.load(Ordering::Relaxed) != Activity::Starting as u32
    }

    pub(crate) fn makes(&self) -> bool {
        self.activity.load(Ordering::Relaxed) == Activity::Making as u32
    }

    /// For how many nanoseconds it has made its item; 0 if it makes none.
    pub(crate) fn makes_for(&self) -> u64 {
        match self.makes() {
            true => nanos().saturating_sub(self.since.load(Ordering::Relaxed)),
            false => 0,
        }
    }

    /// The batch that it is at.
    pub(crate) fn batch(&self) -> u64 {
        self.batch.load(Ordering::Relaxed)
    }

    /// It begins to do something else.
    pub(crate) fn turn_to(&self, activity: Activity, now: u64) {
        self.since.store(now, Ordering::Relaxed);
        self.activity.store(activity as u32, Ordering::Relaxed);
    }

    /// It begins to make an item.
    #[inline]
    pub(crate) fn make(&self, batch: u64, row: u32, index: i64, now: u64) {
        self.batch.store(batch, Ordering::Relaxed);
        self.row.store(row, Ordering::Relaxed);
        self.index.store(index, Ordering::Relaxed);
        self.turn_to(Activity::Making, now);
    }

    /// It has made an item, in this time.
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

    /// What it says.
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

/// Nobody else writes it.
#[inline]
fn add(number: &AtomicU64, more: u64) {
    number.store(number.load(Ordering::Relaxed).wrapping_add(more), Ordering::Relaxed);
}
