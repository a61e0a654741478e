//! Memory that is used again: by the next batch, and by the next pass.

use std::sync::{Arc, Mutex};

use fastpipe_batch::{BufferPool, ColumnSpec, Fragment, SlabPool};

/// Free slabs, buffers and arenas. Passes that follow one another share it, so that only the first one pays for page
/// faults. It belongs to one process: a forked child must make its own, since a thread that doesn't exist there may have
/// held its locks.
pub struct Memory {
    pub(crate) buffers: BufferPool,
    pub(crate) slabs: Arc<SlabPool>,
    pub(crate) fragments: Mutex<Vec<Fragment>>,
    process: u32,
}

impl Memory {
    /// Memory for passes over batches of these columns that decode up to `prefetch` of them ahead.
    pub fn new(columns: &[ColumnSpec], prefetch: usize) -> Arc<Self> {
        let arenas = columns
            .iter()
            .flat_map(ColumnSpec::parts)
            .filter(|part| part.per_row.is_none())
            .count();
        Arc::new(Memory {
            buffers: BufferPool::default(),
            // A slab for placed parts and up to one for each arena: of batches in flight, the one that the consumer holds,
            // and one that it just dropped.
            slabs: SlabPool::new((1 + arenas.max(1)) * (prefetch.max(1) + 2)),
            fragments: Mutex::default(),
            process: std::process::id(),
        })
    }

    /// Whether it was made by this process.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}
