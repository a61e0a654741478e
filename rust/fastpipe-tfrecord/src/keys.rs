//! Finds the keys of an Example among the keys that are read.

use std::collections::HashMap;

use fastpipe_batch::{Result, try_collect, try_filled};
use twox_hash::XxHash3_64;

/// An empty slot of the table.
const NONE: u32 = u32::MAX;

/// The keys that are read, in a hash table with linear probing.
#[derive(Debug)]
pub(crate) struct Keys {
    keys: Vec<Box<[u8]>>,
    /// Part of the hash of a key, and its index.
    slots: Vec<(u32, u32)>,
}

impl Keys {
    /// Creates the table. Returns it with the index of each key in it. A key may occur several times.
    pub(crate) fn new<'k>(all: impl Iterator<Item = &'k str>) -> Result<(Keys, Vec<usize>)> {
        let mut known: HashMap<&str, usize> = HashMap::new();
        let mut keys: Vec<Box<[u8]>> = Vec::new();
        let indices = all.map(|key| {
            *known.entry(key).or_insert_with(|| {
                keys.push(key.as_bytes().into());
                keys.len() - 1
            })
        });
        let indices = try_collect(indices, "the keys of features")?;
        let mut slots = try_filled(
            (0, NONE),
            (2 * keys.len()).next_power_of_two().max(2),
            "the keys of features",
        )?;
        for (index, key) in (0..).zip(&keys) {
            let (mut at, mark) = place(key, slots.len());
            while slots[at].1 != NONE {
                at = (at + 1) & (slots.len() - 1);
            }
            slots[at] = (mark, index);
        }
        Ok((Keys { keys, slots }, indices))
    }

    /// Returns the number of different keys.
    pub(crate) fn len(&self) -> usize {
        self.keys.len()
    }

    /// Returns the index of a key.
    pub(crate) fn find(&self, key: &[u8]) -> Option<usize> {
        let (mut at, mark) = place(key, self.slots.len());
        loop {
            match self.slots[at] {
                (_, NONE) => return None,
                (found, index) if found == mark && *self.keys[index as usize] == *key => return Some(index as usize),
                _ => at = (at + 1) & (self.slots.len() - 1),
            }
        }
    }
}

fn place(key: &[u8], slots: usize) -> (usize, u32) {
    let hash = XxHash3_64::oneshot(key);
    (hash as usize & (slots - 1), (hash >> 32) as u32)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn keys_are_found(
            keys in proptest::collection::vec("[a-c]{0,3}", 0..30), others in proptest::collection::vec("[a-d]{0,3}", 0..30)
        ) {
            let (table, indices) = Keys::new(keys.iter().map(String::as_str)).unwrap();
            for (key, &index) in keys.iter().zip(&indices) {
                prop_assert_eq!(table.find(key.as_bytes()), Some(index));
            }
            for other in others.iter().filter(|other| !keys.contains(other)) {
                prop_assert_eq!(table.find(other.as_bytes()), None);
            }
        }
    }
}
