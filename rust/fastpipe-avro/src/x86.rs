//! Decodes varints with AVX2 and BMI2 instructions.
//!
//! A decoder that reads numbers one by one can't start on a number before it knows where the previous one ends. That
//! costs about ten cycles per number, from one load to the next. This module instead finds the last bytes of all
//! numbers within 64 bytes at once, as set bits of a register. Moving on to the next number then takes one cycle: it
//! clears the lowest set bit. One instruction packs the payload bits of a number. If no number is longer than four
//! bytes, a few instructions pack the bits of eight numbers. No branch depends on the length of a single number.
//!
//! # Why this is sound
//!
//! This module uses `unsafe` for three purposes. First, it loads 32 bytes from an array of 32 bytes. Second, it
//! executes CPUID, which every x86-64 processor supports. Third, it calls functions that are compiled for AVX2, BMI1,
//! BMI2, LZCNT and POPCNT, which the processor must support. All of these calls are methods of [`Avx2`], and its only
//! constructor outside of this module, [`Avx2::detect`], checks the processor. All memory is accessed through slices
//! and arrays. Their bounds are checked at run time or known to the compiler.
#![allow(unsafe_code)]

mod short;

use std::arch::x86_64::{__cpuid, __m256i, _bzhi_u64, _mm256_loadu_si256, _mm256_movemask_epi8, _pdep_u64, _pext_u64};
use std::sync::LazyLock;

use fastpipe_batch::{Cells, Overflow};

use crate::convert::Convert;
use crate::plan::Scalar;
use crate::varint::{CONTINUES, unzigzag};

pub(crate) use self::short::{GROUP, Short};

/// Proof that the processor supports AVX2, BMI1, BMI2, LZCNT and POPCNT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2(());

/// Mask of the payload bits of a varint's bytes.
const LOW_BITS: u64 = !CONTINUES;

/// Number of bytes that are searched for ends at once.
const WINDOW: usize = 64;

/// Number of bytes in a window's array. A number that starts at the window's last byte is loaded with up to 16 more
/// bytes.
const SPAN: usize = WINDOW + 16;

impl Avx2 {
    /// Returns `None` if the processor lacks one of the features or implements PEXT in microcode. AMD processors before
    /// family 19h do, and take dozens of cycles for it.
    pub(crate) fn detect() -> Option<Avx2> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        (all && !*SLOW_PEXT).then_some(Avx2(()))
    }

    /// Reads up to `n` longs from the start of `data`, converts each with `convert` and writes it to `out`, which has
    /// room for at least `n`. Returns the number of longs read and the number of bytes that they take. Stops early near
    /// the end of `data`, before a varint that is too long, and before a number that `convert` rejects.
    ///
    /// Elements of `out` after the first `n` may be overwritten.
    #[inline(always)]
    pub(crate) fn longs<M: Convert>(self, data: &[u8], n: usize, out: &mut [M::To], convert: &M) -> (usize, usize) {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { longs(data, n, out, convert) }
    }

    /// The same function as [`scalars::read`](crate::scalars::read), with these instructions.
    #[inline(always)]
    pub(crate) fn scalars(
        self,
        data: &[u8],
        scalars: &[Scalar],
        cells: &Cells<'_>,
    ) -> Result<(usize, usize), Overflow> {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { read_scalars(data, scalars, cells) }
    }

    /// Skips up to `n` longs at the start of `data`. Returns the number of longs skipped and the number of bytes that
    /// they take. Stops early near the end of `data`, and before varints of ten bytes or more.
    #[inline(always)]
    pub(crate) fn skip_longs(self, data: &[u8], n: usize) -> (usize, usize) {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { skip_longs(data, n) }
    }
}

/// Cached, because CPUID takes microseconds in a virtual machine, and each plan asks.
static SLOW_PEXT: LazyLock<bool> = LazyLock::new(slow_pext);

fn slow_pext() -> bool {
    // Newer versions of Rust don't need `unsafe` here.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has CPUID and its leaves 0 and 1.
    let (vendor, version) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    amd && family < 0x19
}

/// Returns a bit for each byte, set if the byte ends a number. The lowest bit is that of the first byte.
#[inline]
#[target_feature(enable = "avx2")]
fn ends(bytes: &[u8; SPAN]) -> u64 {
    let continued = |half: &[u8; 32]| {
        // SAFETY: the reference is valid for reads of 32 bytes, and this load needs no alignment.
        let half = unsafe { _mm256_loadu_si256(half.as_ptr().cast::<__m256i>()) };
        u64::from(_mm256_movemask_epi8(half) as u32)
    };
    let halves = bytes.as_chunks::<32>().0;
    !(continued(&halves[0]) | continued(&halves[1]) << 32)
}

/// An upper bound of the length of varints, in bytes.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Longest {
    Four,
    Eight,
    Nine,
    More,
}

/// A window of bytes that is being decoded.
struct Window<'a> {
    bytes: &'a [u8; SPAN],
    /// Ends of the numbers that haven't been read yet, one bit per byte.
    ends: u64,
    /// Offset of the next number.
    start: usize,
}

impl<'a> Window<'a> {
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn new(bytes: &'a [u8; SPAN]) -> Self {
        let ends = ends(bytes);
        Window { bytes, ends, start: 0 }
    }

    /// Returns an upper bound of the lengths of numbers. `Four` considers only the next `n` numbers, because other
    /// data, such as floats, may follow an array of short numbers. The other variants consider all bytes of the window:
    /// restricting them too would add a branch that the processor can't predict.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn longest(&self, n: usize) -> Longest {
        // The end of the last of the `n` numbers, if it is in the window.
        let end = _pdep_u64(1 << (n - 1).min(WINDOW - 1), self.ends);
        // Bit `i` is set if one, two or four bytes from byte `i` on all have a continuation bit.
        let one = !self.ends;
        let two = one & one >> 1;
        let four = two & two >> 2;
        if four & (end ^ end.wrapping_sub(1)) == 0 {
            return Longest::Four;
        }
        let eight = four & four >> 4;
        match eight {
            0 => Longest::Eight,
            _ if eight & eight >> 1 == 0 => Longest::Nine,
            _ => Longest::More,
        }
    }

    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn word(&self, at: usize) -> u64 {
        let at = at % WINDOW;
        u64::from_le_bytes(std::array::from_fn(|i| self.bytes[at + i]))
    }

    /// Returns the next eight numbers, which may not be longer than four bytes. If fewer ends are left, the remaining
    /// values are arbitrary.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn next_words(&mut self) -> [i32; GROUP] {
        std::array::from_fn(|_| {
            let at = self.start % WINDOW;
            self.start = self.ends.trailing_zeros() as usize + 1;
            self.ends &= self.ends.wrapping_sub(1);
            i32::from_le_bytes(std::array::from_fn(|i| self.bytes[at + i]))
        })
    }

    /// Returns the next number, and whether it is invalid because it exceeds 64 bits. `WIDE` must be set if a number
    /// may be longer than eight bytes. The value is arbitrary if no end is left.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn next<const WIDE: bool>(&mut self) -> (i64, bool) {
        let start = self.start;
        self.start = self.ends.trailing_zeros() as usize + 1;
        self.ends &= self.ends.wrapping_sub(1);
        let len = self.start - start;
        let low = _pext_u64(_bzhi_u64(self.word(start), 8 * len as u32), LOW_BITS);
        if !WIDE {
            return (unzigzag(low), false);
        }
        let at = start % WINDOW + 8;
        let behind = u64::from_le_bytes(std::array::from_fn(|i| self.bytes[at + i]));
        let high = _pext_u64(_bzhi_u64(behind, 8 * len.saturating_sub(8).min(8) as u32), LOW_BITS);
        // The tenth byte contributes only one bit.
        (unzigzag(low | high << 56), len > 10 || high > 0xff)
    }
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn longs<M: Convert>(data: &[u8], n: usize, out: &mut [M::To], convert: &M) -> (usize, usize) {
    let (mut done, mut at) = (0, 0);
    while done < n {
        let Some(bytes) = data.get(at..).and_then(|rest| rest.first_chunk::<SPAN>()) else {
            break;
        };
        let mut window = Window::new(bytes);
        let stop = match window.longest(n - done) {
            Longest::Four => read::<M, true, false>(&mut window, n, &mut done, out, convert),
            Longest::Eight => read::<M, false, false>(&mut window, n, &mut done, out, convert),
            _ => read::<M, false, true>(&mut window, n, &mut done, out, convert),
        };
        at += window.start;
        if stop {
            break;
        }
    }
    (done, at)
}

/// Reads the numbers of a window. Returns whether to stop early. The window then starts after the last number that was
/// read.
#[inline]
#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn read<M: Convert, const SHORT: bool, const WIDE: bool>(
    window: &mut Window<'_>,
    n: usize,
    done: &mut usize,
    out: &mut [M::To],
    convert: &M,
) -> bool {
    let mut available = window.ends.count_ones() as usize;
    if available == 0 {
        return true;
    }
    while *done < n {
        let left = n - *done;
        let wanted = left.min(GROUP);
        if available < wanted && window.start > 0 {
            return false;
        }
        let before = (window.start, window.ends);
        match out[*done..].first_chunk_mut::<GROUP>() {
            Some(group) if available >= wanted => {
                let last = left <= GROUP;
                // Numbers after the last one of the array are converted as well, although they may be arbitrary data.
                // The processor couldn't predict a branch on the number of valid ones.
                let mut wrong = false;
                if SHORT {
                    let those = convert.short(Short::new(window.next_words()), group);
                    wrong = those & ((1 << wanted) - 1) != 0;
                } else {
                    for (i, to) in group.iter_mut().enumerate() {
                        let (value, odd) = window.next::<WIDE>();
                        let (value, bad) = convert.one(value);
                        *to = value;
                        wrong |= (odd | bad) & (i < wanted);
                    }
                }
                if wrong {
                    window.start = before.0;
                    return true;
                }
                *done += wanted;
                if last {
                    let end = _pdep_u64(1 << (wanted - 1), before.1);
                    window.start = end.trailing_zeros() as usize + 1;
                    return false;
                }
                available -= GROUP;
            }
            _ => {
                // `out` has no room for more than `n` numbers, or long numbers fill the window.
                for _ in 0..left.min(available) {
                    let before = window.start;
                    let (value, odd) = window.next::<WIDE>();
                    let (value, bad) = convert.one(value);
                    if odd | bad {
                        window.start = before;
                        return true;
                    }
                    out[*done] = value;
                    *done += 1;
                }
                return false;
            }
        }
    }
    false
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn read_scalars(data: &[u8], scalars: &[Scalar], cells: &Cells<'_>) -> Result<(usize, usize), Overflow> {
    crate::scalars::read(data, scalars, cells, |word| _pext_u64(word, LOW_BITS))
}

#[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
fn skip_longs(data: &[u8], n: usize) -> (usize, usize) {
    let (mut left, mut at) = (n, 0);
    while left > 0 {
        let Some(bytes) = data.get(at..).and_then(|rest| rest.first_chunk::<SPAN>()) else {
            break;
        };
        let window = Window::new(bytes);
        if window.longest(left) == Longest::More {
            break;
        }
        let all = window.ends.count_ones() as usize;
        if all >= left {
            let last = _pdep_u64(1 << (left - 1), window.ends);
            at += last.trailing_zeros() as usize + 1;
            left = 0;
        } else {
            // The next window starts at the start of a number.
            at += WINDOW - window.ends.leading_zeros() as usize;
            left -= all;
        }
    }
    (n - left, at)
}
