//! Memory from elsewhere than the system.
//!
//! Who reads batches may care where they lie: a GPU copies from page-locked memory by itself, and from any other only
//! by way of such memory. Then an allocator stands behind the [`SlabPool`](crate::SlabPool) of a pass in the system's
//! place. Pools never share memory, so what a pool hands out is from its own allocator, always.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

use crate::error::Error;

/// Where slabs get their memory from.
pub trait SlabAllocator: Send + Sync {
    /// A region of `bytes` bytes or more that begins at a multiple of [`ALIGNMENT`](crate::ALIGNMENT).
    ///
    /// It is kept in the pool, used again and again, and given back by being dropped: by any thread, or never, if a
    /// consumer keeps a batch. Called by the threads that decode, several at a time, while they hold locks of the pass.
    /// So it may wait for nothing that waits for the pass.
    fn allocate(&self, bytes: usize) -> Result<Region, Error>;
}

/// Bytes of an allocator. Given back by dropping their owner.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: the bytes are whoever's has the region; the owner may be dropped by any thread.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` only tells the address and the size.
unsafe impl Sync for Region {}

impl Region {
    /// The `len` bytes from `start` on.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped they can be read and written, and nobody else does. Their contents are arbitrary.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Self {
        Region {
            start,
            len,
            _owner: Box::new(owner),
        }
    }

    /// The first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:p}, {} bytes)", self.start, self.len)
    }
}
