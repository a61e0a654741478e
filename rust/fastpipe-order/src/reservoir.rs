//! Reservoir sampling from a stream of rows of unknown length.
//!
//! Uses Algorithm L of K.-H. Li, "Reservoir-sampling algorithms of time complexity O(n(1+log(N/n)))", ACM TOMS 20
//! (1994). The first rows fill a reservoir. After that, the algorithm draws how many rows to skip, instead of deciding
//! for each row whether it enters. A row that enters replaces a randomly drawn row.
//!
//! The k-th row that enters a full reservoir uses four separate words of [`Purpose::Reservoir`]. The final rows are
//! therefore a pure function of the key, the size of the reservoir and the number of rows. Logarithms are computed by
//! `libm`, so that the result is the same on every platform.

use fastpipe_random::{Draws, Key, Purpose, below};

/// Yields the rows that enter a reservoir, in ascending order, and the slot of each. Ends at row 2^64 - 2.
///
/// ```
/// use fastpipe_order::{Key, Reservoir};
///
/// let mut kept = [0; 3];
/// for (row, slot) in Reservoir::new(3, Key { seed: 7, epoch: 0 }).take_while(|&(row, _)| row < 1000) {
///     kept[slot as usize] = row;
/// }
/// assert_eq!(kept, [299, 445, 171]);
/// ```
#[derive(Clone, Debug)]
pub struct Reservoir {
    draws: Draws,
    rows: u64,
    /// Number of rows that have entered so far.
    entered: u64,
    /// The next row of the stream after the last one that entered.
    next: u64,
    /// Logarithm of the maximum of the uniform random numbers of the rows in the reservoir. Each row of the stream has
    /// such a number, and the rows with the smallest numbers are kept.
    log_greatest: f64,
}

impl Reservoir {
    /// Creates a reservoir of this many rows, at least one.
    pub fn new(rows: u64, key: Key) -> Reservoir {
        Reservoir {
            draws: Draws::new(key, Purpose::Reservoir, 0),
            rows: rows.max(1),
            entered: 0,
            next: 0,
            log_greatest: 0.0,
        }
    }
}

impl Iterator for Reservoir {
    /// The index of a row in the stream, from 0, and its slot, less than the size of the reservoir.
    type Item = (u64, u64);

    fn next(&mut self) -> Option<(u64, u64)> {
        if self.entered < self.rows {
            self.entered += 1;
            self.next += 1;
            return Some((self.entered - 1, self.entered - 1));
        }
        // Draws never run out: a reservoir of n rows is entered about n * ln(N / n) times.
        let [lower, skip, slot] = [0, 1, 2].map(|word| self.draws.word(4 * (self.entered - self.rows) + word));
        self.log_greatest += libm::log(open_unit(lower)) / self.rows as f64;
        let skipped = libm::log(open_unit(skip)) / log_of_rest(self.log_greatest);
        // The cast saturates if the number is too large.
        let row = self.next.saturating_add(skipped as u64);
        self.next = row.checked_add(1)?;
        self.entered += 1;
        Some((row, below(slot, self.rows)))
    }
}

/// Returns a number between 0 and 1 (both exclusive) with 52 random bits.
fn open_unit(word: u64) -> f64 {
    ((word >> 12) as f64 + 0.5) / (1u64 << 52) as f64
}

/// Returns log(1 - exp(log)), accurate to the last digits for all exp(log) between 0 and 1 (M. Mächler, Accurately
/// computing log(1 - exp(-|a|)), 2012).
fn log_of_rest(log: f64) -> f64 {
    if log > -std::f64::consts::LN_2 {
        libm::log(-libm::expm1(log))
    } else {
        libm::log1p(-libm::exp(log))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn kept(rows: u64, total: u64, seed: u64) -> Vec<u64> {
        let mut kept = vec![u64::MAX; rows.min(total) as usize];
        for (row, slot) in Reservoir::new(rows, Key { seed, epoch: 0 }).take_while(|&(row, _)| row < total) {
            kept[slot as usize] = row;
        }
        kept.sort_unstable();
        kept
    }

    /// The sampled rows must never change. These values were recorded when the scheme was defined.
    #[test]
    fn the_drawn_rows_never_change() {
        assert_eq!(kept(5, 100, 42), [10, 19, 22, 74, 85]);
        let far = [
            100_971_635_722,
            144_993_957_263,
            188_639_977_057,
            493_654_629_536,
            751_877_328_680,
        ];
        assert_eq!(kept(5, 1_000_000_000_000, 42), far);
    }

    proptest! {
        #[test]
        fn rows_enter_in_their_order_and_each_stays_one(
            rows in 1u64..50,
            more in 0u64..2000,
            seed in any::<u64>(),
        ) {
            let entered: Vec<_> = Reservoir::new(rows, Key { seed, epoch: 0 }).take(300).collect();
            prop_assert!(entered.windows(2).all(|pair| pair[0].0 < pair[1].0));
            prop_assert!(entered.iter().all(|&(_, slot)| slot < rows));
            prop_assert!(entered.iter().take(rows as usize).zip(0..).all(|(&(row, slot), i)| (row, slot) == (i, i)));
            let found = kept(rows, rows + more, seed);
            prop_assert!(found.windows(2).all(|pair| pair[0] < pair[1]) && found[rows as usize - 1] < rows + more);
        }
    }

    #[test]
    fn the_largest_reservoirs_and_streams_are_supported() {
        let mut small = Reservoir::new(1, Key { seed: 3, epoch: 0 });
        let entered = small.by_ref().count();
        // The expected number is about ln(2^64), which is 44.
        assert!((20..80).contains(&entered), "{entered}");
        assert_eq!(small.next(), None);
        let mut large = Reservoir::new(u64::MAX, Key { seed: 3, epoch: 0 });
        assert_eq!(large.nth(1000), Some((1000, 1000)));
    }

    /// Every row is kept equally often, both in streams hardly longer than the reservoir and in much longer ones. Tests
    /// chi-square over 40 cells to within five standard deviations. Exceeding that by chance has a probability of 1e-6.
    #[test]
    fn rows_are_kept_with_equal_probability() {
        for (total, rows, seeds) in [(40, 8, 4000), (41, 40, 4000), (4000, 1, 8000), (100_000, 2000, 20)] {
            let mut counts = [0u32; 40];
            for seed in 0..seeds {
                for row in kept(rows, total, seed) {
                    counts[(row * 40 / total) as usize] += 1;
                }
            }
            let drawn = (rows * seeds) as f64;
            let square: f64 = counts
                .iter()
                .enumerate()
                .map(|(cell, &count)| {
                    let cells = |to: u64| (to * total).div_ceil(40);
                    let mean = drawn * (cells(cell as u64 + 1) - cells(cell as u64)) as f64 / total as f64;
                    (f64::from(count) - mean).powi(2) / mean
                })
                .sum();
            assert!(square < 39.0 + 5.0 * (2.0f64 * 39.0).sqrt(), "{total} {rows}: {square}");
        }
    }
}
