//! Allocators that replace the system's allocator for slabs.
//!
//! Some consumers need batches in a particular kind of memory. A GPU copies directly only from page-locked memory;
//! other memory is first copied to a page-locked buffer. Other processes can read a batch only in shared memory. For
//! these consumers, the pass gives its [`SlabPool`](crate::SlabPool) an allocator. Pools never share memory, so every
//! slab of a pool comes from the pool's own allocator.
#![allow(unsafe_code)]

use std::sync::Arc;

use fastpipe_memory::{Lender, Refused, Region};

use crate::error::{Error, ErrorKind};

/// The source of memory for slabs.
pub trait SlabAllocator: Send + Sync {
    /// Returns a region of at least `bytes` bytes that begins at a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    ///
    /// The pool keeps the region, reuses it many times and frees it by dropping it. Any thread may drop it. It is never
    /// dropped if a consumer keeps a batch in it. Decoding threads call this method concurrently while they hold locks
    /// of the pass, so it must not wait for anything that waits for the pass.
    fn allocate(&self, bytes: usize) -> Result<Region, Error>;
}

/// Slabs in memory that this process shares with other processes by lending it to them.
#[derive(Debug)]
pub struct SharedSlabs(pub Arc<Lender>);

impl SlabAllocator for SharedSlabs {
    fn allocate(&self, bytes: usize) -> Result<Region, Error> {
        let refused = |refused: Refused| {
            Error::new(
                ErrorKind::OutOfMemory,
                format!("out of memory: could not allocate a batch: {refused}"),
            )
        };
        let piece = self.0.take(bytes).map_err(refused)?;
        // Keep enough free memory for two blocks of this size.
        self.0.keep_at_least(bytes.saturating_mul(2));
        let start = piece.start().ok_or_else(|| Error::out_of_memory(bytes, "a batch"))?;
        // SAFETY: no other code uses the block until it is dropped, and pages that were never written read as zeros.
        // Other processes read it only after it is lent, and they don't write to it while this process does.
        Ok(unsafe { Region::initialized(start, piece.len(), piece) })
    }
}
