//! Memory for when there is none.
//!
//! Large allocations are fallible, and whoever asks for one passes on that it was refused. Small ones aren't: Rust ends
//! the process where it gets none, and Python and the C library fail in places that nobody expects. To tell of an
//! error, to let go of batches and to end threads takes some of them. So two things are put by:
//!
//! - [`ReserveAllocator`] serves small allocations from memory of its own when the system refuses them. What is taken
//!   is given back with the last of them.
//! - A spare ([`reserve_address_space`]) is address space that is given up when memory has run out, so that others can
//!   have it: Python, which makes an exception.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::UnsafeCell;
use std::ptr::null_mut;
use std::sync::atomic::{AtomicU64, Ordering};

/// Bytes of the reserve. They take no memory before they are used.
const RESERVE: usize = 4 << 20;

/// Allocations of more than this are not served from the reserve.
const SMALL: usize = 16 << 10;

/// The system's allocator, with a reserve for small allocations that it refuses.
#[derive(Debug, Default)]
pub struct ReserveAllocator;

#[repr(align(4096))]
struct Bytes(UnsafeCell<[u8; RESERVE]>);

// SAFETY: `Taken` gives each byte to one allocation at a time; nobody else looks at them.
unsafe impl Sync for Bytes {}

static BYTES: Bytes = Bytes(UnsafeCell::new([0; RESERVE]));
static TAKEN: Taken = Taken(AtomicU64::new(0));

/// What of a reserve is taken: how far in the lower half, by how many allocations in the upper one. Never locked, since
/// it may be asked while a process forks.
struct Taken(AtomicU64);

impl Taken {
    /// Where in the reserve the allocation goes.
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

    /// An allocation is over. With the last one all of the reserve is free.
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
    // The start is within the reserve, and a multiple of the alignment, as that of the reserve is.
    TAKEN.take(layout).map_or(null_mut(), |at| start.wrapping_add(at))
}

#[inline]
fn is_reserve(pointer: *mut u8) -> bool {
    pointer.addr().wrapping_sub(BYTES.0.get().addr()) < RESERVE
}

// SAFETY: what `System` returns is given back to `System`. What comes from the reserve has the size and the alignment
// of its layout, and is nobody else's until it is given back (`Taken`). Nothing here panics: sizes are at most `SMALL`.
unsafe impl GlobalAlloc for ReserveAllocator {
    #[inline]
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let found = unsafe { System.alloc(layout) };
        if found.is_null() { from_reserve(layout) } else { found }
    }

    #[inline]
    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        // SAFETY: the caller's promise.
        let found = unsafe { System.alloc_zeroed(layout) };
        if !found.is_null() {
            return found;
        }
        let found = from_reserve(layout);
        if !found.is_null() {
            // SAFETY: it was just taken, and has this many bytes.
            unsafe { found.write_bytes(0, layout.size()) };
        }
        found
    }

    #[inline]
    unsafe fn dealloc(&self, pointer: *mut u8, layout: Layout) {
        if is_reserve(pointer) {
            TAKEN.give_back();
        } else {
            // SAFETY: the caller's promise; it is the system's.
            unsafe { System.dealloc(pointer, layout) };
        }
    }

    #[inline]
    unsafe fn realloc(&self, pointer: *mut u8, layout: Layout, new_size: usize) -> *mut u8 {
        if !is_reserve(pointer) {
            // SAFETY: the caller's promise; it is the system's.
            let found = unsafe { System.realloc(pointer, layout, new_size) };
            if !found.is_null() || new_size > SMALL {
                return found;
            }
        }
        // SAFETY: the caller promises that the size, rounded up to the alignment, is no more than `isize::MAX`.
        let new = unsafe { Layout::from_size_align_unchecked(new_size, layout.align()) };
        // SAFETY: the size isn't zero, as the caller promises.
        let found = unsafe { self.alloc(new) };
        if !found.is_null() {
            // SAFETY: both have this many bytes, and the new ones are nobody else's. The old ones are given back once.
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

    /// Bytes of address space that are put by: several of Python's arenas.
    const SPARE: usize = 4 << 20;

    /// Null while nothing is put by.
    static KEPT: AtomicPtr<u8> = AtomicPtr::new(null_mut());

    /// Address space, which takes no memory.
    fn map(bytes: usize) -> Option<*mut u8> {
        let flags = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: fresh pages at an address of the system's choice: nobody's memory is replaced.
        let found = unsafe { mmap_anonymous(null_mut(), bytes, ProtFlags::empty(), flags) };
        found.ok().map(|found| found.cast())
    }

    fn unmap(start: *mut u8, bytes: usize) {
        // SAFETY: `map` returned it for this many bytes, and nobody has it any more.
        let _ = unsafe { munmap(start.cast(), bytes) };
    }

    /// Puts address space by for when there is no more, unless some is put by. False where there is none left.
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

    /// Lets others have the address space that was put by.
    pub fn release_address_space() {
        let kept = KEPT.swap(null_mut(), Ordering::AcqRel);
        if !kept.is_null() {
            unmap(kept, SPARE);
        }
    }

    /// Whether there is address space for this many bytes just now.
    pub fn room_for(bytes: usize) -> bool {
        map(bytes).inspect(|&start| unmap(start, bytes)).is_some()
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod spare {
    /// Nothing is put by: other systems don't limit address space.
    pub fn reserve_address_space() -> bool {
        true
    }

    /// Nothing was put by.
    pub fn release_address_space() {}

    /// Not known here: there may be.
    pub fn room_for(_bytes: usize) -> bool {
        true
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_taken_lies_apart_and_all_of_it_comes_back() {
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
    fn no_more_is_taken_than_there_is() {
        let taken = Taken(AtomicU64::new(0));
        let layout = Layout::from_size_align(SMALL, 1).unwrap();
        let count = std::iter::from_fn(|| taken.take(layout)).count();
        assert_eq!(count, RESERVE / SMALL);
        assert!(from_reserve(Layout::from_size_align(SMALL + 1, 1).unwrap()).is_null());
    }

    #[test]
    fn what_the_reserve_serves_grows_and_goes_back() {
        let layout = Layout::array::<u8>(100).unwrap();
        let start = from_reserve(layout);
        assert!(is_reserve(start) && !is_reserve(&raw mut *Box::new(0u8)));
        // SAFETY: it has a hundred bytes; it is grown, and given back, with its layout.
        unsafe {
            start.write_bytes(7, 100);
            let grown = ReserveAllocator.realloc(start, layout, 5000);
            assert!(!is_reserve(grown) && (0..100).all(|i| *grown.add(i) == 7));
            ReserveAllocator.dealloc(grown, Layout::array::<u8>(5000).unwrap());
        }
    }

    #[test]
    fn what_is_put_by_is_given_up_once() {
        assert!(reserve_address_space() && reserve_address_space());
        release_address_space();
        release_address_space();
        assert!(reserve_address_space() && room_for(1 << 20));
        assert_eq!(room_for(usize::MAX / 4), cfg!(not(all(target_os = "linux", not(miri)))));
    }
}
