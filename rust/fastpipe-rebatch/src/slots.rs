//! The slots of a row buffer, and tables that have an element at each.

use fastpipe_batch::{Error, Result, try_reserve, try_reserve_large, try_with_capacity};

/// What memory is for.
pub(crate) const ROWS: &str = "rows that wait; a smaller shuffle_buffer or batch_size needs less";

/// Up to this many bytes of a table are asked for at once.
const AT_ONCE: usize = 64 << 20;

/// Makes room in a table for `made` elements of `width`, of which there may be `most`. New ones are blank.
pub(crate) fn make_room<T: Copy>(table: &mut Vec<T>, width: usize, made: usize, most: usize, blank: T) -> Result<()> {
    if made * width > table.capacity() {
        // Memory costs nothing before it is written, moving it does.
        let at_once = AT_ONCE.checked_div(width * size_of::<T>()).unwrap_or(0);
        reserve(
            table,
            most.min(at_once.max(made.saturating_mul(2))).saturating_mul(width),
        )?;
    }
    table.resize(made * width, blank);
    Ok(())
}

/// Takes memory for this many elements in all, in large pages if it is much.
pub(crate) fn reserve<T: Copy>(table: &mut Vec<T>, capacity: usize) -> Result<()> {
    try_reserve_large(table, capacity).map_err(|_| Error::out_of_memory(capacity.saturating_mul(size_of::<T>()), ROWS))
}

/// Gives out slots of a table, and takes them back.
///
/// Slots that are given out together ascend, and come from where most have been free for longest: a cursor goes round
/// the table. So rows are written almost in sequence, wherever those before them were read from.
#[derive(Debug)]
pub(crate) struct Slots {
    /// A bit for each slot that was taken back.
    free: Vec<u64>,
    /// The word of `free` that is looked at next.
    cursor: usize,
    /// Slots that there are.
    made: usize,
    /// Slots that there may be.
    most: usize,
    /// Slots that nobody has, of those that there may be.
    available: usize,
}

impl Slots {
    /// A table of up to `most` slots. It grows as slots are asked for.
    pub(crate) fn new(most: u32) -> Self {
        Slots {
            free: Vec::new(),
            cursor: 0,
            made: 0,
            most: most as usize,
            available: most as usize,
        }
    }

    /// Slots that there are: all that were given out are below.
    pub(crate) fn made(&self) -> usize {
        self.made
    }

    /// Slots that there may be.
    pub(crate) fn most(&self) -> usize {
        self.most
    }

    /// Slots that can be had.
    pub(crate) fn available(&self) -> usize {
        self.available
    }

    /// Up to `count` slots, ascending: fewer where the cursor comes to the end of the table, and none only if none is
    /// left.
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

    /// Takes back slots that were given out.
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
    fn nobody_gets_a_slot_that_another_has() {
        for most in [1, 63, 64, 65, 200] {
            let mut slots = Slots::new(most);
            let mut held = BTreeSet::new();
            // Which are given back is random, yet the same each time.
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
