//! Copying rows that lie anywhere, while the next ones are on their way.
#![allow(unsafe_code)]

use std::mem::MaybeUninit;
use std::slice;

use crate::prefetch::{LINE, hint};

/// A byte that may be uninitialised: padding, or memory that nobody wrote.
type Byte = MaybeUninit<u8>;

/// Of rows of this many bytes only the ends are asked for: what lies between the processor foresees as soon as the row
/// is read, and lines that are asked for too early take the place of those that are needed now.
const LONG: usize = 2048;

/// Copies a row, and asks for a later one, of the same length or none, meanwhile: line by line, since the processor
/// takes only so many requests at once.
///
/// With AVX where there is: half as many stores wait for the lines that they go to, so twice as many lines are under
/// way.
///
/// # Panics
///
/// If the target isn't as long as the row.
#[inline]
pub fn copy_and_prefetch<T: Copy>(row: &[T], target: &mut [T], later: &[T]) {
    assert_eq!(row.len(), target.len(), "rows are copied whole");
    let (row, later) = (bytes(row), bytes(later));
    // SAFETY: the bytes of the target are ours alone. All that are written are those of as many elements, in their
    // order.
    let target = unsafe { slice::from_raw_parts_mut(target.as_mut_ptr().cast::<Byte>(), size_of_val(target)) };
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    if is_x86_feature_detected!("avx") {
        // SAFETY: this processor has AVX.
        return unsafe { with_avx(row, target, later) };
    }
    by_line(row, target, later);
}

fn bytes<T>(elements: &[T]) -> &[Byte] {
    // SAFETY: they are the bytes of the elements, which may be uninitialised where these have padding.
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

/// By halves, lest the compiler make a call of `memcpy` of many: for long rows that is `rep movsb`, which is slower
/// where every row begins somewhere else.
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
    fn rows_are_copied_whole_whatever_comes_later() {
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
    #[should_panic(expected = "whole")]
    fn a_target_of_another_length_is_refused() {
        copy_and_prefetch(&[1; 64], &mut [0; 128], &[]);
    }
}
