//! Memory that is obtained from the system and returned to it.
//!
//! Large blocks are mapped instead of allocated. An allocator keeps freed memory in blocks that may not fit later
//! requests, so a limit on the engine's memory could not be enforced. On systems other than Linux, the allocator is
//! used. Memory without a limit is [retained](crate::retained_pages) for the next reader.
#![allow(unsafe_code)]

use std::alloc::{GlobalAlloc, Layout, System};
use std::ptr::NonNull;

use crate::page_runs::{HugePageArena, PageRun};
use crate::pages::LARGE_PAGE;
use crate::region::Region;
use crate::retained_pages;

/// The alignment of slabs and of every array in them: the size of a cache line and of the widest vector registers.
pub const ALIGNMENT: usize = 64;

/// Blocks of at least this size are mapped.
const MAPPED: usize = 64 << 10;

/// A block of initialized memory, aligned to [`ALIGNMENT`], that is freed when dropped.
#[derive(Debug)]
pub struct OwnedMemory {
    start: NonNull<u8>,
    capacity: usize,
    origin: Origin,
}

/// The origin of memory, which determines how it is freed.
#[derive(Debug)]
enum Origin {
    Allocated,
    /// `None` only while it is being dropped.
    Mapped {
        run: Option<PageRun>,
        limited: bool,
    },
    /// Memory of an external allocator. Dropping the region frees it.
    Elsewhere(#[allow(dead_code)] Region),
}

// SAFETY: `OwnedMemory` owns its bytes and provides access only to its own owner. Any thread may drop a region.
unsafe impl Send for OwnedMemory {}
// SAFETY: as above; `&OwnedMemory` only exposes the address and the size.
unsafe impl Sync for OwnedMemory {}

impl OwnedMemory {
    /// Allocates at least `capacity` bytes. `None` if the system has no such memory. `limited` means that unused memory
    /// must be returned to the system immediately.
    pub fn new(capacity: usize, limited: bool) -> Option<Self> {
        // A request that no process could satisfy doesn't mean that memory is short.
        OwnedMemory::layout(capacity)?;
        OwnedMemory::of_system(capacity, limited).or_else(|| {
            retained_pages::on_allocation_failure();
            OwnedMemory::of_system(capacity, limited)
        })
    }

    fn of_system(capacity: usize, limited: bool) -> Option<Self> {
        if capacity >= MAPPED
            && let Some(run) = retained_pages::take(capacity, false).or_else(|| PageRun::map(capacity))
        {
            return Some(OwnedMemory::mapped(run, limited));
        }
        let layout = OwnedMemory::layout(capacity)?;
        // Bypass the program's allocator: it may have a reserve, which isn't intended for batches.
        // SAFETY: the size is not zero.
        let start = NonNull::new(unsafe { System.alloc_zeroed(layout) })?;
        Some(OwnedMemory {
            start,
            capacity: layout.size(),
            origin: Origin::Allocated,
        })
    }

    fn mapped(run: PageRun, limited: bool) -> Self {
        OwnedMemory {
            start: run.start,
            capacity: run.size(),
            origin: Origin::Mapped {
                run: Some(run),
                limited,
            },
        }
    }

    /// Wraps memory from an external allocator. Its contents may be overwritten. `None` if it isn't aligned to
    /// [`ALIGNMENT`].
    pub fn of(region: Region) -> Option<Self> {
        let (start, capacity) = (region.start(), region.len());
        if start.addr().get() % ALIGNMENT != 0 {
            return None;
        }
        if !region.is_initialized() {
            // SAFETY: the region has this many writable bytes, which no other code uses while it exists. It is kept
            // below.
            unsafe { start.write_bytes(0, capacity) };
        }
        Some(OwnedMemory {
            start,
            capacity,
            origin: Origin::Elsewhere(region),
        })
    }

    fn layout(capacity: usize) -> Option<Layout> {
        Layout::from_size_align(capacity.max(1), ALIGNMENT).ok()
    }

    /// Address of the first of [`OwnedMemory::capacity`] initialized bytes.
    pub fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    /// Number of bytes.
    pub fn capacity(&self) -> usize {
        self.capacity
    }

    /// Whether it was carved from large pages.
    pub fn is_carved(&self) -> bool {
        matches!(&self.origin, Origin::Mapped { run: Some(run), .. } if run.is_carved())
    }

    /// All bytes of the block.
    pub fn bytes(&self) -> &[u8] {
        // SAFETY: this block owns `capacity` initialized bytes, and they are borrowed with `self`. Slabs, which expose
        // their address, don't call this method.
        unsafe { std::slice::from_raw_parts(self.start.as_ptr(), self.capacity) }
    }

    /// All bytes of the block.
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as above, and borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.capacity) }
    }
}

impl Drop for OwnedMemory {
    fn drop(&mut self) {
        match &mut self.origin {
            Origin::Mapped { run, limited: false } => run.take().into_iter().for_each(retained_pages::put),
            Origin::Mapped { limited: true, .. } => {}
            Origin::Allocated => {
                if let Some(layout) = OwnedMemory::layout(self.capacity) {
                    // SAFETY: `new` computed this layout from the same capacity and allocated with it, and this block
                    // owns the allocation.
                    unsafe { System.dealloc(self.start.as_ptr(), layout) };
                }
            }
            Origin::Elsewhere(_) => {}
        }
    }
}

impl HugePageArena {
    /// Returns a run of at least `size` bytes, new or retained from another reader, for a pool that holds `held` bytes.
    ///
    /// Returns `None` if `size` is too large to be carved, or isn't a multiple of the page size, since the rest of the
    /// last page would be wasted. Also returns `None` if the system has no memory, if the pool holds little memory, or
    /// if its memory is limited. The system allocates a whole large page once a part of it is used, and it may allocate
    /// released parts again.
    pub fn carve(&mut self, size: usize, held: usize, limited: bool) -> Option<OwnedMemory> {
        if size == 0 || size > LARGE_PAGE || !size.is_multiple_of(self.page) {
            return None;
        }
        if held < LARGE_PAGE || limited {
            return None;
        }
        let run = retained_pages::take(size, true).or_else(|| self.cut(size))?;
        Some(OwnedMemory::mapped(run, false))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::pages::page_size;

    #[test]
    fn memory_of_any_size_is_aligned_and_writable() {
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
            let mut memory = OwnedMemory::new(size, true).unwrap();
            assert_eq!(memory.as_ptr().addr() % ALIGNMENT, 0);
            assert!(memory.capacity() >= size.max(1));
            memory.bytes_mut().fill(7);
            assert_eq!(memory.bytes().last(), Some(&7));
        }
        assert!(OwnedMemory::new(usize::MAX / 2, false).is_none());
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn carved_pieces_are_apart_and_outlive_what_they_are_carved_from() {
        let mut huge_pages = HugePageArena::default();
        let sizes = [4096, 1 << 20, 20 << 10, LARGE_PAGE].into_iter().cycle().take(40);
        let mut pieces: Vec<OwnedMemory> = sizes
            .map(|size| OwnedMemory::mapped(huge_pages.cut(size).unwrap(), false))
            .collect();
        for (number, run) in (1u8..).zip(&mut pieces) {
            assert!(run.bytes().iter().all(|&byte| byte == 0));
            run.bytes_mut().fill(number);
        }
        // Dropping a block must not change its neighbors.
        let left: Vec<_> = (1u8..).zip(pieces).filter(|(number, _)| number % 3 == 0).collect();
        drop(huge_pages);
        for (number, run) in &left {
            assert!(run.bytes().iter().all(|byte| byte == number));
        }
        let mut ranges: Vec<_> = left
            .iter()
            .map(|(_, run)| (run.as_ptr().addr(), run.capacity()))
            .collect();
        ranges.sort_unstable();
        assert!(ranges.windows(2).all(|two| two[0].0 + two[0].1 <= two[1].0));
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_pool_gets_what_was_carved_for_another() {
        // This size is used only here, since other tests retain memory as well. If one of them holds the lock at this
        // moment, the memory isn't retained.
        let size = 3 * LARGE_PAGE / 4 + page_size();
        let carve = || HugePageArena::default().carve(size, LARGE_PAGE, false).unwrap();
        let found = (0..1000).any(|_| {
            carve().bytes_mut().fill(7);
            carve().bytes().iter().all(|&byte| byte == 7)
        });
        assert!(found);
    }

    #[test]
    fn only_whole_pages_up_to_a_large_page_are_carved() {
        for page in [4096, 16 << 10, 64 << 10] {
            let carve = |size| HugePageArena::with_pages(page).carve(size, LARGE_PAGE, false);
            for size in [0, 100, page / 4, page / 2, page + 4097, LARGE_PAGE + page] {
                assert!(carve(size).is_none(), "{size} of {page}");
            }
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn what_is_given_back_leaves_its_neighbours_alone_whatever_pages_the_system_has() {
        for page in [4096, 16 << 10, 64 << 10] {
            // Each run begins and ends within one of the larger pages.
            for size in [4096, 20 << 10, 68 << 10, 100 << 10] {
                let mut huge_pages = HugePageArena::with_pages(page);
                let cut = |number| {
                    let mut run = OwnedMemory::mapped(huge_pages.cut(size).unwrap(), true);
                    run.bytes_mut().fill(number);
                    run
                };
                let mut pieces: Vec<_> = (1..8).map(cut).collect();
                for gone in [3, 1] {
                    drop(pieces.remove(gone));
                }
                for (number, run) in [1, 3, 5, 6, 7].into_iter().zip(&pieces) {
                    assert!(run.bytes().iter().all(|&byte| byte == number), "{size} of {page}");
                }
            }
        }
    }

    #[test]
    #[cfg(all(target_os = "linux", not(miri)))]
    fn a_pool_that_holds_little_or_is_limited_gets_no_large_pages() {
        let carves = |held, limited| HugePageArena::default().carve(page_size(), held, limited).is_some();
        assert!(carves(LARGE_PAGE, false));
        assert!(!carves(LARGE_PAGE - 1, false) && !carves(LARGE_PAGE, true));
    }
}
