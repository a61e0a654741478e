//! Pages: the page size of the system, and large pages for large tables.
//!
//! When rows are read in random order, each one is on a different page, and the processor caches the addresses of only
//! a few thousand pages. On Linux, a program may request pages of 2 MB instead of 4 KB, as NumPy does for its arrays.
//! Some systems have pages of 16 or 64 KB, and their large pages are larger as well.
#![allow(unsafe_code)]

use std::collections::TryReserveError;
use std::ops::Range;

/// Size of a large page in bytes, on most machines.
pub const LARGE_PAGE: usize = 2 << 20;
/// Below this size, large pages aren't worthwhile.
const LARGE: usize = 4 << 20;

/// Returns the page size of the system in bytes: 4 KB on most machines, 16 or 64 KB on some.
#[cfg(all(target_os = "linux", not(miri)))]
pub fn page_size() -> usize {
    // The kernel passes this value to the process at its start, so no system call is needed.
    rustix::param::page_size()
}

/// Returns an assumed page size. On systems where the page size isn't known, no memory is mapped.
#[cfg(not(all(target_os = "linux", not(miri))))]
pub fn page_size() -> usize {
    4096
}

/// Returns the range of whole pages of `page` bytes within `bytes` bytes at address `start`, as offsets from `start`.
/// Pages that also contain other bytes are excluded. The range is empty if no whole page fits.
pub fn whole_pages(start: usize, bytes: usize, page: usize) -> Range<usize> {
    let first = start.next_multiple_of(page) - start;
    let end = (start.saturating_add(bytes) / page * page).saturating_sub(start);
    first.min(end)..end
}

/// Reserves memory for at least `capacity` elements in total. Large amounts use large pages if the system supports
/// them.
pub fn reserve_large<T: Copy>(data: &mut Vec<T>, capacity: usize) {
    if capacity > data.capacity() {
        data.reserve_exact(capacity - data.len());
        advise_all(data);
    }
}

/// Like [`reserve_large`], but returns an error if the memory can't be allocated.
pub fn try_reserve_large<T: Copy>(data: &mut Vec<T>, capacity: usize) -> Result<(), TryReserveError> {
    if capacity > data.capacity() {
        data.try_reserve_exact(capacity - data.len())?;
        advise_all(data);
    }
    Ok(())
}

fn advise_all<T: Copy>(data: &mut Vec<T>) {
    let bytes = data.capacity() * size_of::<T>();
    if bytes >= LARGE {
        advise(data.as_mut_ptr().cast(), bytes);
    }
}

/// Requests large pages for memory of the caller, before it is written for the first time.
#[cfg(all(target_os = "linux", not(miri)))]
pub fn advise(start: *mut u8, bytes: usize) {
    use rustix::mm::{Advice, madvise};

    let pages = whole_pages(start.addr(), bytes, page_size());
    // SAFETY: the pages are within memory of the caller. The advice changes neither their contents nor their
    // permissions, only how they are mapped. If the system doesn't follow it nothing happens, so the result doesn't
    // matter.
    let _ = unsafe {
        madvise(
            start.wrapping_add(pages.start).cast(),
            pages.len(),
            Advice::LinuxHugepage,
        )
    };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub fn advise(_start: *mut u8, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn whole_pages_stay_in_their_chunk() {
        assert!(page_size().is_power_of_two() && page_size() >= 4096);
        for page in [4096, 16 << 10, 64 << 10] {
            for start in [0, 1, 4096, 20 << 10, page - 1, page, 3 * page + 4096] {
                for bytes in [0, 1, 4095, 4096, 20 << 10, page, 2 * page - 1, 5 * page + 1] {
                    let pages = whole_pages(start, bytes, page);
                    let expected: Vec<_> = (start..start + bytes)
                        .filter(|at| at % page == 0 && at + page <= start + bytes)
                        .collect();
                    assert_eq!(pages.len(), expected.len() * page, "{page} {start} {bytes}");
                    assert!(expected.first().is_none_or(|first| start + pages.start == *first));
                }
            }
        }
    }

    #[test]
    fn memory_keeps_its_content() {
        let mut data: Vec<u32> = (0..1000).collect();
        for capacity in [10, 2000, 2 << 20, 8 << 20] {
            reserve_large(&mut data, capacity);
            assert!(data.capacity() >= capacity);
            assert!(data.iter().copied().eq(0..1000));
        }
        data.resize(8 << 20, 7);
        assert_eq!(data.last(), Some(&7));
        try_reserve_large(&mut data, 9 << 20).unwrap();
        assert!(data.capacity() >= 9 << 20 && data.last() == Some(&7));
        assert!(try_reserve_large(&mut data, usize::MAX / 4).is_err());
    }
}
