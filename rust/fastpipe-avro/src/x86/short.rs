//! Decodes eight short numbers at once.
//!
//! # Why this is sound
//!
//! This module uses `unsafe` for two purposes. One is to call AVX2 instructions. A [`Short`] exists only if the
//! processor supports AVX2. [`Short::new`] is compiled for AVX2, so only code that has checked the processor can call
//! it. The other is to store registers in arrays. The arrays have exactly the size of the stores, which need no
//! alignment.
#![allow(unsafe_code)]

use std::arch::x86_64::{
    __m256i, _mm256_add_epi32, _mm256_and_si256, _mm256_andnot_si256, _mm256_castsi256_ps, _mm256_castsi256_si128,
    _mm256_cmpeq_epi32, _mm256_cvtepi32_epi64, _mm256_extracti128_si256, _mm256_madd_epi16, _mm256_maddubs_epi16,
    _mm256_max_epu32, _mm256_movemask_ps, _mm256_permute2x128_si256, _mm256_set1_epi8, _mm256_set1_epi16,
    _mm256_set1_epi32, _mm256_set1_epi64x, _mm256_setr_epi32, _mm256_setzero_si256, _mm256_srli_epi32,
    _mm256_storeu_si256, _mm256_sub_epi32, _mm256_unpackhi_epi64, _mm256_unpacklo_epi64, _mm256_xor_si256,
};

/// Number of values that are decoded at once.
pub(crate) const GROUP: usize = 8;

/// Numbers whose encodings take at most four bytes, so that they have at most 28 bits.
#[derive(Clone, Copy)]
pub(crate) struct Short(__m256i);

impl Short {
    /// Decodes numbers, each from a word that begins with its bytes. Any bytes may follow them. The payload bits of all
    /// numbers are packed in parallel: two groups of 7 bits into 14, and two of 14 into 28.
    #[inline]
    #[target_feature(enable = "avx2")]
    pub(super) fn new([a, b, c, d, e, f, g, h]: [i32; GROUP]) -> Self {
        let words = _mm256_setr_epi32(a, b, c, d, e, f, g, h);
        let ends = _mm256_andnot_si256(words, _mm256_set1_epi8(i8::MIN));
        // All bits up to the lowest end.
        let upto = _mm256_xor_si256(ends, _mm256_add_epi32(ends, _mm256_set1_epi32(-1)));
        let bytes = _mm256_and_si256(_mm256_and_si256(words, upto), _mm256_set1_epi8(0x7f));
        let pairs = _mm256_maddubs_epi16(_mm256_set1_epi16(0x8001_u16 as i16), bytes);
        let all = _mm256_madd_epi16(pairs, _mm256_set1_epi32(0x4000_0001));
        let sign = _mm256_sub_epi32(_mm256_setzero_si256(), _mm256_and_si256(all, _mm256_set1_epi32(1)));
        Short(_mm256_xor_si256(_mm256_srli_epi32::<1>(all), sign))
    }

    /// Returns the numbers.
    #[inline(always)]
    pub(crate) fn get(self) -> [i32; GROUP] {
        let mut to = [0; GROUP];
        self.ints(&mut to);
        to
    }

    #[inline(always)]
    pub(crate) fn ints(self, to: &mut [i32; GROUP]) {
        // SAFETY: AVX2 is available (see above), and `to` has room for the 32 bytes.
        unsafe { _mm256_storeu_si256(to.as_mut_ptr().cast::<__m256i>(), self.0) };
    }

    #[inline(always)]
    pub(crate) fn longs(self, to: &mut [i64; GROUP]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: AVX2 is available (see above), and `to` has room for the 64 bytes.
        unsafe {
            let [low, high] = self.widened();
            _mm256_storeu_si256(to, low);
            _mm256_storeu_si256(to.add(1), high);
        }
    }

    /// Writes pairs of `front` and each number.
    #[inline(always)]
    pub(crate) fn pairs(self, front: i64, to: &mut [[i64; 2]; GROUP]) {
        let to = to.as_mut_ptr().cast::<__m256i>();
        // SAFETY: AVX2 is available (see above), and `to` has room for the 128 bytes.
        unsafe {
            let front = _mm256_set1_epi64x(front);
            for (i, four) in self.widened().into_iter().enumerate() {
                // These instructions work on each half of a register separately.
                let (first, second) = (_mm256_unpacklo_epi64(front, four), _mm256_unpackhi_epi64(front, four));
                _mm256_storeu_si256(to.add(2 * i), _mm256_permute2x128_si256::<0x20>(first, second));
                _mm256_storeu_si256(to.add(2 * i + 1), _mm256_permute2x128_si256::<0x31>(first, second));
            }
        }
    }

    /// Returns a bit for each number that is negative or not less than the limit.
    #[inline(always)]
    pub(crate) fn beyond(self, limit: u64) -> u32 {
        let limit = limit.min(1 << 31) as u32;
        // SAFETY: AVX2 is available (see above).
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
