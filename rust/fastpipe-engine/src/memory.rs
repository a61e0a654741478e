//! Memory that is reused by the next batch and the next pass.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fastpipe_batch::{BufferPool, ColumnSpec, Fragment, SlabAllocator, SlabPool, Starts, on_allocation_failure};

use crate::lock::lock;

/// The maximum number of records whose starts are kept, which take 64 MB.
const MOST_STARTS: usize = 16 << 20;

/// The starts of the records of units.
#[derive(Default)]
struct KnownStarts {
    units: HashMap<u64, Starts>,
    records: usize,
}

/// Free slabs, buffers and arenas. Consecutive passes over a dataset share them, so that only the first pass pays for
/// page faults and for finding the starts of records. They belong to one process. A forked child must create its own,
/// because a thread that doesn't exist in the child may have held the locks.
pub struct Memory {
    buffers: BufferPool,
    slabs: Arc<SlabPool>,
    /// One slab for placed parts, and up to one for each arena.
    slabs_a_batch: usize,
    /// Number of batches that the consumer holds at once.
    held: usize,
    fragments: Mutex<Vec<Fragment>>,
    starts: Mutex<KnownStarts>,
    process: u32,
}

impl Memory {
    /// Creates memory for passes over batches of these columns.
    pub fn new(columns: &[ColumnSpec]) -> Arc<Self> {
        Memory::with_allocator(columns, None, 1)
    }

    /// Creates memory for passes over batches of these columns. The consumer holds `held` batches at once. If there is
    /// an allocator, all memory of batches comes from it, but not the memory of open units.
    ///
    /// The allocator also provides arenas, because a batch that one task has filled uses the arenas of this task
    /// without a copy. Arenas from elsewhere would always have to be copied.
    pub fn with_allocator(columns: &[ColumnSpec], allocator: Option<Arc<dyn SlabAllocator>>, held: usize) -> Arc<Self> {
        let arenas = columns
            .iter()
            .flat_map(ColumnSpec::parts)
            .filter(|part| part.per_row().is_none())
            .count();
        Arc::new(Memory {
            buffers: BufferPool::default(),
            slabs_a_batch: 1 + arenas.max(1),
            held,
            slabs: SlabPool::with_allocator(0, allocator),
            fragments: Mutex::default(),
            starts: Mutex::default(),
            process: std::process::id(),
        })
    }

    /// Pool of buffers for units.
    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Pool of slabs for batches.
    pub fn slabs(&self) -> &Arc<SlabPool> {
        &self.slabs
    }

    /// Returns a fragment that a task can append to, reusing one if possible.
    pub(crate) fn take_fragment(&self) -> Fragment {
        lock(&self.fragments).pop().unwrap_or_default()
    }

    /// Keeps an empty fragment for a later task.
    pub(crate) fn keep_fragment(&self, fragment: Fragment) {
        lock(&self.fragments).push(fragment);
    }

    /// Keeps fragments for later tasks after emptying them, up to `most` in total.
    pub(crate) fn keep_fragments(&self, fragments: Vec<Fragment>, most: usize, empty: impl Fn(&mut Fragment)) {
        let mut free = lock(&self.fragments);
        for mut fragment in fragments {
            if free.len() < most {
                empty(&mut fragment);
                free.push(fragment);
            }
        }
    }

    /// Keeps enough free slabs for `batches` batches in flight, the batches that the consumer holds, and one that it
    /// has just dropped.
    pub fn keep_batches(&self, batches: u64) {
        self.slabs
            .keep_at_least(self.slabs_a_batch * (batches as usize + self.held + 1));
    }

    /// Returns the starts of the records of a unit, if an earlier epoch has found them.
    pub(crate) fn starts(&self, unit: u64) -> Option<Starts> {
        lock(&self.starts).units.get(&unit).cloned()
    }

    /// Whether an earlier epoch has found the starts of the records of a unit.
    pub(crate) fn knows_starts(&self, unit: u64) -> bool {
        lock(&self.starts).units.contains_key(&unit)
    }

    /// Keeps the starts of the records of a unit for later epochs, unless too many are kept already.
    pub(crate) fn keep_starts(&self, unit: u64, starts: &Starts, limit: Option<u64>) {
        // Each start takes 4 bytes, so starts take up to 1/32 of the limit.
        let most = limit.map_or(MOST_STARTS, |limit| MOST_STARTS.min((limit / 128) as usize));
        let mut known = lock(&self.starts);
        // If memory is short, the starts aren't kept, and the next epoch finds them again.
        if known.units.try_reserve(1).is_err() {
            return;
        }
        if known.records + starts.len() <= most && known.units.insert(unit, starts.clone()).is_none() {
            known.records += starts.len();
        }
    }

    /// Releases all unused memory after memory has run out.
    pub(crate) fn release(&self) {
        on_allocation_failure();
        let fragments = std::mem::take(&mut *lock(&self.fragments));
        drop(fragments);
        self.slabs.release();
        self.buffers.release();
    }

    /// Whether this process created the memory.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}
