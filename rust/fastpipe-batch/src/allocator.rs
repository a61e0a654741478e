//! Memory from elsewhere than the system.
//!
//! Who reads batches may care where they lie: a GPU copies from page-locked memory by itself, and from any other only
//! by way of such memory; and other processes read it only if they have it in common. Then an allocator stands behind
//! the [`SlabPool`](crate::SlabPool) of a pass in the system's place. Pools never share memory, so what a pool hands
//! out is from its own allocator, always.
#![allow(unsafe_code)]

use std::sync::Arc;

use fastpipe_memory::{Lender, Refused, Region};

use crate::error::{Error, ErrorKind};

/// Where slabs get their memory from.
pub trait SlabAllocator: Send + Sync {
    /// A region of `bytes` bytes or more that begins at a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    ///
    /// It is kept in the pool, used again and again, and given back by being dropped: by any thread, or never, if a
    /// consumer keeps a batch. Called by the threads that decode, several at a time, while they hold locks of the pass.
    /// So it may wait for nothing that waits for the pass.
    fn allocate(&self, bytes: usize) -> Result<Region, Error>;
}

/// Slabs in memory that other processes map, to which they are lent.
#[derive(Debug)]
pub struct SharedSlabs(pub Arc<Lender>);

impl SlabAllocator for SharedSlabs {
    fn allocate(&self, bytes: usize) -> Result<Region, Error> {
        let refused =
            |refused: Refused| Error::new(ErrorKind::OutOfMemory, format!("no memory for a batch: {refused}"));
        let piece = self.0.take(bytes).map_err(refused)?;
        // A free piece or two of each size are kept.
        self.0.keep_at_least(bytes.saturating_mul(2));
        let start = piece.start().ok_or_else(|| Error::out_of_memory(bytes, "a batch"))?;
        // SAFETY: the piece is nobody else's until it is dropped; pages that were never written read as zeros. Others
        // read it once it is lent, and don't write to it while this process does.
        Ok(unsafe { Region::initialised(start, piece.len(), piece) })
    }
}
