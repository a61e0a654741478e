//! Pages that are mapped from the system, and runs of these pages.
//!
//! Nothing is mapped on systems other than Linux.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::Arc;

use crate::pages::{LARGE_PAGE, page_size};

/// A run of pages, or a part of them, with a single owner. It is returned to the system when dropped.
#[derive(Debug)]
pub(crate) struct PageRun {
    pub(crate) start: NonNull<u8>,
    size: usize,
    pages: PageOwner,
}

/// The pages that contain a run.
#[derive(Debug)]
enum PageOwner {
    /// Pages that belong only to this run.
    Run(#[allow(dead_code)] Pages),
    /// Pages that several runs share. Each run can be any part of them.
    Shared(#[allow(dead_code)] Arc<Pages>),
}

// SAFETY: it owns its bytes, and doesn't provide access to them.
unsafe impl Send for PageRun {}
// SAFETY: as above.
unsafe impl Sync for PageRun {}

impl PageRun {
    /// Maps new pages. `None` if the system has no memory, or doesn't support this.
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

    /// Whether it is a part of large pages, which it shares with other runs.
    pub(crate) fn is_carved(&self) -> bool {
        matches!(self.pages, PageOwner::Shared(_))
    }
}

impl Drop for PageRun {
    fn drop(&mut self) {
        if let PageOwner::Shared(pages) = &self.pages {
            // SAFETY: it is a part of shared pages, which are kept alive until after this call. No other code uses this
            // part.
            unsafe { mapping::forget(self.start, self.size, pages.page) };
        }
    }
}

/// Pages from a single mapping.
#[derive(Debug)]
struct Pages {
    start: NonNull<u8>,
    size: usize,
    /// Page size in bytes.
    page: usize,
}

// SAFETY: it provides access to no byte.
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
        // SAFETY: `map` returned this address for this size. All owners of references to it also kept these pages
        // alive, and they are gone.
        unsafe { mapping::unmap(self.start, self.size, self.page) };
    }
}

/// Large pages from which runs are carved, one after the other. Random reads from many separate runs, each smaller than
/// a large page, would touch more pages than the processor can cache the addresses of.
#[derive(Debug)]
pub struct HugePageArena {
    /// The current chunk, and the number of its bytes that are in use.
    current: Option<(Arc<Pages>, usize)>,
    /// Page size in bytes.
    pub(crate) page: usize,
}

impl Default for HugePageArena {
    fn default() -> Self {
        HugePageArena::with_pages(page_size())
    }
}

/// Bytes of a chunk. The system allocates its pages when they are first written.
const CHUNK: usize = 8 * LARGE_PAGE;

impl HugePageArena {
    /// Creates an arena with pages of `page` bytes.
    pub(crate) fn with_pages(page: usize) -> Self {
        HugePageArena { current: None, page }
    }

    /// Carves a new run of `size` bytes, which are zero until they are written.
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

    /// Maps new pages of `page` bytes for `size` bytes. Large mappings begin at a large-page boundary.
    pub(super) fn map(size: usize, page: usize) -> Option<NonNull<u8>> {
        let size = size.checked_next_multiple_of(page)?;
        let extra = if size >= LARGE_PAGE { LARGE_PAGE } else { 0 };
        let all = size.checked_add(extra)?;
        // SAFETY: these are new pages at an address that the system chooses, so no existing memory is replaced.
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
                    // SAFETY: these are whole pages of the new mapping, before and after the part that is used.
                    let _ = unsafe { munmap(from.cast(), len) };
                }
            }
            advise(start, size);
        }
        NonNull::new(start)
    }

    /// Unmaps pages.
    ///
    /// # Safety
    ///
    /// `map` returned `start` for `size` and `page`, and no code uses the memory anymore.
    pub(super) unsafe fn unmap(start: NonNull<u8>, size: usize, page: usize) {
        // SAFETY: guaranteed by the caller.
        let _ = unsafe { munmap(start.as_ptr().cast(), size.next_multiple_of(page)) };
    }

    /// Releases the memory of the whole pages within `size` bytes to the system, but keeps the pages mapped. Partial
    /// pages are excluded, because the kernel would release all of the last page, even if another run uses a part of
    /// it.
    ///
    /// # Safety
    ///
    /// The bytes are part of a mapping that [`map`] returned for `page`, and no code uses their contents anymore.
    pub(super) unsafe fn forget(start: NonNull<u8>, size: usize, page: usize) {
        let pages = whole_pages(start.addr().get(), size, page);
        if !pages.is_empty() {
            // SAFETY: the pages are within the bytes of the caller.
            unsafe { dont_need(start.add(pages.start), pages.len(), page) };
        }
    }

    /// # Safety
    ///
    /// The `len` bytes, rounded up to pages, are part of a mapping that [`map`] returned, and no code uses their
    /// contents anymore.
    unsafe fn dont_need(start: NonNull<u8>, len: usize, page: usize) {
        // A kernel with such pages rounds up by itself. Tests also run on kernels with smaller pages.
        let len = if cfg!(test) { len.next_multiple_of(page) } else { len };
        // SAFETY: guaranteed by the caller.
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
