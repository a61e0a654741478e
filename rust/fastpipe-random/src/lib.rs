//! Counter-based randomness: a draw is a pure function of its key, purpose and position.
//!
//! # The scheme
//!
//! Draws are words of Philox4x64-10 (Salmon, Moraes, Dror, Shaw: "Parallel random numbers: as easy as 1, 2, 3", SC
//! 2011), the generator of NumPy's `np.random.Philox`. Its key is `(seed, epoch)`, and its counter is `(position / 4,
//! stream, purpose, 0)`. The draw at `position` is word `position % 4`.
//!
//! A draw below `n` is the upper half of the 128-bit product of a word and `n`. The frequencies of any two values
//! differ by at most `n / 2^64`, so no word is rejected, and the draw at one position never affects the draw at
//! another. Callers that need exactly uniform draws, or only 32 bits, document how they use the words.
//!
//! Training runs and saved states depend on the scheme, so it never changes. Golden tests pin it, here and,
//! against NumPy, in Python.
#![forbid(unsafe_code)]

use fastpipe_memory::prefetch_of;

/// The seed and epoch that all draws of an epoch depend on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Hash)]
pub struct Key {
    /// The user's seed.
    pub seed: u64,
    /// The index of the epoch, from 0.
    pub epoch: u64,
}

/// The purpose of a draw. Draws for different purposes are independent. The numbers are part of the scheme.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[repr(u64)]
pub enum Purpose {
    /// The order of units: a table for few units, round keys for many.
    Units = 1,
    /// The order of rows in a window. The stream is the window.
    Window = 2,
    /// The order of rows in a buffer or pool. The stream is the shard.
    Buffer = 3,
    /// Negatives for training: items that a user has not seen, for one epoch. The stream is the attempt.
    Negatives = 4,
    /// Items that a user has not seen, for evaluation. The stream is the attempt.
    Candidates = 5,
    /// The rows of a sample: a table for few rows, round keys for many. Stream 2 is for samples with replacement.
    Sample = 6,
    /// Byte offsets at which rows are searched when the number of rows is unknown. The position is the attempt.
    Bytes = 7,
    /// The rows of a reservoir: four words for each row that enters a full reservoir.
    Reservoir = 8,
    /// Seeds of items. The stream is the batch, and each row has four words.
    Items = 9,
    /// The order of cells of files, and the lap in which each row is taken: stream 2, where the position is the row's
    /// first byte. Stream 3 is for cells whose rows are counted in advance.
    Cells = 10,
    /// The readers of a mixture's rows. The stream is the first row of the phase.
    Assignment = 11,
}

/// A sequence of draws with random access.
#[derive(Clone, Copy, Debug)]
pub struct Draws {
    key: Key,
    purpose: Purpose,
    stream: u64,
}

/// The number of items for which [`Draws::swap`] draws in advance.
const BEHIND: usize = 32;

/// The number of words that [`Draws::words`] computes at once.
pub const AT_ONCE: u64 = 32;

impl Draws {
    /// Creates the draws for a purpose.
    pub fn new(key: Key, purpose: Purpose, stream: u64) -> Draws {
        Draws { key, purpose, stream }
    }

    /// Returns the four draws from position `4 * block`.
    #[inline(always)]
    fn block(&self, block: u64) -> [u64; 4] {
        philox(
            [block, self.stream, self.purpose as u64, 0],
            [self.key.seed, self.key.epoch],
        )
    }

    /// Returns the draw at a position, as a full word.
    pub fn word(&self, position: u64) -> u64 {
        self.block(position / 4)[(position % 4) as usize]
    }

    /// Returns the draw at a position, as a number below `n`.
    pub fn below(&self, position: u64, n: u64) -> u64 {
        below(self.word(position), n)
    }

    /// Swaps each of the first `count` items with itself or a later item. The draw for item `k` is at position `from +
    /// k`, and selects one of `span(from + k)` items, starting with item `k`.
    #[inline(always)]
    pub fn swap<T: Copy>(&self, from: u64, count: usize, items: &mut [T], mut span: impl FnMut(u64) -> u64) {
        let blocks = self.blocks();
        // The target of an item is drawn several items before the swap. Reading the target from memory takes long, so
        // it is prefetched. The processor also overlaps the swaps with the multiplications of the next draws.
        let mut others = [0; BEHIND];
        let (mut block, mut skipped, mut at) = (from / 4, (from % 4) as usize, 0);
        while at < count {
            let words = blocks.at([block, block + 1]);
            let words = &words.as_flattened()[skipped..];
            for &word in &words[..words.len().min(count - at)] {
                let other = at + below(word, span(from + at as u64)) as usize;
                if let Some(item) = items.get(other) {
                    prefetch_of(item);
                }
                let before = std::mem::replace(&mut others[at % BEHIND], other);
                if let Some(k) = at.checked_sub(BEHIND) {
                    items.swap(k, before);
                }
                at += 1;
            }
            (block, skipped) = (block + 2, 0);
        }
        for k in count.saturating_sub(BEHIND)..count {
            items.swap(k, others[k % BEHIND]);
        }
    }

    /// Returns the draws from position `first`, which must be a multiple of four.
    #[inline(always)]
    pub fn words(&self, first: u64) -> [u64; AT_ONCE as usize] {
        self.blocks().words(first)
    }

    /// Precomputes the part that all these draws share, for callers that need many draws.
    #[inline(always)]
    pub fn blocks(&self) -> Blocks {
        Blocks::new(self)
    }
}

/// Draws whose counters differ only in the block. Half of the multiplications of the first two rounds are the same for
/// all blocks, and are done once.
#[derive(Clone, Copy, Debug)]
pub struct Blocks {
    keys: [[u64; 2]; ROUNDS],
    /// Words 0 and 1 after the first round.
    first: [u64; 2],
    /// Word 2 after the second round, without the part that depends on the block, and word 3.
    second: [u64; 2],
}

impl Blocks {
    #[inline(always)]
    fn new(draws: &Draws) -> Blocks {
        let mut keys = [[draws.key.seed, draws.key.epoch]; ROUNDS];
        for i in 1..ROUNDS {
            keys[i] = next_key(keys[i - 1]);
        }
        let (hi, lo) = wide(FACTORS[1], draws.purpose as u64);
        let first = [hi ^ draws.stream ^ keys[0][0], lo];
        let (hi, lo) = wide(FACTORS[0], first[0]);
        let second = [hi ^ keys[1][1], lo];
        Blocks { keys, first, second }
    }

    /// Returns the draws from position `first`, which must be a multiple of four.
    #[inline(always)]
    pub fn words(&self, first: u64) -> [u64; AT_ONCE as usize] {
        let mut out = [0; AT_ONCE as usize];
        for (i, some) in (0..).zip(out.as_chunks_mut::<{ 4 * LANES }>().0) {
            let words = self.at(std::array::from_fn::<_, LANES, _>(|lane| {
                first / 4 + i * LANES as u64 + lane as u64
            }));
            some.copy_from_slice(words.as_flattened());
        }
        out
    }

    /// Returns the four draws of each block. The draws of block `b` are at the positions from `4 * b`.
    #[inline(always)]
    pub fn at<const N: usize>(&self, blocks: [u64; N]) -> [[u64; 4]; N] {
        let mut counters = blocks.map(|block| {
            let (hi, lo) = wide(FACTORS[0], block);
            let (c2, c3) = (hi ^ self.keys[0][1], lo);
            let (hi, lo) = wide(FACTORS[1], c2);
            [
                hi ^ self.first[1] ^ self.keys[1][0],
                lo,
                self.second[0] ^ c3,
                self.second[1],
            ]
        });
        for &keys in &self.keys[2..] {
            for counter in &mut counters {
                *counter = round(*counter, keys);
            }
        }
        counters
    }
}

/// The number of blocks that are best computed together. Their multiplications are independent, so the processor
/// overlaps them.
pub const LANES: usize = 4;

/// Maps a word to a number below `n`.
#[inline(always)]
pub fn below(word: u64, n: u64) -> u64 {
    ((u128::from(word) * u128::from(n)) >> 64) as u64
}

/// Computes Philox4x64-10.
#[inline(always)]
pub fn philox(mut counter: [u64; 4], mut key: [u64; 2]) -> [u64; 4] {
    for _ in 0..ROUNDS {
        counter = round(counter, key);
        key = next_key(key);
    }
    counter
}

#[inline(always)]
fn round([c0, c1, c2, c3]: [u64; 4], [k0, k1]: [u64; 2]) -> [u64; 4] {
    let (hi0, lo0) = wide(FACTORS[0], c0);
    let (hi1, lo1) = wide(FACTORS[1], c2);
    [hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0]
}

#[inline(always)]
fn next_key([k0, k1]: [u64; 2]) -> [u64; 2] {
    [
        k0.wrapping_add(0x9e37_79b9_7f4a_7c15),
        k1.wrapping_add(0xbb67_ae85_84ca_a73b),
    ]
}

const ROUNDS: usize = 10;
const FACTORS: [u64; 2] = [0xd2e7_470e_e14c_6c93, 0xca5a_8263_9512_1157];

/// Returns both halves of a product.
#[inline(always)]
const fn wide(a: u64, b: u64) -> (u64, u64) {
    let product = a as u128 * b as u128;
    ((product >> 64) as u64, product as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Known answers from `np.random.Philox(counter=c - 1, key=k).random_raw(4)`.
    #[test]
    fn philox_matches_numpy() {
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
    fn single_and_consecutive_draws_are_equal() {
        let draws = Draws::new(Key { seed: 7, epoch: 3 }, Purpose::Window, 5);
        for (from, to) in [(0, 0), (0, 100), (3, 4), (5, 37), (5, 38), (6, 37), (31, 65), (64, 200)] {
            let mut swapped: Vec<_> = (from..100_000).collect();
            let mut expected = swapped.clone();
            draws.swap(from, (to - from) as usize, &mut swapped, |position| 1000 + position);
            for position in from..to {
                let at = (position - from) as usize;
                expected.swap(at, at + draws.below(position, 1000 + position) as usize);
            }
            assert_eq!(swapped, expected);
        }
        assert_eq!(draws.word(6), philox([1, 5, 2, 0], [7, 3])[2]);
    }

    #[test]
    fn bounded_draws_stay_below_their_bound() {
        assert_eq!((below(0, 10), below(u64::MAX, 10), below(u64::MAX, 1)), (0, 9, 0));
        assert_eq!(below(u64::MAX, u64::MAX), u64::MAX - 1);
    }
}
