//! What lies at the start of the memory: numbers that all processes read and write.
//!
//! Everything is an atomic number, for which any bits are valid; memory begins as zeros.
#![allow(unsafe_code)]

use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use crate::record::Record;

/// Layouts of items that a loader may have; see `layouts.rs`.
pub(crate) const LAYOUTS: usize = 24;

/// What concerns all batches.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) item_workers: AtomicU32,
    pub(crate) batch_workers: AtomicU32,
    pub(crate) slots: AtomicU32,
    /// Of [`Joining`].
    pub(crate) joining: AtomicU32,
    /// 1 if all rows of a batch are claimed at once.
    pub(crate) whole: AtomicU32,
    /// 1 if item workers take turns.
    pub(crate) turns: AtomicU32,
    /// That the program may use.
    pub(crate) processors: AtomicU32,
    /// 1 once workers shall end.
    pub(crate) stop: AtomicU32,
    /// The number of the layout that batches begin with; 0 while there is none.
    pub(crate) layout: AtomicU32,
    /// Layouts that are told of.
    pub(crate) layouts: AtomicU32,
    /// Whose turn it is to tell of a layout: an item worker's number and 1; 0 for nobody's.
    pub(crate) telling: AtomicU32,
    pub(crate) told: [Told; LAYOUTS],
    /// Workers that couldn't begin, and where what the first of them says lies.
    pub(crate) refusals: AtomicU32,
    pub(crate) refusal: Told,
    /// Bytes behind the rows of a slab that a row takes, on average; of batches that are made in one piece, bytes of a
    /// batch.
    pub(crate) tail: AtomicU64,
    pub(crate) work: Work,
    pub(crate) joins: Joins,
    pub(crate) news: News,
}

/// Who makes a batch of items that lie in their slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Joining {
    /// Nobody: the items side by side are the batch. Batches with odd rows are joined by the item worker of the last
    /// row.
    InPlace = 0,
    /// The item worker of the last row.
    ByMakers = 1,
    /// A batch worker.
    ByJoiners = 2,
}

/// Where a layout is described, or something else is said.
#[repr(C)]
pub(crate) struct Told {
    pub(crate) offset: AtomicU64,
    pub(crate) len: AtomicU64,
}

/// What item workers look at.
#[repr(C, align(128))]
pub(crate) struct Work {
    /// Changes when there are rows to be made.
    pub(crate) changed: AtomicU32,
    /// Item workers that wait for it.
    pub(crate) waiting: AtomicU32,
    /// 1 while one of them looks at times whether an item takes another item worker long that has claimed more.
    pub(crate) watched: AtomicU32,
    /// The earliest batch that may have rows to be claimed.
    pub(crate) first: AtomicU64,
    /// Behind the last batch that was begun.
    pub(crate) begun: AtomicU64,
    pub(crate) costs: WorkerCosts,
}

/// How long things take on average, in nanoseconds; 0 while nothing is known.
#[repr(C)]
pub(crate) struct WorkerCosts {
    /// Of an item.
    pub(crate) item: AtomicU64,
    /// Of writing an item to its row.
    pub(crate) placing: AtomicU64,
    /// Of joining a batch.
    pub(crate) joining: AtomicU64,
    /// Of the processor's time in it.
    pub(crate) joining_busy: AtomicU64,
}

/// What batch workers look at.
#[repr(C, align(128))]
pub(crate) struct Joins {
    /// Changes when there is a batch to be joined.
    pub(crate) changed: AtomicU32,
    pub(crate) waiting: AtomicU32,
}

/// What the consumer looks at.
#[repr(C, align(128))]
pub(crate) struct News {
    /// Changes when a batch is ready.
    pub(crate) changed: AtomicU32,
    /// The batch that the consumer waits for, and 1; 0 for none, `u64::MAX` for any.
    pub(crate) awaited: AtomicU64,
}

/// A batch on its way.
#[repr(C, align(128))]
pub(crate) struct Slot {
    /// The slot's turn, in the upper half, and the next row that nobody has claimed.
    pub(crate) claim: AtomicU64,
    pub(crate) rows: AtomicU32,
    /// Rows that aren't finished.
    pub(crate) left: AtomicU32,
    /// Of [`Stage`].
    pub(crate) stage: AtomicU32,
    /// 1 once the slab is there, 2 if there is no memory for it, 3 if a worker has kept it.
    pub(crate) placed: AtomicU32,
    pub(crate) layout: AtomicU32,
    /// Rows that don't lie in the slab as the layout says.
    pub(crate) odd: AtomicU32,
    /// The first row that failed, and 1, counted down from `u32::MAX`; 0 while none has.
    pub(crate) failed: AtomicU32,
    /// The batch's number.
    pub(crate) number: AtomicU64,
    /// Of the pass, for the seeds of items.
    pub(crate) seed: AtomicU64,
    pub(crate) page: AtomicU64,
    pub(crate) desk_len: AtomicU64,
    /// 0 while there is none, 1 while an item worker gets one.
    pub(crate) slab: AtomicU64,
    pub(crate) slab_len: AtomicU64,
    /// Bytes of the slab that are for rows; the rest is for what has no place in them.
    pub(crate) slab_rows: AtomicU64,
    /// Where the free rest of the slab begins.
    pub(crate) free: AtomicU64,
    /// The last of the pieces that the slab was too small for; each begins with the one before it.
    pub(crate) spill: AtomicU64,
    /// What was made of the batch.
    pub(crate) result: AtomicU64,
    pub(crate) result_len: AtomicU64,
    pub(crate) refusal: Refusal,
}

/// Why there is no memory.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Refusal {
    pub(crate) wanted: AtomicU64,
    pub(crate) held: AtomicU64,
    pub(crate) most: AtomicU64,
    /// The system's number, and 1; 0 for the limit.
    pub(crate) errno: AtomicU64,
}

/// Why a batch has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// An item failed: its row, and where what the worker says of it lies.
    Row {
        /// The first row that failed.
        row: u32,
        /// Offset of what is said.
        offset: usize,
        /// Bytes of it.
        len: usize,
    },
    /// There was no memory for the batch.
    Memory {
        /// Bytes that were wanted.
        wanted: u64,
        /// Bytes that were in use.
        held: u64,
        /// Bytes that there may be.
        most: u64,
        /// The system's number; `None` if it is the limit.
        errno: Option<i32>,
    },
}

/// How far a batch is.
pub(crate) mod stage {
    /// The slot is free.
    pub(crate) const EMPTY: u32 = 0;
    /// Rows are being made.
    pub(crate) const OPEN: u32 = 1;
    /// All rows are made, and wait for a batch worker.
    pub(crate) const MADE: u32 = 2;
    /// A worker joins the rows.
    pub(crate) const JOINING: u32 = 3;
    /// The consumer may have it.
    pub(crate) const READY: u32 = 4;
}

/// The numbers of an arena, which lie behind each other from an address on.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    start: NonNull<u8>,
    item_workers: usize,
    batch_workers: usize,
    slots: usize,
}

// SAFETY: it is an address of memory that whoever has it keeps mapped, and all that lies there is atomic.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Bytes of the numbers for so many slots and workers.
    pub(crate) fn size(slots: usize, workers: usize) -> usize {
        // Room for an aligned start.
        size_of::<Header>() + slots * size_of::<Slot>() + workers * size_of::<Record>() + align_of::<Header>()
    }

    /// The numbers from an address on.
    ///
    /// # Safety
    ///
    /// There are [`Control::size`] bytes, which were once zero, and which stay for as long as this is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, slots: usize, item_workers: usize, batch_workers: usize) -> Self {
        let skipped = start.align_offset(align_of::<Header>());
        Control {
            // SAFETY: `size` has room for it.
            start: unsafe { start.add(skipped) },
            item_workers,
            batch_workers,
            slots,
        }
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: `new` was promised that the bytes are there; they are atomic numbers, at a multiple of their
        // alignment.
        unsafe { self.start.cast().as_ref() }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        // SAFETY: as above; slots lie behind the header, whose size is a multiple of theirs.
        unsafe {
            let first = self.start.add(size_of::<Header>()).cast::<Slot>();
            std::slice::from_raw_parts(first.as_ptr(), self.slots)
        }
    }

    /// Those of item workers, and behind them those of batch workers.
    pub(crate) fn records(&self) -> &[Record] {
        // SAFETY: as above; records lie behind the slots.
        unsafe {
            let first = self.start.add(size_of::<Header>() + self.slots * size_of::<Slot>());
            std::slice::from_raw_parts(first.cast::<Record>().as_ptr(), self.item_workers + self.batch_workers)
        }
    }

    pub(crate) fn item_workers(&self) -> usize {
        self.item_workers
    }

    pub(crate) fn batch_workers(&self) -> usize {
        self.batch_workers
    }
}

/// A number in memory.
///
/// The address is of 8 bytes of an arena's pieces at a multiple of 8, as [`Arena::at`](fastpipe_memory::Arena::at)
/// tells them.
pub(crate) fn atomic<'a>(at: NonNull<u8>) -> &'a AtomicU64 {
    // SAFETY: the caller has looked that the bytes are there; they stay as long as the arena, which boards and
    // consumers keep. Processes that write there do so by atomic numbers as well.
    unsafe { at.cast().as_ref() }
}
