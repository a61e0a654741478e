//! Pages that are got from the system and given back to it, and runs of them.
//!
//! On other systems than Linux nothing is mapped.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use crate::pages::{LARGE_PAGE, page_size};

/// A part of pages, or all of them, that is nobody else's. Given back to the system when dropped.
#[derive(Debug)]
pub(crate) struct PageRun {
    pub(crate) start: NonNull<u8>,
    size: usize,
    pages: PageOwner,
}

/// What a run is of.
#[derive(Debug)]
enum PageOwner {
    /// All of them.
    Run(#[allow(dead_code)] Pages),
    /// Some of them, from anywhere to anywhere.
    Shared(#[allow(dead_code)] Arc<Pages>),
}

// SAFETY: it owns its bytes, and gives access to none of them by itself.
unsafe impl Send for PageRun {}
// SAFETY: as above.
unsafe impl Sync for PageRun {}

impl PageRun {
    /// `None` where the system has no such memory, or doesn't map any.
    pub(crate) fn map(size: usize) -> Option<Self> {
        let pages = Pages::map(size, page_size())?;
        Some(PageRun {
            start: pages.start,
            size,
            pages: PageOwner::Run(pages),
        })
    }

    pub(crate) fn size(&self) -> usize {
        self.size
    }

    /// Whether it is part of large pages, with others.
    pub(crate) fn is_carved(&self) -> bool {
        matches!(self.pages, PageOwner::Shared(_))
    }
}

impl Drop for PageRun {
    fn drop(&mut self) {
        if let PageOwner::Shared(pages) = &self.pages {
            // SAFETY: a part of what is shared, which is kept alive until behind this, and which nobody else uses.
            unsafe { mapping::forget(self.start, self.size, pages.page) };
        }
    }
}

/// What was mapped at once.
#[derive(Debug)]
struct Pages {
    start: NonNull<u8>,
    size: usize,
    /// Bytes of a page.
    page: usize,
}

// SAFETY: it gives access to no byte.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    fn map(size: usize, page: usize) -> Option<Self> {
        let start = mapping::map(size, page)?;
        Some(Pages { start, size, page })
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        // SAFETY: `map` returned this address for this size, and whoever had references to it kept this as well.
        unsafe { mapping::unmap(self.start, self.size, self.page) };
    }
}

/// Large pages that runs are carved from, one behind the other. What is read in random order from many runs of less
/// than a large page would lie on more pages than the processor remembers the places of.
#[derive(Debug)]
pub struct HugePageArena {
    /// A chunk, and how much of it is given out.
    current: Option<(Arc<Pages>, usize)>,
    /// Bytes of a page.
    pub(crate) page: usize,
}

impl Default for HugePageArena {
    fn default() -> Self {
        HugePageArena::with_pages(page_size())
    }
}

/// Bytes of a chunk, of which pages are taken as they are written.
const CHUNK: usize = 8 * LARGE_PAGE;

impl HugePageArena {
    /// Carves from pages of this many bytes.
    pub(crate) fn with_pages(page: usize) -> Self {
        HugePageArena { current: None, page }
    }

    /// A new run of this many bytes, zero until it is written.
    pub(crate) fn cut(&mut self, size: usize) -> Option<PageRun> {
        let (chunk, used) = match self.current.take() {
            Some((chunk, used)) if used + size <= CHUNK => (chunk, used),
            _ => (Arc::new(Pages::map(CHUNK, self.page)?), 0),
        };
        self.current = Some((chunk.clone(), used + size));
        Some(PageRun {
            // SAFETY: `used + size` bytes are within the chunk.
            start: unsafe { chunk.start.add(used) },
            size,
            pages: PageOwner::Shared(chunk),
        })
    }
}

#[cfg(all(target_os = "linux", not(miri)))]
mod mapping {
    use std::ptr::{NonNull, null_mut};

    use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

    use crate::pages::{LARGE_PAGE, advise, whole_pages};

    /// Fresh pages, of `page` bytes each, for `size` bytes; those of large ones begin where a large page does.
    pub(super) fn map(size: usize, page: usize) -> Option<NonNull<u8>> {
        let size = size.checked_next_multiple_of(page)?;
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
    /// `start` is what [`map`] returned for `size` and `page`, and nobody uses the memory any more.
    pub(super) unsafe fn unmap(start: NonNull<u8>, size: usize, page: usize) {
        // SAFETY: the caller's promise.
        let _ = unsafe { munmap(start.as_ptr().cast(), size.next_multiple_of(page)) };
    }

    /// Gives the memory of the whole pages within `size` bytes back, but not the pages. The kernel would take all of
    /// the last page, whoever else has a part of it.
    ///
    /// # Safety
    ///
    /// The bytes are part of what [`map`] returned for `page`, and nobody uses what they hold any more.
    pub(super) unsafe fn forget(start: NonNull<u8>, size: usize, page: usize) {
        let pages = whole_pages(start.addr().get(), size, page);
        if !pages.is_empty() {
            // SAFETY: within the bytes of the caller's.
            unsafe { dont_need(start.add(pages.start), pages.len(), page) };
        }
    }

    /// # Safety
    ///
    /// `len` bytes rounded up to pages are part of what [`map`] returned, and nobody uses what they hold any more.
    unsafe fn dont_need(start: NonNull<u8>, len: usize, page: usize) {
        // A kernel with such pages does this by itself. Tests run on kernels with smaller ones, too.
        let len = if cfg!(test) { len.next_multiple_of(page) } else { len };
        // SAFETY: the caller's promise.
        let _ = unsafe { madvise(start.as_ptr().cast(), len, Advice::LinuxDontNeed) };
    }
}

#[cfg(not(all(target_os = "linux", not(miri))))]
mod mapping {
    use std::ptr::NonNull;

    pub(super) fn map(_size: usize, _page: usize) -> Option<NonNull<u8>> {
        None
    }

    /// # Safety
    ///
    /// Never called, since nothing is mapped.
    pub(super) unsafe fn unmap(_start: NonNull<u8>, _size: usize, _page: usize) {}

    /// # Safety
    ///
    /// Never called, since nothing is mapped.
    pub(super) unsafe fn forget(_start: NonNull<u8>, _size: usize, _page: usize) {}
}
