//! Counter-based randomness: a draw is a pure function of what it is for and of where it stands.
//!
//! # The scheme
//!
//! Draws are words of Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC 2011), the
//! generator of NumPy's `np.random.Philox`. Its key is `(seed, epoch)`, its counter `(position / 4, stream, purpose, 0)`, and
//! the draw at `position` is word `position % 4`. A draw below `n` is the upper half of the 128-bit product of a word and `n`:
//! no value is more frequent than another by more than `n / 2^64`, so none is rejected, and the draw of one position never
//! moves that of another.
//!
//! Files are in training somewhere, so the scheme doesn't change: golden tests pin it, here and, against NumPy, in Python.

/// Which reading of the data: all draws are keyed by it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Key {
    /// The user's seed.
    pub seed: u64,
    /// The epoch, from 0.
    pub epoch: u64,
}

/// What a draw is for. Draws for different purposes are independent. The numbers are part of the scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// The order of units: a table of few, or the round keys for many.
    Units = 1,
    /// The order of rows within a window; the stream is the window.
    Window = 2,
    /// The order of rows that pass through a buffer or a pool; the stream is the shard.
    Buffer = 3,
}

/// A sequence of draws with random access.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    key: Key,
    purpose: Purpose,
    stream: u64,
}

/// Words made at once by [`Draws::words`].
pub(crate) const AT_ONCE: u64 = 32;

impl Draws {
    /// The draws for a purpose.
    pub fn new(key: Key, purpose: Purpose, stream: u64) -> Draws {
        Draws { key, purpose, stream }
    }

    /// Four draws, at positions `4 * block` and behind.
    #[inline(always)]
    fn block(&self, block: u64) -> [u64; 4] {
        philox(
            [block, self.stream, self.purpose as u64, 0],
            [self.key.seed, self.key.epoch],
        )
    }

    /// The draw at a position: any word.
    pub fn word(&self, position: u64) -> u64 {
        self.block(position / 4)[(position % 4) as usize]
    }

    /// The draw at a position, below `n`.
    pub fn below(&self, position: u64, n: u64) -> u64 {
        below(self.word(position), n)
    }

    /// Calls `take` with each position of `range`, in order, and its draw.
    #[inline(always)]
    pub fn each(&self, range: std::ops::Range<u64>, mut take: impl FnMut(u64, u64)) {
        let mut first = range.start / 4 * 4;
        while first < range.end {
            let words = self.words(first);
            let stop = range.end.min(first + AT_ONCE);
            for position in first.max(range.start)..stop {
                take(position, words[(position - first) as usize]);
            }
            first += AT_ONCE;
        }
    }

    /// The draws at `first`, a multiple of four, and behind.
    #[inline(always)]
    pub(crate) fn words(&self, first: u64) -> [u64; AT_ONCE as usize] {
        let mut out = [0; AT_ONCE as usize];
        for (i, some) in (0..).zip(out.as_chunks_mut::<{ 4 * LANES }>().0) {
            let block = first / 4 + i * LANES as u64;
            let words: [_; LANES] = philox_lanes(
                std::array::from_fn(|lane| [block + lane as u64, self.stream, self.purpose as u64, 0]),
                [self.key.seed, self.key.epoch],
            );
            some.copy_from_slice(words.as_flattened());
        }
        out
    }
}

/// Blocks that are computed side by side: the multiplications of one needn't wait for those of another.
const LANES: usize = 4;

/// A word as a number below `n`.
#[inline(always)]
pub fn below(word: u64, n: u64) -> u64 {
    ((u128::from(word) * u128::from(n)) >> 64) as u64
}

/// Philox4x64-10.
#[inline(always)]
pub fn philox(counter: [u64; 4], key: [u64; 2]) -> [u64; 4] {
    philox_lanes([counter], key)[0]
}

/// Philox4x64-10 of several counters.
#[inline(always)]
fn philox_lanes<const N: usize>(mut counters: [[u64; 4]; N], [mut k0, mut k1]: [u64; 2]) -> [[u64; 4]; N] {
    for _ in 0..10 {
        for counter in &mut counters {
            let [c0, c1, c2, c3] = *counter;
            let (hi0, lo0) = wide(0xd2e7_470e_e14c_6c93, c0);
            let (hi1, lo1) = wide(0xca5a_8263_9512_1157, c2);
            *counter = [hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0];
        }
        k0 = k0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        k1 = k1.wrapping_add(0xbb67_ae85_84ca_a73b);
    }
    counters
}

/// Both halves of a product.
#[inline(always)]
const fn wide(a: u64, b: u64) -> (u64, u64) {
    let product = a as u128 * b as u128;
    ((product >> 64) as u64, product as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers: `np.random.Philox(counter=c - 1, key=k).random_raw(4)`.
    #[test]
    fn philox_is_that_of_numpy() {
        let pi = [
            0x243f_6a88_85a3_08d3,
            0x1319_8a2e_0370_7344,
            0xa409_3822_299f_31d0,
            0x082e_fa98_ec4e_6c89,
        ];
        let cases = [
            (
                ([0; 4], [0; 2]),
                [
                    0x1655_4d9e_ca36_314c,
                    0xdb20_fe9d_672d_0fdc,
                    0xd7e7_72ce_e186_176b,
                    0x7e68_b68a_ec7b_a23b,
                ],
            ),
            (
                ([u64::MAX; 4], [u64::MAX; 2]),
                [
                    0x87b0_92c3_013f_e90b,
                    0x438c_3c67_be8d_0224,
                    0x9cc7_d7c6_9cd7_77b6,
                    0xa09c_aebf_594f_0ba0,
                ],
            ),
            (
                (pi, [0x4528_21e6_38d0_1377, 0xbe54_66cf_34e9_0c6c]),
                [
                    0xa528_f454_03e6_1d95,
                    0x38c7_2dbd_566e_9788,
                    0xa5a1_610e_72fd_18b5,
                    0x57bd_43b5_e52b_7fe6,
                ],
            ),
        ];
        for ((counter, key), words) in cases {
            assert_eq!(philox(counter, key), words, "{counter:x?}");
        }
    }

    #[test]
    fn draws_are_the_same_one_by_one_and_in_a_row() {
        let draws = Draws::new(Key { seed: 7, epoch: 3 }, Purpose::Window, 5);
        for (from, to) in [(0, 0), (0, 100), (3, 4), (5, 37), (31, 65), (64, 200)] {
            let mut seen = Vec::new();
            draws.each(from..to, |position, word| seen.push((position, word)));
            let expected: Vec<_> = (from..to).map(|p| (p, draws.word(p))).collect();
            assert_eq!(seen, expected);
        }
        assert_eq!(draws.word(6), philox([1, 5, 2, 0], [7, 3])[2]);
    }

    #[test]
    fn draws_below_a_number_stay_there() {
        assert_eq!((below(0, 10), below(u64::MAX, 10), below(u64::MAX, 1)), (0, 9, 0));
        assert_eq!(below(u64::MAX, u64::MAX), u64::MAX - 1);
    }
}
