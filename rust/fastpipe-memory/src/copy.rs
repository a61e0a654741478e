//! Copying scattered rows while the next rows are being prefetched.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::slice;

use crate::prefetch::{LINE, hint};

/// A byte that may be uninitialized: padding, or memory that was never written.
type Byte = MaybeUninit<u8>;

/// For rows of at least this many bytes, only the ends are prefetched. The processor prefetches the rest by itself once
/// it starts to read the row. Lines that are prefetched too early would evict lines that are needed now.
const LONG: usize = 2048;

/// Copies a row and prefetches a later one at the same time. The later row must have the same length or be empty. It is
/// prefetched line by line, because the processor accepts a limited number of requests at once.
///
/// AVX is used if available. It halves the number of stores that wait for their lines, which doubles the number of
/// lines in flight.
///
/// # Panics
///
/// Panics if the target's length differs from the row's.
#[inline]
pub fn copy_and_prefetch<T: Copy>(row: &[T], target: &mut [T], later: &[T]) {
    assert_eq!(row.len(), target.len(), "the target must be as long as the row");
    let (row, later) = (bytes(row), bytes(later));
    // SAFETY: the bytes of the target are borrowed exclusively. Only bytes of the same number of elements are written,
    // in their order.
    let target = unsafe { slice::from_raw_parts_mut(target.as_mut_ptr().cast::<Byte>(), size_of_val(target)) };
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx") {
        // SAFETY: this processor has AVX.
        return unsafe { with_avx(row, target, later) };
    }
    by_line(row, target, later);
}

fn bytes<T>(elements: &[T]) -> &[Byte] {
    // SAFETY: these are the bytes of the elements. Padding bytes may be uninitialized.
    unsafe { slice::from_raw_parts(elements.as_ptr().cast(), size_of_val(elements)) }
}

#[cfg(all(target_arch = "x86_64", not(miri)))]
#[target_feature(enable = "avx")]
fn with_avx(row: &[Byte], target: &mut [Byte], later: &[Byte]) {
    by_line(row, target, later);
}

#[inline(always)]
fn by_line(row: &[Byte], target: &mut [Byte], later: &[Byte]) {
    let ((from, from_rest), (to, to_rest)) = (row.as_chunks::<LINE>(), target.as_chunks_mut::<LINE>());
    if row.len() < LONG && !later.is_empty() {
        for ((k, from), to) in from.iter().enumerate().zip(to) {
            hint(later.as_ptr().wrapping_add(k * LINE).cast());
            copy_line(from, to);
        }
    } else {
        for end in [later.first(), later.last()].into_iter().flatten() {
            hint(end.as_ptr());
        }
        for (from, to) in from.iter().zip(to) {
            copy_line(from, to);
        }
    }
    to_rest.copy_from_slice(from_rest);
}

/// Copies in halves, so that the compiler doesn't merge many copies into a call of `memcpy`. For long rows that call
/// uses `rep movsb`, which is slower if rows have different alignments.
#[inline(always)]
fn copy_line(from: &[Byte; LINE], to: &mut [Byte; LINE]) {
    const HALF: usize = LINE / 2;
    to[..HALF].copy_from_slice(&from[..HALF]);
    to[HALF..].copy_from_slice(&from[HALF..]);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rows_are_copied_completely_with_any_prefetch() {
        for len in [0, 1, 63, 64, 65, 512, 700, LONG - 1, LONG, LONG + 1, 5000] {
            let row: Vec<u8> = (0..len).map(|i| i as u8).collect();
            for later in [0, 1, len, 3 * LONG] {
                let mut target = vec![7; len];
                copy_and_prefetch(&row, &mut target, &vec![1; later]);
                assert_eq!(target, row);
            }
        }
        let (row, mut target) = ([1.5, 2.5, f64::NAN, -0.0].repeat(5), [0.0; 20]);
        copy_and_prefetch(&row, &mut target, &[]);
        assert!(row.iter().zip(&target).all(|(a, b)| a.to_bits() == b.to_bits()));
    }

    #[test]
    #[should_panic(expected = "as long as the row")]
    fn a_target_of_another_length_is_refused() {
        copy_and_prefetch(&[1; 64], &mut [0; 128], &[]);
    }
}
