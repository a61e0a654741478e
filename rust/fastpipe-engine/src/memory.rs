//! Memory that is used again: by the next batch, and by the next pass.

use std::sync::{Arc, Mutex};

use fastpipe_batch::{BufferPool, Fragment, SlabPool};

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
    /// Memory for passes that decode up to `prefetch` batches ahead.
    pub fn new(prefetch: usize) -> Arc<Self> {
        Arc::new(Memory {
            buffers: BufferPool::default(),
            // Two slabs a batch: those in flight, the one that the consumer holds, and one that it just dropped.
            slabs: SlabPool::new(2 * (prefetch.max(1) + 2)),
            fragments: Mutex::default(),
            process: std::process::id(),
        })
    }

    /// Whether it was made by this process.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }
}
