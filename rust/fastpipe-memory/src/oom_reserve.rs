//! Reserves for situations in which memory has run out.
//!
//! Large allocations are fallible, and their callers report the failure. Small allocations are not: Rust aborts the
//! process if one fails, and Python and the C library fail in unexpected places. Reporting an error, releasing batches
//! and stopping threads require some small allocations. So two things are reserved:
//!
//! - [`ReserveAllocator`] serves small allocations from a static reserve when the system refuses them. The reserve is
//!   free again once the last of these allocations is freed.
//! - The spare ([`reserve_address_space`]) is address space that is released when memory has run out, so that other
//!   code can use it, for example Python to create an exception.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the reserve. They take no memory until they are used.
const RESERVE: usize = 4 << 20;

/// Larger allocations than this are not served from the reserve.
const SMALL: usize = 16 << 10;

/// The system's allocator, with a reserve for small allocations that it refuses.
#[derive(Debug, Default)]
pub struct ReserveAllocator;

#[repr(align(4096))]
struct Bytes(UnsafeCell<[u8; RESERVE]>);

// SAFETY: `Taken` assigns each byte to one allocation at a time, and no other code accesses the bytes.
unsafe impl Sync for Bytes {}

static BYTES: Bytes = Bytes(UnsafeCell::new([0; RESERVE]));
static TAKEN: Taken = Taken(AtomicU64::new(0));

/// The allocated part of a reserve: the end of the last allocation in the lower half, and the number of allocations in
/// the upper half. It uses no lock, because it may be used while the process forks.
struct Taken(AtomicU64);

impl Taken {
    /// Returns the offset of a new allocation in the reserve.
    fn take(&self, layout: Layout) -> Option<usize> {
        let mut found = None;
        let taken = self.0.fetch_update(Ordering::Acquire, Ordering::Relaxed, |state| {
            let (count, end) = (state >> 32, (state & u64::from(u32::MAX)) as usize);
            let start = end.next_multiple_of(layout.align());
            let end = start + layout.size().max(1);
            found = Some(start);
            (end <= RESERVE).then_some((count + 1) << 32 | end as u64)
        });
        taken.ok().and(found)
    }

    /// Ends an allocation. After the last one has ended, the whole reserve is free.
    fn give_back(&self) {
        let less = |state: u64| match state >> 32 {
            0 | 1 => Some(0),
            _ => Some(state - (1 << 32)),
        };
        let _ = self.0.fetch_update(Ordering::Release, Ordering::Relaxed, less);
    }
}

#[cold]
fn from_reserve(layout: Layout) -> *mut u8 {
    if layout.size() > SMALL || layout.align() > 4096 {
        return null_mut();
    }
    let start = BYTES.0.get().cast::<u8>();
    // The offset is within the reserve and a multiple of the alignment. The reserve itself is aligned as well.
    TAKEN.take(layout).map_or(null_mut(), |at| start.wrapping_add(at))
}

#[inline]
fn is_reserve(pointer: *mut u8) -> bool {
    pointer.addr().wrapping_sub(BYTES.0.get().addr()) < RESERVE
}

// SAFETY: memory from `System` is returned to `System`. Memory from the reserve has the size and alignment of its
// layout, and no other allocation uses it until it is freed (`Taken`). Nothing here panics, since sizes are at most
// `SMALL`.
unsafe impl GlobalAlloc for ReserveAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        let found = unsafe { System.alloc(layout) };
        if found.is_null() { from_reserve(layout) } else { found }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: guaranteed by the caller.
        let found = unsafe { System.alloc_zeroed(layout) };
        if !found.is_null() {
            return found;
        }
        let found = from_reserve(layout);
        if !found.is_null() {
            // SAFETY: it was just allocated and has this many bytes.
            unsafe { found.write_bytes(0, layout.size()) };
        }
        found
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_reserve(pointer) {
            TAKEN.give_back();
        } else {
            // SAFETY: guaranteed by the caller; the memory is from `System`.
            unsafe { System.dealloc(pointer, layout) };
        }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !is_reserve(pointer) {
            // SAFETY: guaranteed by the caller; the memory is from `System`.
            let found = unsafe { System.realloc(pointer, layout, new_size) };
            if !found.is_null() || new_size > SMALL {
                return found;
            }
        }
        // SAFETY: the caller guarantees that the size, rounded up to the alignment, is at most `isize::MAX`.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: the caller guarantees that the size isn't zero.
        let found = unsafe { self.alloc(new) };
        if !found.is_null() {
            // SAFETY: both have this many bytes, and only this allocation uses the new ones. The old ones are freed
            // once.
            unsafe {
                found.copy_from_nonoverlapping(pointer, layout.size().min(new_size));
                self.dealloc(pointer, layout);
            }
        }
        found
    }
}

pub use spare::{release_address_space, reserve_address_space, room_for};

#[cfg(all(target_os = "linux", not(miri)))]
mod spare {
    use std::ptr::null_mut;
    use std::sync::atomic::{AtomicPtr, Ordering};

    use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

    /// Bytes of reserved address space: several of Python's arenas.
    const SPARE: usize = 4 << 20;

    /// Null if nothing is reserved.
    static KEPT: AtomicPtr<u8> = AtomicPtr::new(null_mut());

    /// Maps address space, which takes no memory.
    fn map(bytes: usize) -> Option<*mut u8> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: these are new pages at an address that the system chooses, so no existing memory is replaced.
        let found = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
        found.ok().map(|found| found.cast())
    }

    fn unmap(start: *mut u8, bytes: usize) {
        // SAFETY: `map` returned the address for this many bytes, and no code uses them anymore.
        let _ = unsafe { munmap(start.cast(), bytes) };
    }

    /// Reserves address space for when memory has run out, unless some is reserved. Returns false if none is left.
    pub fn reserve_address_space() -> bool {
        if !KEPT.load(Ordering::Relaxed).is_null() {
            return true;
        }
        let Some(found) = map(SPARE) else { return false };
        let swapped = KEPT.compare_exchange(null_mut(), found, Ordering::AcqRel, Ordering::Relaxed);
        if swapped.is_err() {
            unmap(found, SPARE);
        }
        true
    }

    /// Releases the reserved address space, so that other code can use it.
    pub fn release_address_space() {
        let kept = KEPT.swap(null_mut(), Ordering::AcqRel);
        if !kept.is_null() {
            unmap(kept, SPARE);
        }
    }

    /// Whether there is currently address space for `bytes` bytes.
    pub fn room_for(bytes: usize) -> bool {
        map(bytes).inspect(|&start| unmap(start, bytes)).is_some()
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod spare {
    /// Reserves nothing, since other systems don't limit address space.
    pub fn reserve_address_space() -> bool {
        true
    }

    /// Does nothing, since nothing was reserved.
    pub fn release_address_space() {}

    /// Returns true, since the available address space isn't known here.
    pub fn room_for(_bytes: usize) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn allocations_are_disjoint_and_returned() {
        for _ in 0..3 {
            let taken = Taken(AtomicU64::new(0));
            let mut end = 0;
            let layouts = [(1, 1), (100, 8), (3, 2), (SMALL, 4096), (0, 64), (16, 16)];
            for (size, align) in layouts {
                let layout = Layout::from_size_align(size, align).unwrap();
                let start = taken.take(layout).unwrap();
                assert!(start >= end && start.is_multiple_of(align));
                end = start + size;
            }
            for _ in &layouts {
                assert_ne!(taken.0.load(Ordering::Relaxed), 0);
                taken.give_back();
            }
            assert_eq!(taken.take(Layout::new::<u8>()), Some(0));
        }
    }

    #[test]
    fn allocations_stay_within_the_capacity() {
        let taken = Taken(AtomicU64::new(0));
        let layout = Layout::from_size_align(SMALL, 1).unwrap();
        let count = std::iter::from_fn(|| taken.take(layout)).count();
        assert_eq!(count, RESERVE / SMALL);
        assert!(from_reserve(Layout::from_size_align(SMALL + 1, 1).unwrap()).is_null());
    }

    #[test]
    fn allocations_of_the_reserve_grow_and_are_returned() {
        let layout = Layout::array::<u8>(100).unwrap();
        let start = from_reserve(layout);
        assert!(is_reserve(start) && !is_reserve(&raw mut *Box::new(0u8)));
        // SAFETY: it has 100 bytes, and is reallocated and freed with its layout.
        unsafe {
            start.write_bytes(7, 100);
            let grown = ReserveAllocator.realloc(start, layout, 5000);
            assert!(!is_reserve(grown) && (0..100).all(|i| *grown.add(i) == 7));
            ReserveAllocator.dealloc(grown, Layout::array::<u8>(5000).unwrap());
        }
    }

    #[test]
    fn reserved_address_space_can_be_released_twice() {
        assert!(reserve_address_space() && reserve_address_space());
        release_address_space();
        release_address_space();
        assert!(reserve_address_space() && room_for(1 << 20));
        assert_eq!(room_for(usize::MAX / 4), cfg!(not(all(target_os = "linux", not(miri)))));
    }
}
