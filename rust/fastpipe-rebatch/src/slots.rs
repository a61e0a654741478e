//! The slots of a row buffer, and tables with an element for each slot.

use fastpipe_batch::{Error, Result, try_reserve, try_reserve_large, try_with_capacity};

/// The purpose of memory, for error messages.
pub(crate) const ROWS: &str = "buffered rows; a smaller shuffle_buffer or batch_size needs less";

/// Maximum bytes by which a table grows in advance.
const AT_ONCE: usize = 64 << 20;

/// Extends a table to `made` elements of `width`, out of at most `most`. New elements are `blank`.
pub(crate) fn make_room<T: Copy>(table: &mut Vec<T>, width: usize, made: usize, most: usize, blank: T) -> Result<()> {
    if made * width > table.capacity() {
        // Memory costs nothing before it is written, but moving it does.
        let at_once = AT_ONCE.checked_div(width * size_of::<T>()).unwrap_or(0);
        reserve(
            table,
            most.min(at_once.max(made.saturating_mul(2))).saturating_mul(width),
        )?;
    }
    table.resize(made * width, blank);
    Ok(())
}

/// Reserves memory for `capacity` elements in total, in large pages if it is large.
pub(crate) fn reserve<T: Copy>(table: &mut Vec<T>, capacity: usize) -> Result<()> {
    try_reserve_large(table, capacity).map_err(|_| Error::out_of_memory(capacity.saturating_mul(size_of::<T>()), ROWS))
}

/// Allocates the slots of a table.
///
/// Slots that are allocated together ascend. A cursor goes round the table, so they come from the region where most
/// slots have been free for longest. Rows are thus written almost sequentially, wherever earlier rows were read from.
#[derive(Debug)]
pub(crate) struct Slots {
    /// A bit for each slot that was returned.
    free: Vec<u64>,
    /// The next word of `free` to examine.
    cursor: usize,
    /// Number of slots in the table.
    made: usize,
    /// Maximum number of slots in the table.
    most: usize,
    /// Number of slots that can be allocated, including slots that the table doesn't have yet.
    available: usize,
}

impl Slots {
    /// Creates an allocator of up to `most` slots. The table grows on demand.
    pub(crate) fn new(most: u32) -> Self {
        Slots {
            free: Vec::new(),
            cursor: 0,
            made: 0,
            most: most as usize,
            available: most as usize,
        }
    }

    /// Number of slots in the table. All allocated slots are below it.
    pub(crate) fn made(&self) -> usize {
        self.made
    }

    /// Maximum number of slots in the table.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Number of slots that can be allocated.
    pub(crate) fn available(&self) -> usize {
        self.available
    }

    /// Allocates up to `count` slots, ascending. There are fewer if the cursor reaches the end of the table, and none
    /// only if no slot is free.
    pub(crate) fn take(&mut self, count: usize) -> Result<Vec<u32>> {
        let count = count.min(self.available);
        let fresh = count.min(self.most - self.made);
        let mut taken = try_with_capacity(count, ROWS)?;
        if fresh > 0 {
            taken.extend((self.made..self.made + fresh).map(|slot| slot as u32));
            let words = (self.made + fresh).div_ceil(64);
            let more = words - self.free.len();
            try_reserve(&mut self.free, more, ROWS)?;
            self.made += fresh;
            self.free.resize(self.made.div_ceil(64), 0);
        }
        while taken.is_empty() && count > 0 {
            while taken.len() < count && self.cursor < self.free.len() {
                let word = &mut self.free[self.cursor];
                while *word != 0 && taken.len() < count {
                    taken.push((self.cursor * 64) as u32 + word.trailing_zeros());
                    *word &= *word - 1;
                }
                self.cursor += usize::from(*word == 0);
            }
            if self.cursor == self.free.len() {
                self.cursor = 0;
            }
        }
        self.available -= taken.len();
        Ok(taken)
    }

    /// Frees allocated slots.
    pub(crate) fn give_back(&mut self, slots: &[u32]) {
        for &slot in slots {
            self.free[slot as usize / 64] |= 1 << (slot % 64);
        }
        self.available += slots.len();
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use fastpipe_order::{FisherYates, Key};

    use super::*;

    #[test]
    fn slots_are_never_shared() {
        for most in [1, 63, 64, 65, 200] {
            let mut slots = Slots::new(most);
            let mut held = BTreeSet::new();
            // The slots to return are random, but the same in each run.
            let mut shuffle = FisherYates::new(Key::default(), u64::MAX);
            for step in 0..2000 {
                let before = slots.available();
                let taken = slots.take(step * 13 % 50).unwrap();
                assert!(taken.is_sorted() && taken.len() <= step * 13 % 50);
                assert!(!taken.is_empty() || before == 0 || step * 13 % 50 == 0);
                assert!(
                    taken
                        .iter()
                        .all(|&slot| slot < slots.made() as u32 && held.insert(slot))
                );
                shuffle.extend(taken);
                let back = shuffle.draw(step * 7 % 31, true).to_vec();
                back.iter().for_each(|slot| assert!(held.remove(slot)));
                slots.give_back(&back);
                assert_eq!(slots.available() + held.len(), most as usize);
            }
        }
    }
}
