//! Memory that is got from the system and given back to it.
//!
//! Large pieces are mapped, not allocated: an allocator keeps what is freed, in pieces that may fit nothing that is asked for
//! later, so a limit of what the engine holds could not be kept. On other systems than Linux the allocator must do.
#![allow(unsafe_code)]

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::NonNull;

use crate::allocator::Region;

/// Alignment of slabs and of every array in them: a cache line, and the widest vector registers.
pub const ALIGNMENT: usize = 64;

/// Pieces from this size on are mapped.
const MAPPED: usize = 64 << 10;

/// Memory of its own, aligned to [`ALIGNMENT`], zero where it wasn't written. Freed when dropped.
#[derive(Debug)]
pub(crate) struct Memory {
    start: NonNull<u8>,
    capacity: usize,
    origin: Origin,
}

/// Where memory is from, and so what frees it.
#[derive(Debug)]
enum Origin {
    Allocated,
    Mapped,
    /// An allocator that isn't ours. Dropping the region gives it back.
    Elsewhere(#[allow(dead_code)] Region),
}

// SAFETY: `Memory` owns its bytes, and gives access to them to whoever has it. A region may be dropped by any thread.
unsafe impl Send for Memory {}
// SAFETY: as above; `&Memory` only tells the address and the size.
unsafe impl Sync for Memory {}

impl Memory {
    /// `None` where the system has no such memory.
    pub(crate) fn new(capacity: usize) -> Option<Self> {
        if capacity >= MAPPED
            && let Some(start) = mapping::map(capacity)
        {
            return Some(Memory {
                start,
                capacity,
                origin: Origin::Mapped,
            });
        }
        let layout = Memory::layout(capacity)?;
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { alloc_zeroed(layout) })?;
        Some(Memory {
            start,
            capacity: layout.size(),
            origin: Origin::Allocated,
        })
    }

    /// Memory that an allocator has handed out. What was in it is gone. `None` if it isn't aligned to [`ALIGNMENT`].
    pub(crate) fn of(region: Region) -> Option<Self> {
        let (start, capacity) = (region.start(), region.len());
        if start.addr().get() % ALIGNMENT != 0 {
            return None;
        }
        // SAFETY: the region has so many bytes, writable and nobody else's for as long as it lives; it is kept below.
        unsafe { start.write_bytes(0, capacity) };
        Some(Memory {
            start,
            capacity,
            origin: Origin::Elsewhere(region),
        })
    }

    fn layout(capacity: usize) -> Option<Layout> {
        Layout::from_size_align(capacity.max(1), ALIGNMENT).ok()
    }

    /// The first of [`Memory::capacity`] initialised bytes.
    pub(crate) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(crate) fn capacity(&self) -> usize {
        self.capacity
    }

    /// All its bytes.
    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: `capacity` initialised bytes that are ours, and borrowed with `self`. (Slabs, which give their address
        // away, don't call this.)
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.capacity) }
    }

    /// All its bytes.
    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.capacity) }
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        match self.origin {
            // SAFETY: `map` returned this address for this size, and nobody has a reference to it any more.
            Origin::Mapped => unsafe { mapping::unmap(self.start, self.capacity) },
            Origin::Allocated => {
                if let Some(layout) = Memory::layout(self.capacity) {
                    // SAFETY: `new` made this layout, of the same capacity, and allocated with it. The allocation is ours.
                    unsafe { dealloc(self.start.as_ptr(), layout) };
                }
            }
            Origin::Elsewhere(_) => {}
        }
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
mod mapping {
    use std::ptr::{NonNull, null_mut};

    use fastpipe_memory::{LARGE_PAGE, advise};
    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    const PAGE: usize = 4096;

    /// Fresh pages for `size` bytes; those of large ones begin where a large page does.
    pub(super) fn map(size: usize) -> Option<NonNull<u8>> {
        let size = size.checked_next_multiple_of(PAGE)?;
        let extra = if size >= LARGE_PAGE { LARGE_PAGE } else { 0 };
        let all = size.checked_add(extra)?;
        // SAFETY: fresh pages at an address of the system's choice: nobody's memory is replaced.
        let found = unsafe { mmap_anonymous(null_mut(), all, ProtFlags::READ | ProtFlags::WRITE, MapFlags::PRIVATE) };
        let found = found.ok()?.cast::<u8>();
        let skipped = match extra {
            0 => 0,
            _ => found.addr().next_multiple_of(LARGE_PAGE) - found.addr(),
        };
        let start = found.wrapping_add(skipped);
        if extra > 0 {
            for (from, len) in [(found, skipped), (start.wrapping_add(size), extra - skipped)] {
                if len > 0 {
                    // SAFETY: whole pages of what was just mapped, in front of and behind what is used of it.
                    let _ = unsafe { munmap(from.cast(), len) };
                }
            }
            advise(start, size);
        }
        NonNull::new(start)
    }

    /// Gives pages back.
    ///
    /// # Safety
    ///
    /// `start` is what [`map`] returned for `size`, and nobody uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, size: usize) {
        // SAFETY: the caller's promise.
        let _ = unsafe { munmap(start.as_ptr().cast(), size.next_multiple_of(PAGE)) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod mapping {
    use std::ptr::NonNull;

    pub(super) fn map(_size: usize) -> Option<NonNull<u8>> {
        None
    }

    /// # Safety
    ///
    /// Never called, since nothing is mapped.
    pub(super) unsafe fn unmap(_start: NonNull<u8>, _size: usize) {}
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_of_any_size_is_aligned_zeroed_and_writable() {
        for size in [
            0,
            1,
            100,
            MAPPED - 1,
            MAPPED,
            MAPPED + 1,
            1 << 20,
            (2 << 20) - 1,
            2 << 20,
            (5 << 20) + 777,
        ] {
            let mut memory = Memory::new(size).unwrap();
            assert_eq!(memory.as_ptr().addr() % ALIGNMENT, 0);
            assert_eq!(memory.capacity(), size.max(1));
            assert!(memory.bytes().iter().all(|&byte| byte == 0));
            memory.bytes_mut().fill(7);
            assert_eq!(memory.bytes().last(), Some(&7));
        }
        assert!(Memory::new(usize::MAX / 2).is_none());
    }
}
