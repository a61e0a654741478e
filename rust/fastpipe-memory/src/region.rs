//! Memory that comes from an external allocator.
#![allow(unsafe_code)]

use std::fmt;
use std::ptr::NonNull;

/// Bytes of an external allocator. Dropping the region drops their owner, which frees them.
pub struct Region {
    start: NonNull<u8>,
    len: usize,
    /// Whether its bytes are initialized.
    initialized: bool,
    _owner: Box<dyn Send + Sync>,
}

// SAFETY: only the owner of the region accesses the bytes, and any thread may drop `_owner`.
unsafe impl Send for Region {}
// SAFETY: as above; `&Region` only exposes the address and the size.
unsafe impl Sync for Region {}

impl Region {
    /// Creates a region of `len` bytes that begin at `start`.
    ///
    /// # Safety
    ///
    /// Until `owner` is dropped, the bytes can be read and written, and no other code accesses them. Their contents are
    /// arbitrary.
    pub unsafe fn new(start: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Self {
        Region {
            start,
            len,
            initialized: false,
            _owner: Box::new(owner),
        }
    }

    /// Creates a region whose bytes are initialized with arbitrary contents.
    ///
    /// # Safety
    ///
    /// As for [`Region::new`], and the bytes are initialized.
    pub unsafe fn initialized(start: NonNull<u8>, len: usize, owner: impl Send + Sync + 'static) -> Self {
        Region {
            initialized: true,
            // SAFETY: guaranteed by the caller.
            ..unsafe { Region::new(start, len, owner) }
        }
    }

    /// Whether the bytes are initialized.
    pub(crate) fn is_initialized(&self) -> bool {
        self.initialized
    }

    /// Address of the first byte.
    pub fn start(&self) -> NonNull<u8> {
        self.start
    }

    /// Number of bytes.
    pub fn len(&self) -> usize {
        self.len
    }

    /// Whether the region is empty.
    pub fn is_empty(&self) -> bool {
        self.len == 0
    }
}

impl fmt::Debug for Region {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Region({:p}, {} bytes)", self.start, self.len)
    }
}
