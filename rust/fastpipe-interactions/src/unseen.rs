//! The list of items that a user has not seen.

use crate::alias::Weights;

/// The items that one user has not seen, and their cumulative weights. Both are computed on demand.
#[derive(Debug, Default)]
pub(crate) struct Unseen {
    items: Vec<u32>,
    is_listed: bool,
    /// The cumulative weights of the items, each inclusive.
    sums: Vec<f64>,
}

impl Unseen {
    /// Resets the list for another user.
    pub(crate) fn clear(&mut self) {
        self.is_listed = false;
        self.sums.clear();
    }

    /// Lists the items that are not in `seen`.
    pub(crate) fn list(&mut self, seen: &[u32], num_items: u32) -> &mut [u32] {
        if !self.is_listed {
            self.is_listed = true;
            self.items.clear();
            let mut next = 0;
            for &item in seen {
                self.items.extend(next..item);
                next = item + 1;
            }
            self.items.extend(next..num_items);
        }
        &mut self.items
    }

    /// Draws one of the listed items by weight.
    pub(crate) fn weigh(&mut self, weights: &Weights, word: u64) -> u32 {
        if self.sums.is_empty() {
            self.sum(weights, |_| false);
        }
        self.search(word)
    }

    /// Draws one of the listed items by weight, except the items that are `drawn`.
    pub(crate) fn weigh_without(&mut self, weights: &Weights, word: u64, drawn: impl Fn(u32) -> bool) -> u32 {
        self.sum(weights, drawn);
        self.search(word)
    }

    fn sum(&mut self, weights: &Weights, drawn: impl Fn(u32) -> bool) {
        let mut sum = 0.0;
        self.sums.clear();
        self.sums.extend(self.items.iter().map(|&item| {
            sum += if drawn(item) { 0.0 } else { weights.of(item) };
            sum
        }));
    }

    /// Returns the item at a fraction of the total weight. The fraction is the upper 53 bits of a word.
    fn search(&self, word: u64) -> u32 {
        let all = self.sums.last().copied().unwrap_or(0.0);
        let share = (word >> 11) as f64 / (1u64 << 53) as f64 * all;
        let mut at = self.sums.partition_point(|sum| *sum <= share);
        if at == self.sums.len() {
            // The product was rounded up to the total. The result is the last item with a positive weight.
            at = self.sums.partition_point(|sum| *sum < all);
        }
        self.items[at]
    }
}
