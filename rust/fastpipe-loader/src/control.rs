//! The numbers at the start of the shared memory, which all processes read and write.
//!
//! All of them are atomic numbers for which any bits are valid. The memory is initialized with zeros.
#![allow(unsafe_code)]

use std::mem::size_of;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use crate::record::Record;

/// The maximum number of item layouts of a loader; see `layouts.rs`.
pub(crate) const LAYOUTS: usize = 24;

/// Numbers that concern all batches.
#[repr(C, align(128))]
pub(crate) struct Header {
    pub(crate) item_workers: AtomicU32,
    pub(crate) batch_workers: AtomicU32,
    pub(crate) slots: AtomicU32,
    /// The way in which batches are joined, as a [`Joining`].
    pub(crate) joining: AtomicU32,
    /// 1 if all rows of a batch are claimed at once.
    pub(crate) whole: AtomicU32,
    /// 1 if item workers run one at a time.
    pub(crate) turns: AtomicU32,
    /// Number of processors that the program may use.
    pub(crate) processors: AtomicU32,
    /// 1 if workers must stop.
    pub(crate) stop: AtomicU32,
    /// The number of the layout for new batches; 0 until it is known.
    pub(crate) layout: AtomicU32,
    /// Number of published layouts.
    pub(crate) layouts: AtomicU32,
    /// The item worker that is publishing a layout: its index plus 1, or 0 for none.
    pub(crate) telling: AtomicU32,
    pub(crate) told: [Told; LAYOUTS],
    /// Number of workers that couldn't start. The message of the first one is in `refusal`.
    pub(crate) refusals: AtomicU32,
    pub(crate) refusal: Told,
    /// Average bytes per row that are stored after the rows of a slab. If batches are written as a whole, the bytes of
    /// a batch.
    pub(crate) tail: AtomicU64,
    pub(crate) work: Work,
    pub(crate) joins: Joins,
    pub(crate) news: News,
}

/// Which workers join the items of a batch, after all of them are in the batch's slab.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u32)]
pub enum Joining {
    /// No worker joins them: the batch consists of its items side by side. But if some rows don't match the layout, the
    /// item worker that finishes the last row joins the batch.
    InPlace = 0,
    /// The item worker that finishes the last row.
    ByMakers = 1,
    /// A batch worker.
    ByJoiners = 2,
}

/// The offset and length of a layout's description or of a message.
#[repr(C)]
pub(crate) struct Told {
    pub(crate) offset: AtomicU64,
    pub(crate) len: AtomicU64,
}

/// Numbers that item workers watch.
#[repr(C, align(128))]
pub(crate) struct Work {
    /// Changes when there are new rows to claim.
    pub(crate) changed: AtomicU32,
    /// Number of item workers that wait for it.
    pub(crate) waiting: AtomicU32,
    /// 1 if a waiting item worker periodically checks whether another one is delayed by a long item and has more rows
    /// claimed.
    pub(crate) watched: AtomicU32,
    /// The earliest batch that may have unclaimed rows.
    pub(crate) first: AtomicU64,
    /// One past the last batch that was started.
    pub(crate) begun: AtomicU64,
    pub(crate) costs: WorkerCosts,
}

/// Average times in nanoseconds; 0 if not known yet.
#[repr(C)]
pub(crate) struct WorkerCosts {
    /// Time to produce an item.
    pub(crate) item: AtomicU64,
    /// Time to write an item to its row.
    pub(crate) placing: AtomicU64,
    /// Time to join a batch.
    pub(crate) joining: AtomicU64,
    /// Processor time to join a batch.
    pub(crate) joining_busy: AtomicU64,
}

/// Numbers that batch workers watch.
#[repr(C, align(128))]
pub(crate) struct Joins {
    /// Changes when there is a batch to join.
    pub(crate) changed: AtomicU32,
    pub(crate) waiting: AtomicU32,
}

/// Numbers that the consumer watches.
#[repr(C, align(128))]
pub(crate) struct News {
    /// Changes when a batch is ready.
    pub(crate) changed: AtomicU32,
    /// The batch that the consumer waits for, plus 1; 0 for none, `u64::MAX` for any.
    pub(crate) awaited: AtomicU64,
}

/// A batch in flight.
#[repr(C, align(128))]
pub(crate) struct Slot {
    /// The slot's turn in the upper half, and the next unclaimed row in the lower half.
    pub(crate) claim: AtomicU64,
    pub(crate) rows: AtomicU32,
    /// Number of unfinished rows.
    pub(crate) left: AtomicU32,
    /// One of the constants of `stage`.
    pub(crate) stage: AtomicU32,
    /// 1 if the slab is allocated, 2 if its allocation failed, 3 if a worker has kept it.
    pub(crate) placed: AtomicU32,
    pub(crate) layout: AtomicU32,
    /// Number of rows that aren't stored in the slab according to the layout. If the batch is written as a whole, 1 if
    /// its size must not be learned.
    pub(crate) odd: AtomicU32,
    /// The first failed row, encoded as `u32::MAX - row`; 0 if no row has failed.
    pub(crate) failed: AtomicU32,
    /// The item worker that produces all rows, as its index plus 1; 0 if any item worker may claim rows.
    pub(crate) owner: AtomicU32,
    /// The batch's number.
    pub(crate) number: AtomicU64,
    /// The seed of the pass, from which items derive theirs.
    pub(crate) seed: AtomicU64,
    pub(crate) page: AtomicU64,
    pub(crate) desk_len: AtomicU64,
    /// The offset of the slab. Before its allocation: 0, or `PENDING` if the consumer or an item worker allocates it.
    pub(crate) slab: AtomicU64,
    pub(crate) slab_len: AtomicU64,
    /// Bytes of the slab for rows. The rest is for values that are stored outside their rows.
    pub(crate) slab_rows: AtomicU64,
    /// The offset of the slab's free space.
    pub(crate) free: AtomicU64,
    /// The last extent that was allocated because the slab was full. Each one begins with the offset of the previous
    /// one.
    pub(crate) spill: AtomicU64,
    /// The result of joining the batch.
    pub(crate) result: AtomicU64,
    pub(crate) result_len: AtomicU64,
    pub(crate) refusal: Refusal,
}

impl Slot {
    /// Whether an item worker may claim rows of the batch.
    pub(crate) fn is_for(&self, item_worker: usize) -> bool {
        let owner = self.owner.load(Ordering::Relaxed);
        owner == 0 || owner as usize == item_worker + 1
    }
}

/// Details of a failed allocation.
#[repr(C)]
#[derive(Default)]
pub(crate) struct Refusal {
    pub(crate) wanted: AtomicU64,
    pub(crate) held: AtomicU64,
    pub(crate) most: AtomicU64,
    /// The system's error number plus 1; 0 if the limit was reached.
    pub(crate) errno: AtomicU64,
}

/// The reason why a batch has failed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Failure {
    /// An item failed. Contains its row and the location of the worker's message.
    Row {
        /// The first row that failed.
        row: u32,
        /// Offset of the message.
        offset: usize,
        /// Bytes of the message.
        len: usize,
    },
    /// Memory for the batch couldn't be allocated.
    Memory {
        /// Bytes that were requested.
        wanted: u64,
        /// Bytes that were in use.
        held: u64,
        /// Maximum bytes that may be in use.
        most: u64,
        /// The system's error number; `None` if the limit was reached.
        errno: Option<i32>,
    },
}

/// The progress of a batch.
pub(crate) mod stage {
    /// The slot is free.
    pub(crate) const EMPTY: u32 = 0;
    /// Rows are being produced.
    pub(crate) const OPEN: u32 = 1;
    /// All rows are finished, and wait for a batch worker.
    pub(crate) const MADE: u32 = 2;
    /// A worker is joining the rows.
    pub(crate) const JOINING: u32 = 3;
    /// The consumer can take the batch.
    pub(crate) const READY: u32 = 4;
}

/// The control numbers of an arena, which are stored one after the other from `start`.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Control {
    start: NonNull<u8>,
    item_workers: usize,
    batch_workers: usize,
    slots: usize,
}

// SAFETY: it is an address of memory that its owner keeps mapped, and all values there are atomic.
unsafe impl Send for Control {}
// SAFETY: as above.
unsafe impl Sync for Control {}

impl Control {
    /// Returns the bytes of the numbers for `slots` slots and `workers` workers.
    pub(crate) fn size(slots: usize, workers: usize) -> usize {
        // Includes room to align the start.
        size_of::<Header>() + slots * size_of::<Slot>() + workers * size_of::<Record>() + align_of::<Header>()
    }

    /// Uses the numbers at an address.
    ///
    /// # Safety
    ///
    /// There are [`Control::size`] bytes, which were initialized with zeros and remain valid while this is used.
    pub(crate) unsafe fn new(start: NonNull<u8>, slots: usize, item_workers: usize, batch_workers: usize) -> Self {
        let skipped = start.align_offset(align_of::<Header>());
        Control {
            // SAFETY: `size` includes these bytes.
            start: unsafe { start.add(skipped) },
            item_workers,
            batch_workers,
            slots,
        }
    }

    pub(crate) fn header(&self) -> &Header {
        // SAFETY: the caller of `new` guarantees that the bytes are valid. They are atomic numbers at an aligned
        // address.
        unsafe { self.start.cast().as_ref() }
    }

    pub(crate) fn slots(&self) -> &[Slot] {
        // SAFETY: as above. Slots are stored after the header, whose size is a multiple of their alignment.
        unsafe {
            let first = self.start.add(size_of::<Header>()).cast::<Slot>();
            std::slice::from_raw_parts(first.as_ptr(), self.slots)
        }
    }

    /// The records of item workers, followed by the records of batch workers.
    pub(crate) fn records(&self) -> &[Record] {
        // SAFETY: as above; records are stored after the slots.
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

/// Returns an atomic number in shared memory.
///
/// The address must be 8-byte aligned and point to 8 bytes of the arena's extents, as checked by
/// [`Arena::at`](fastpipe_memory::Arena::at).
pub(crate) fn atomic<'a>(at: NonNull<u8>) -> &'a AtomicU64 {
    // SAFETY: the caller has checked that the bytes exist. They remain valid as long as the arena, which control blocks
    // and consumers keep alive. Other processes also write there only through atomic numbers.
    unsafe { at.cast().as_ref() }
}
