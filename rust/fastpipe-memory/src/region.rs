//! Memory that an allocator hands out.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

/// Bytes of an allocator. They are given back by dropping their owner.
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
