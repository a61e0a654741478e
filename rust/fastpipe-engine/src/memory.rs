//! Memory that is used again: by the next batch, and by the next pass.

use std::collections::HashMap;
use std::sync::{Arc, Mutex};

use fastpipe_batch::{BufferPool, ColumnSpec, Fragment, SlabAllocator, SlabPool, Starts, on_allocation_failure};

use crate::lock::lock;

/// Records of which is kept where they start: 64 MB.
const MOST_STARTS: usize = 16 << 20;

/// Where the records of units start.
#[derive(Default)]
struct KnownStarts {
    units: HashMap<u64, Starts>,
    records: usize,
}

/// Free slabs, buffers and arenas. Passes over a data set that follow one another share it, so that only the first one
/// pays for page faults, and finds where records start. It belongs to one process: a forked child must make its own,
/// since a thread that doesn't exist there may have held its locks.
pub struct Memory {
    buffers: BufferPool,
    slabs: Arc<SlabPool>,
    /// One for placed parts and up to one for each arena.
    slabs_a_batch: usize,
    /// Batches that the consumer holds at once.
    held: usize,
    fragments: Mutex<Vec<Fragment>>,
    starts: Mutex<KnownStarts>,
    process: u32,
}

impl Memory {
    /// Memory for passes over batches of these columns.
    pub fn new(columns: &[ColumnSpec]) -> Arc<Self> {
        Memory::with_allocator(columns, None, 1)
    }

    /// Memory for passes over batches of these columns, which the consumer holds `held` of at once. Whatever a batch is
    /// made of comes from the allocator, if there is one; units that are open don't.
    ///
    /// Arenas come from there as well, since those of a batch that one task filled become its memory as they are: with
    /// others they would have to be copied, always.
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

    /// Memory of units.
    pub(crate) fn buffers(&self) -> &BufferPool {
        &self.buffers
    }

    /// Memory of batches.
    pub fn slabs(&self) -> &Arc<SlabPool> {
        &self.slabs
    }

    /// What a task appends to: one that was used before, if there is one.
    pub(crate) fn take_fragment(&self) -> Fragment {
        lock(&self.fragments).pop().unwrap_or_default()
    }

    /// Keeps one that holds nothing, for the next task.
    pub(crate) fn keep_fragment(&self, fragment: Fragment) {
        lock(&self.fragments).push(fragment);
    }

    /// Keeps some for the next tasks, `most` in all, once they are emptied.
    pub(crate) fn keep_fragments(&self, fragments: Vec<Fragment>, most: usize, empty: impl Fn(&mut Fragment)) {
        let mut free = lock(&self.fragments);
        for mut fragment in fragments {
            if free.len() < most {
                empty(&mut fragment);
                free.push(fragment);
            }
        }
    }

    /// Keeps free slabs for this many batches under way, those that the consumer holds, and one that it just dropped.
    pub fn keep_batches(&self, batches: u64) {
        self.slabs
            .keep_at_least(self.slabs_a_batch * (batches as usize + self.held + 1));
    }

    /// Where the records of a unit start, if an earlier epoch has found that.
    pub(crate) fn starts(&self, unit: u64) -> Option<Starts> {
        lock(&self.starts).units.get(&unit).cloned()
    }

    /// Whether an earlier epoch has found where the records of a unit start.
    pub(crate) fn knows_starts(&self, unit: u64) -> bool {
        lock(&self.starts).units.contains_key(&unit)
    }

    /// Keeps for later epochs where the records of a unit start, unless too much is kept already.
    pub(crate) fn keep_starts(&self, unit: u64, starts: &Starts, limit: Option<u64>) {
        // 4 bytes each: a thirty-second of the memory.
        let most = limit.map_or(MOST_STARTS, |limit| MOST_STARTS.min((limit / 128) as usize));
        let mut known = lock(&self.starts);
        // What can't be kept is found again.
        if known.units.try_reserve(1).is_err() {
            return;
        }
        if known.records + starts.len() <= most && known.units.insert(unit, starts.clone()).is_none() {
            known.records += starts.len();
        }
    }

    /// Gives all back that nobody uses just now, since memory has run out.
    pub(crate) fn release(&self) {
        on_allocation_failure();
        let fragments = std::mem::take(&mut *lock(&self.fragments));
        drop(fragments);
        self.slabs.release();
        self.buffers.release();
    }

    /// Whether it was made by this process.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}
