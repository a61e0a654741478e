//! Bringing memory closer before it is read.
#![allow(unsafe_code)]

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Lines that are asked for at once at most: whatever asks for more waits until some have come.
pub const LINES: usize = 8;

/// Asks for a small value to be brought into the cache.
#[inline]
pub fn prefetch_of<T: Copy>(value: &T) {
    hint(std::ptr::from_ref(value).cast());
}

/// Asks for the cache line of an address.
#[inline(always)]
pub fn hint(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is a hint: it reads nothing that the program could see, and faults at no address. SSE is part
    // of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
