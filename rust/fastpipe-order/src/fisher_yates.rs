//! A shuffle within a moving window of bounded length.

use std::collections::TryReserveError;

use fastpipe_random::{Draws, Key, Purpose};

/// A Fisher-Yates shuffle of a sequence that arrives in parts. Only a window of the sequence is known at a time.
///
/// Draw `i` swaps the item at position `i` with the item at a position drawn uniformly from `[i, min(i + span,
/// total))`, and returns it. The result has the distribution of `tf.data`'s `shuffle(span)`, which keeps `span` items,
/// returns a random one and replaces it by the next input. With a span of at least the total, it is a complete
/// Fisher-Yates shuffle. With a span of 1, nothing moves.
///
/// Draw `i` uses [`Purpose::Buffer`], stream 0, at position `i`. The output therefore depends only on the key, the span
/// and the input. It doesn't depend on how the input was split or how many items were drawn at a time.
///
/// ```
/// use fastpipe_order::{FisherYates, Key};
///
/// let mut shuffle = FisherYates::new(Key { seed: 7, epoch: 0 }, 4);
/// shuffle.extend(0..10);
/// assert_eq!(shuffle.draw(5, false).len(), 5);
/// assert_eq!(shuffle.draw(5, false).len(), 2); // The next draw would need an eleventh item, or the end.
/// assert_eq!(shuffle.draw(5, true).len(), 3);
/// ```
#[derive(Clone, Debug)]
pub struct FisherYates<T> {
    draws: Draws,
    span: u64,
    /// Number of draws so far.
    drawn: u64,
    /// Items before `head` were returned and can be overwritten. Items from `head` on are still to be drawn.
    items: Vec<T>,
    head: usize,
}

impl<T: Copy> FisherYates<T> {
    /// Creates a shuffle without items. A `span` of 0 counts as 1.
    pub fn new(key: Key, span: u64) -> Self {
        FisherYates {
            draws: Draws::new(key, Purpose::Buffer, 0),
            span: span.max(1),
            drawn: 0,
            items: Vec::new(),
            head: 0,
        }
    }

    /// Returns the number of items that were added and not yet drawn.
    pub fn len(&self) -> usize {
        self.items.len() - self.head
    }

    /// Whether all added items were drawn.
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Reserves room for `more` further items.
    ///
    /// # Errors
    ///
    /// If the memory can't be allocated.
    pub fn try_reserve(&mut self, more: usize) -> Result<(), TryReserveError> {
        self.items.try_reserve(more)
    }

    /// Adds the next items of the input.
    pub fn extend(&mut self, items: impl IntoIterator<Item = T>) {
        // This moves no more items than were drawn since the last time, so the cost is amortized.
        if self.head >= self.items.len() - self.head {
            self.items.drain(..self.head);
            self.head = 0;
        }
        self.items.extend(items);
    }

    /// Returns the next items, at most `count`. Until the input has `ended`, drawing one item needs `span` items, and
    /// drawing `count` items needs `span + count - 1`.
    pub fn draw(&mut self, count: usize, ended: bool) -> &[T] {
        let ready = if ended {
            self.len()
        } else {
            (self.len() as u64).saturating_sub(self.span - 1) as usize
        };
        let count = count.min(ready);
        let (first, span) = (self.drawn, self.span);
        let window = &mut self.items[self.head..];
        let all = first + window.len() as u64;
        self.draws.swap(first, count, window, |i| span.min(all - i));
        self.drawn += count as u64;
        self.head += count;
        &self.items[self.head - count..self.head]
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Shuffles all positions in one loop, one draw at a time.
    fn naive(key: Key, span: u64, total: u64) -> Vec<u64> {
        let draws = Draws::new(key, Purpose::Buffer, 0);
        let mut items: Vec<u64> = (0..total).collect();
        for i in 0..total {
            let j = i + draws.below(i, span.min(total - i));
            items.swap(i as usize, j as usize);
        }
        items
    }

    #[test]
    fn a_span_of_one_moves_nothing() {
        for span in [0, 1] {
            let mut shuffle = FisherYates::new(Key { seed: 3, epoch: 0 }, span);
            shuffle.extend(0..100);
            assert_eq!(shuffle.draw(1000, false), (0..100).collect::<Vec<_>>());
            assert!(shuffle.is_empty());
        }
    }

    #[test]
    fn nothing_is_drawn_before_the_span_is_known() {
        let mut shuffle = FisherYates::new(Key::default(), 10);
        shuffle.extend(0..9);
        assert!(shuffle.draw(3, false).is_empty());
        shuffle.extend(9..11);
        assert_eq!(shuffle.draw(3, false).len(), 2);
        assert!(shuffle.draw(3, false).is_empty());
        assert_eq!(shuffle.len(), 9);
        assert_eq!(shuffle.draw(100, true).len(), 9);
        assert!(shuffle.draw(1, true).is_empty());
    }

    #[test]
    fn the_longest_span_is_supported() {
        let mut shuffle = FisherYates::new(Key { seed: 1, epoch: 2 }, u64::MAX);
        shuffle.extend(0..50);
        assert!(shuffle.draw(10, false).is_empty());
        assert_eq!(shuffle.draw(50, true), naive(Key { seed: 1, epoch: 2 }, u64::MAX, 50));
    }

    /// The order must never change. These values were recorded when it was defined.
    #[test]
    fn the_order_never_changes() {
        let mut shuffle = FisherYates::new(Key { seed: 42, epoch: 1 }, 5);
        shuffle.extend(0..12);
        assert_eq!(shuffle.draw(12, true), [0, 2, 5, 4, 6, 3, 8, 11, 7, 9, 1, 10]);
    }

    proptest! {
        #[test]
        fn however_it_comes_and_goes_the_order_is_the_naive_one(
            seed: u64,
            epoch: u64,
            span in 1u64..40,
            steps in proptest::collection::vec((0u64..50, 0usize..30), 0..20),
        ) {
            let key = Key { seed, epoch };
            let mut shuffle = FisherYates::new(key, span);
            let (mut total, mut seen) = (0, Vec::new());
            for (come, go) in steps {
                shuffle.extend(total..total + come);
                total += come;
                let drawn = shuffle.draw(go, false).to_vec();
                prop_assert!(drawn.len() == go || (shuffle.len() as u64) < span);
                seen.extend(drawn);
                prop_assert_eq!(seen.len() + shuffle.len(), total as usize);
            }
            while !shuffle.is_empty() {
                seen.extend_from_slice(shuffle.draw(7, true));
            }
            prop_assert_eq!(seen, naive(key, span, total));
        }
    }
}
