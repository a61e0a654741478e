//! Varints with AVX2 and BMI2.
//!
//! One by one, each number waits for the place where the one before ends: some ten cycles from one load to the next. Here
//! the ends among 64 bytes are found at once, as the bits of a register. Clearing its lowest bit takes one cycle, and that
//! is all that a number waits for; the bits of each are then moved together by one instruction. No branch depends on how
//! long a number is.
//!
//! # Why this is sound
//!
//! There are three uses of `unsafe`. One loads 32 bytes from an array of 32 bytes. One asks what processor this is, which all
//! x86-64 ones answer. The others call functions that are
//! compiled for AVX2, BMI1, BMI2, LZCNT and POPCNT: there must be a processor that has them. All of these calls are methods
//! of [`Avx2`], and its only constructor outside of this module, [`Avx2::detect`], asks the processor. All memory is
//! accessed through slices and arrays, whose bounds are checked, or known to the compiler.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __cpuid, __m256i, _bzhi_u64, _mm256_add_epi32, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_ps,
    _mm256_castsi256_si128, _mm256_cmpeq_epi32, _mm256_cvtepi32_epi64, _mm256_extracti128_si256, _mm256_loadu_si256,
    _mm256_madd_epi16, _mm256_maddubs_epi16, _mm256_max_epu32, _mm256_movemask_epi8, _mm256_movemask_ps,
    _mm256_permute2x128_si256, _mm256_set1_epi8, _mm256_set1_epi16, _mm256_set1_epi32, _mm256_set1_epi64x,
    _mm256_setr_epi32, _mm256_setzero_si256, _mm256_srli_epi32, _mm256_storeu_si256, _mm256_sub_epi32,
    _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256, _pdep_u64, _pext_u64,
};

use fastpipe_batch::{Cells, Overflow};

use crate::number::{GROUP, Make};
use crate::plan::Scalar;
use crate::varint::{CONTINUES, unzigzag};

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
    /// `None` where the processor lacks something, or has PEXT in microcode: AMD's before family 19h take dozens of cycles.
    pub(crate) fn detect() -> Option<Avx2> {
        let all = is_x86_feature_detected!("avx2")
            && is_x86_feature_detected!("bmi1")
            && is_x86_feature_detected!("bmi2")
            && is_x86_feature_detected!("lzcnt")
            && is_x86_feature_detected!("popcnt");
        (all && !slow_pext()).then_some(Avx2(()))
    }

    /// Reads up to `n` longs at the start of `data`, and writes each by `make` to `out`, which has room for `n`. Returns how
    /// many were read and how many bytes they took. Stops early where there is something else to do than to read numbers:
    /// where `data` nearly ends, where a number isn't one, or where `make` says that something is wrong with one.
    ///
    /// Whatever lies behind the `n`th place of `out` may be overwritten.
    #[inline(always)]
    pub(crate) fn longs<M: Make>(self, data: &[u8], n: usize, out: &mut [M::To], make: &M) -> (usize, usize) {
        // SAFETY: `self` shows that the processor has these features.
        unsafe { longs(data, n, out, make) }
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

    /// Skips up to `n` longs at the start of `data`. Returns how many, and how many bytes they took. Stops early where `data`
    /// nearly ends, and before numbers of ten bytes or more.
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

/// Numbers that were encoded in four bytes at most, so they have 28 bits.
#[derive(Clone, Copy)]
pub(crate) struct Short(__m256i);

impl Short {
    /// Numbers of which each word has the bytes, and behind them anything. Their bits are moved together for all at once: 7
    /// bits and 7 are 14, 14 and 14 are 28.
    #[inline]
    #[target_feature(enable = "avx2")]
    fn new([a, b, c, d, e, f, g, h]: [i32; GROUP]) -> Self {
        let words = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
        let ends = _mm256_andnot_si256(words, _mm256_set1_epi8(i8::MIN));
        // All bits up to the lowest of these.
        let upto = _mm256_xor_si256(ends, _mm256_add_epi32(ends, _mm256_set1_epi32(-1)));
        let bytes = _mm256_and_si256(_mm256_and_si256(words, upto), _mm256_set1_epi8(0x7f));
        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(0x8001_u16 as i16), bytes);
        let all = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x4000_0001));
        let sign = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(all, _mm256_set1_epi32(1)));
        Short(_mm256_xor_si256(_mm256_srli_epi32::<1>(all), sign))
    }

    /// The numbers.
    #[inline(always)]
    pub(crate) fn get(self) -> [i32; GROUP] {
        let mut to = [0; GROUP];
        self.ints(&mut to);
        to
    }

    #[inline(always)]
    pub(crate) fn ints(self, to: &mut [i32; GROUP]) {
        // SAFETY: there is a `Short`, so the processor has AVX2; 32 bytes are written to, and the store needs no alignment.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast::<__m256i>(), self.0) };
    }

    #[inline(always)]
    pub(crate) fn longs(self, to: &mut [i64; GROUP]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: there is a `Short`, so the processor has AVX2; 64 bytes are written to, and the stores need no alignment.
        unsafe {
            let [low, high] = self.widened();
            _mm256_storeu_si256(to, low);
            _mm256_storeu_si256(to.add(1), high);
        }
    }

    /// Each with the same number in front.
    #[inline(always)]
    pub(crate) fn pairs(self, front: i64, to: &mut [[i64; 2]; GROUP]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: there is a `Short`, so the processor has AVX2; 128 bytes are written to, and the stores need no alignment.
        unsafe {
            let front = _mm256_set1_epi64x(front);
            for (i, four) in self.widened().into_iter().enumerate() {
                // Of each half of a register.
                let (first, second) = (_mm256_unpacklo_epi64(front, four), _mm256_unpackhi_epi64(front, four));
                _mm256_storeu_si256(to.add(2 * i), _mm256_permute2x128_si256::<0x20>(first, second));
                _mm256_storeu_si256(to.add(2 * i + 1), _mm256_permute2x128_si256::<0x31>(first, second));
            }
        }
    }

    /// A bit for each that isn't below the limit, or is negative.
    #[inline(always)]
    pub(crate) fn beyond(self, limit: u64) -> u32 {
        let limit = limit.min(1 << 31) as u32;
        // SAFETY: there is a `Short`, so the processor has AVX2.
        unsafe {
            let greatest = _mm256_max_epu32(self.0, _mm256_set1_epi32(limit as i32));
            _mm256_movemask_ps(_mm256_castsi256_ps(_mm256_cmpeq_epi32(greatest, self.0))) as u32
        }
    }

    #[inline]
    #[target_feature(enable = "avx2")]
    fn widened(self) -> [__m256i; 2] {
        let (low, high) = (_mm256_castsi256_si128(self.0), _mm256_extracti128_si256::<1>(self.0));
        [_mm256_cvtepi32_epi64(low), _mm256_cvtepi32_epi64(high)]
    }
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

    /// How many bytes the longest number takes: up to 4, 8, 9, or more. The former of the next `n`, the others of all: what lies
    /// behind arrays of short numbers may be anything, floats for one, but a closer look at all would be a branch more that
    /// can't be predicted.
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

    /// The next number, and whether it is none. `WIDE` ones may have more than eight bytes. Where no end is left, anything.
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
fn longs<M: Make>(data: &[u8], n: usize, out: &mut [M::To], make: &M) -> (usize, usize) {
    let (mut done, mut at) = (0, 0);
    while done < n {
        let Some(bytes) = data.get(at..).and_then(|rest| rest.first_chunk::<SPAN>()) else {
            break;
        };
        let mut window = Window::new(bytes);
        let stop = match window.longest(n - done) {
            Longest::Four => read::<M, true, false>(&mut window, n, &mut done, out, make),
            Longest::Eight => read::<M, false, false>(&mut window, n, &mut done, out, make),
            _ => read::<M, false, true>(&mut window, n, &mut done, out, make),
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
fn read<M: Make, const SHORT: bool, const WIDE: bool>(
    window: &mut Window<'_>,
    n: usize,
    done: &mut usize,
    out: &mut [M::To],
    make: &M,
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
                // Those behind the last one are made, too, whatever they are: a branch on how many there are couldn't be
                // predicted.
                let mut wrong = false;
                if SHORT {
                    let those = make.short(Short::new(window.next_words()), group);
                    wrong = those & ((1 << wanted) - 1) != 0;
                } else {
                    for (i, to) in group.iter_mut().enumerate() {
                        let (value, odd) = window.next::<WIDE>();
                        let (value, bad) = make.one(value);
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
                    let (value, bad) = make.one(value);
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
