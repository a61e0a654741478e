//! Prefetching memory before it is read.
#![allow(unsafe_code)]

/// Bytes of a cache line.
pub const LINE: usize = 64;

/// Maximum number of lines to prefetch at once. Further requests would wait until some lines have arrived.
pub const LINES: usize = 8;

/// Requests that a small value is loaded into the cache.
#[inline]
pub fn prefetch_of<T: Copy>(value: &T) {
    hint(std::ptr::from_ref(value).cast());
}

/// Requests the cache line of an address.
#[inline(always)]
pub fn hint(address: *const u8) {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    // SAFETY: a prefetch is only a hint. It has no visible effect on the program, and doesn't fault at any address. SSE
    // is part of x86-64.
    unsafe {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        _mm_prefetch::<_MM_HINT_T0>(address.cast());
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = address;
}
