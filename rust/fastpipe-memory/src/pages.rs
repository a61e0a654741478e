//! Pages: how large the system's are, and large ones for large tables.
//!
//! Rows that are read in random order are each on another page, and the processor remembers where only a few thousand
//! pages are. On Linux a program may ask for pages of 2 MB instead of 4 KB, as NumPy does for its arrays. (Some systems
//! have pages of 16 or 64 KB, and larger large ones.)
#![allow(unsafe_code)]

use std::collections::TryReserveError;
use std::ops::Range;

/// Bytes of a large page, on most machines.
pub const LARGE_PAGE: usize = 2 << 20;
/// Below this size pages of 2 MB aren't worth it.
const LARGE: usize = 4 << 20;

/// Bytes of the system's pages: 4 KB on most machines, 16 or 64 KB on some.
#[cfg(all(target_os = "linux", not(miri)))]
pub fn page_size() -> usize {
    // What the kernel told the process when it started: nothing is asked.
    rustix::param::page_size()
}

/// Bytes of the system's pages. Nothing is mapped where they aren't known.
#[cfg(not(all(target_os = "linux", not(miri))))]
pub fn page_size() -> usize {
    4096
}

/// Where the whole pages of `page` bytes within `bytes` bytes from the address `start` are, as offsets from it. Pages
/// that hold bytes of others, too, aren't among them. Empty if there are none.
pub fn whole_pages(start: usize, bytes: usize, page: usize) -> Range<usize> {
    let first = start.next_multiple_of(page) - start;
    let end = (start.saturating_add(bytes) / page * page).saturating_sub(start);
    first.min(end)..end
}

/// Takes memory for at least `capacity` elements in all, in large pages if it is much and the system has such.
pub fn reserve_large<T: Copy>(data: &mut Vec<T>, capacity: usize) {
    if capacity > data.capacity() {
        data.reserve_exact(capacity - data.len());
        advise_all(data);
    }
}

/// Like [`reserve_large`], but an error where there is no such memory.
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

/// Asks for large pages for the caller's memory, before it is written for the first time.
#[cfg(all(target_os = "linux", not(miri)))]
pub fn advise(start: *mut u8, bytes: usize) {
    use rustix::mm::{Advice, madvise};

    let pages = whole_pages(start.addr(), bytes, page_size());
    // SAFETY: the pages lie within memory of the caller's. The advice changes neither what they hold nor what may be
    // done with them, only how they are mapped; where it isn't taken, nothing happens, so the result doesn't matter.
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
    fn whole_pages_never_leave_what_they_are_in() {
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
    fn memory_keeps_what_it_holds() {
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
