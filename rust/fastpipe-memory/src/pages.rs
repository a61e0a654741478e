//! Large pages for large tables.
//!
//! Rows that are read in random order are each on another page, and the processor remembers where only a few thousand
//! pages are. On Linux a program may ask for pages of 2 MB instead of 4 KB, as NumPy does for its arrays.
#![allow(unsafe_code)]

use std::collections::TryReserveError;

/// Bytes of a large page, on most machines.
pub const LARGE_PAGE: usize = 2 << 20;
/// Below this size pages of 2 MB aren't worth it.
const LARGE: usize = 4 << 20;

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

    const PAGE: usize = 4096;
    let skipped = start.addr().next_multiple_of(PAGE) - start.addr();
    let bytes = bytes.saturating_sub(skipped) / PAGE * PAGE;
    // SAFETY: the pages lie within memory of the caller's. The advice changes neither what they hold nor what may be done
    // with them, only how they are mapped; where it isn't taken, nothing happens, so the result doesn't matter.
    let _ = unsafe { madvise(start.wrapping_add(skipped).cast(), bytes, Advice::LinuxHugepage) };
}

#[cfg(not(all(target_os = "linux", not(miri))))]
pub fn advise(_start: *mut u8, _bytes: usize) {}

#[cfg(test)]
mod tests {
    use super::*;

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
