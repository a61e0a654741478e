//! Memory from elsewhere than the system.
//!
//! Who reads batches may care where they lie: a GPU copies from page-locked memory by itself, and from any other only
//! by way of such memory; and other processes read it only if they have it in common. Then an allocator stands behind
//! the [`SlabPool`](crate::SlabPool) of a pass in the system's place. Pools never share memory, so what a pool hands
//! out is from its own allocator, always.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;
use std::sync::Arc;

use fastpipe_memory::{Borrowed, Lender, Refused};

use crate::error::{Error, ErrorKind};
use crate::slab::Slab;

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
    /// Whether its bytes are initialised.
    initialised: bool,
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
            initialised: false,
            _owner: Box::new(owner),
        }
    }

    /// Bytes that are initialised, though nobody knows by what.
    ///
    /// # Safety
    ///
    /// As [`Region::new`], and they are.
    pub unsafe fn initialised(start: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Self {
        Region {
            initialised: true,
            // SAFETY: the caller's promise.
            ..unsafe { Region::new(start, len, owner) }
        }
    }

    /// Whether the bytes are initialised.
    pub(crate) fn is_initialised(&self) -> bool {
        self.initialised
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

/// A slab that another process has lent. `None` if there is none such.
pub fn borrowed(piece: Borrowed) -> Option<Slab> {
    let (start, len) = (piece.start()?, piece.len());
    // SAFETY: so many bytes are mapped, and were written by whoever lent them; until the piece is dropped, nobody else
    // writes to them.
    Slab::of(unsafe { Region::initialised(start, len, piece) })
}
