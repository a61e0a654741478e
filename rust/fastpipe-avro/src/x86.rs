//! Varints with AVX2 and BMI2.
//!
//! One by one, each number waits for the place where the one before ends: some ten cycles from one load to the next.
//! Here the ends among 64 bytes are found at once, as the bits of a register. Clearing its lowest bit takes one cycle,
//! and that is all that a number waits for; the bits of each are then moved together by one instruction, or those of
//! eight by a few if none takes more than four bytes. No branch depends on how long a single number is.
//!
//! # Why this is sound
//!
//! There are three uses of `unsafe` here. One loads 32 bytes from an array of 32 bytes. One asks what processor this
//! is, which all x86-64 ones answer. The others call functions that are compiled for AVX2, BMI1, BMI2, LZCNT and
//! POPCNT: there must be a processor that has them. All of these calls are methods of [`Avx2`], and its only
//! constructor outside of this module, [`Avx2::detect`], asks the processor. All memory is accessed through slices and
//! arrays, whose bounds are checked, or known to the compiler.
#![allow(unsafe_code)]

mod short;

use std::arch::x86_64::{__cpuid, __m256i, _bzhi_u64, _mm256_loadu_si256, _mm256_movemask_epi8, _pdep_u64, _pext_u64};

use fastpipe_batch::{Cells, Overflow};

use crate::convert::Convert;
use crate::plan::Scalar;
use crate::varint::{CONTINUES, unzigzag};

pub(crate) use self::short::{GROUP, Short};

/// Shows that the processor has AVX2, BMI1, BMI2, LZCNT and POPCNT.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Avx2(());

/// The bits of a number.
const LOW_BITS: u64 = !CONTINUES;

/// Bytes in which ends are looked for at once.
const WINDOW: usize = 64;

/// Bytes that are loaded from: 16 behind the last where a number can start.
const SPAN: usize = WINDOW + 16;

impl Avx2 {
    /// `None` where the processor lacks something, or has PEXT in microcode: AMD's before family 19h take dozens of
    /// cycles.
    pub(crate) fn detect() -> Option<Avx2> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        (all && !slow_pext()).then_some(Avx2(()))
    }

    /// Reads up to `n` longs at the start of `data`, and writes each by `convert` to `out`, which has room for `n`.
    /// Returns how many were read and how many bytes they took. Stops early where `data` nearly ends, before a number
    /// that is too long, and where `convert` says that something is wrong with one.
    ///
    /// Whatever lies behind the `n`th place of `out` may be overwritten.
    #[inline(always)]
    pub(crate) fn longs<M: Convert>(self, data: &[u8], n: usize, out: &mut [M::To], convert: &M) -> (usize, usize) {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { longs(data, n, out, convert) }
    }

    /// [`scalars::read`](crate::scalars::read).
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

    /// Skips up to `n` longs at the start of `data`. Returns how many, and how many bytes they took. Stops early where
    /// `data` nearly ends, and before numbers of ten bytes or more.
    #[inline(always)]
    pub(crate) fn skip_longs(self, data: &[u8], n: usize) -> (usize, usize) {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { skip_longs(data, n) }
    }
}

fn slow_pext() -> bool {
    // Later versions of Rust need no `unsafe` for it.
    #[allow(unused_unsafe)]
    // SAFETY: every x86-64 processor has CPUID and its leaves 0 and 1.
    let (vendor, version) = unsafe { (__cpuid(0), __cpuid(1).eax) };
    let amd = [vendor.ebx, vendor.edx, vendor.ecx].map(u32::to_le_bytes).concat() == b"AuthenticAMD";
    let family = (version >> 8 & 0xf) + (version >> 20 & 0xff);
    amd && family < 0x19
}

/// Which of the bytes end a number, the first as the lowest bit.
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

/// How many bytes a number takes at most.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Longest {
    Four,
    Eight,
    Nine,
    More,
}

/// Bytes that are being read.
struct Window<'a> {
    bytes: &'a [u8; SPAN],
    /// The ends of the numbers that weren't read yet.
    ends: u64,
    /// Where the next number starts.
    start: usize,
}

impl<'a> Window<'a> {
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn new(bytes: &'a [u8; SPAN]) -> Self {
        let ends = ends(bytes);
        Window { bytes, ends, start: 0 }
    }

    /// How many bytes the longest number takes: up to 4, 8, 9, or more. The former of the next `n`, the others of all:
    /// what lies behind arrays of short numbers may be anything, floats for one, but a closer look at all would be a
    /// branch more that can't be predicted.
    #[inline]
    #[target_feature(enable = "avx2,bmi1,bmi2,lzcnt,popcnt")]
    fn longest(&self, n: usize) -> Longest {
        // The end of the last of them, if it is in the window.
        let end = _pdep_u64(1 << (n - 1).min(WINDOW - 1), self.ends);
        // Bytes that are continued, and so are those behind them: two, four, eight.
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

    /// The next numbers, none of which takes more than four bytes. Where no end is left, anything.
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

    /// The next number, and whether it is none. `WIDE` ones may have more than eight bytes. Where no end is left,
    /// anything.
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
        // The tenth byte has room for one bit.
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

/// Reads the numbers of a window. Returns whether to stop; the window then starts behind what is done.
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
                // Those behind the last one are made, too, whatever they are: a branch on how many there are couldn't
                // be predicted.
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
                // There is no room for more than `n`, or long numbers fill the window.
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
            // The next window starts where a number does.
            at += WINDOW - window.ends.leading_zeros() as usize;
            left -= all;
        }
    }
    (n - left, at)
}
