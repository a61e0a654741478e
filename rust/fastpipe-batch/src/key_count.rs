//! Counts of the keys that were read, and of the keys that a vocabulary leaves out.

use std::iter::Sum;
use std::ops::AddAssign;

/// A number of keys that were read, and how many of them were left out because the vocabulary lacks them. Nulls are not
/// keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCount {
    /// Number of keys.
    pub read: u64,
    /// How many of these were left out.
    pub dropped: u64,
}

impl KeyCount {
    /// Returns the keys that were counted after `before` was counted.
    pub fn since(self, before: KeyCount) -> KeyCount {
        KeyCount {
            read: self.read.saturating_sub(before.read),
            dropped: self.dropped.saturating_sub(before.dropped),
        }
    }
}

/// Counts that another process sent may be wrong, so sums saturate.
impl AddAssign for KeyCount {
    #[inline]
    fn add_assign(&mut self, more: KeyCount) {
        self.read = self.read.saturating_add(more.read);
        self.dropped = self.dropped.saturating_add(more.dropped);
    }
}

impl Sum for KeyCount {
    fn sum<I: Iterator<Item = KeyCount>>(counts: I) -> KeyCount {
        counts.fold(KeyCount::default(), |mut sum, more| {
            sum += more;
            sum
        })
    }
}

/// Adds the counts of a batch to those of earlier batches. Each has one count per column, or none.
pub fn add_key_counts(sums: &mut Vec<KeyCount>, more: &[KeyCount]) {
    if sums.len() < more.len() {
        sums.resize(more.len(), KeyCount::default());
    }
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += *more;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn count(read: u64, dropped: u64) -> KeyCount {
        KeyCount { read, dropped }
    }

    #[test]
    fn sums_saturate() {
        let mut sums = vec![count(1, 1)];
        add_key_counts(&mut sums, &[]);
        assert_eq!(sums, [count(1, 1)]);
        add_key_counts(&mut sums, &[count(u64::MAX, 1), count(3, 2)]);
        assert_eq!(sums, [count(u64::MAX, 2), count(3, 2)]);
        assert_eq!(sums[1].since(count(1, 0)), count(2, 2));
        assert_eq!(count(0, 1).since(count(2, 0)), count(0, 1));
    }
}
