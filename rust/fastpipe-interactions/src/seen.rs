//! A set of items with constant-time membership tests.

/// Minimum number of bits: 32 KB, which stay in the L1 cache.
const FEWEST_BITS: usize = 1 << 18;

/// Number of bits per item in the set, if there are fewer bits than items.
const BITS_AN_ITEM: usize = 16;

/// The items of one user as a bitmap.
///
/// With up to 2^18 items, each has its own bit. With more, several items share a bit, so that the bitmap stays in the
/// cache. A set bit then means that the item *may* be in the set, and the caller must look it up to be certain.
#[derive(Debug, Default)]
pub(crate) struct Seen {
    words: Vec<u64>,
    mask: u32,
    /// Whether no two items share a bit.
    exact: bool,
}

impl Seen {
    /// Makes room for `many` of `num_items` items. The set must be empty.
    pub(crate) fn resize(&mut self, many: usize, num_items: u32) {
        let enough = FEWEST_BITS.max(many.saturating_mul(BITS_AN_ITEM));
        let bits = enough.min(num_items as usize).next_power_of_two().max(64);
        self.exact = bits >= num_items as usize;
        self.mask = (bits - 1) as u32;
        if self.words.len() < bits / 64 {
            self.words.resize(bits / 64, 0);
        }
    }

    /// Whether no two items share a bit.
    pub(crate) fn is_exact(&self) -> bool {
        self.exact
    }

    #[inline(always)]
    fn place(&self, item: u32) -> (usize, u32) {
        let bit = item & self.mask;
        ((bit / 64) as usize, bit % 64)
    }

    /// Whether an item may be in the set.
    #[inline(always)]
    pub(crate) fn may_have(&self, item: u32) -> bool {
        let (word, bit) = self.place(item);
        self.words[word] >> bit & 1 == 1
    }

    /// Inserts an item. Returns whether its bit was clear before.
    #[inline(always)]
    pub(crate) fn insert(&mut self, item: u32) -> bool {
        let (word, bit) = self.place(item);
        let before = self.words[word];
        self.words[word] = before | 1 << bit;
        before >> bit & 1 == 0
    }

    /// Clears the bit of an item.
    #[inline(always)]
    pub(crate) fn clear(&mut self, item: u32) {
        let (word, bit) = self.place(item);
        self.words[word] &= !(1 << bit);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn items_are_added_and_removed() {
        let mut seen = Seen::default();
        for (many, num_items) in [
            (3, 10),
            (3, 1 << 18),
            (3, (1 << 18) + 1),
            (1 << 20, 1 << 23),
            (3, 64),
            (0, 1),
        ] {
            seen.resize(many, num_items);
            let items = [0, num_items / 2, num_items - 1];
            assert!(items.iter().all(|&item| !seen.may_have(item)), "clear to begin with");
            let new: Vec<bool> = items.iter().map(|&item| seen.insert(item)).collect();
            assert!(new[0] && items.iter().all(|&item| seen.may_have(item)));
            assert!(!seen.insert(items[2]));
            if seen.is_exact() {
                let has = (0..num_items).filter(|&item| seen.may_have(item));
                assert!(has.eq(items.into_iter().collect::<std::collections::BTreeSet<_>>()));
            } else {
                assert!(seen.may_have(items[2] ^ 1 << 18), "they share a bit");
            }
            items.iter().for_each(|&item| seen.clear(item));
        }
        seen.resize(1, 1 << 18);
        assert!(seen.is_exact());
        seen.resize(1, (1 << 18) + 1);
        assert!(!seen.is_exact());
    }
}
