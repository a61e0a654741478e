//! Subsets of positives: the k-core, and the positives that a mask keeps.

use fastpipe_batch::{Error, ErrorKind, Result, try_with_capacity};

use crate::csr::Csr;

/// Positives in compressed sparse rows: see [`Csr`].
#[derive(Clone, Copy, Debug)]
pub struct Rows<'a> {
    offsets: &'a [i64],
    items: &'a [u32],
    sequence: Option<&'a [u32]>,
}

impl<'a> Rows<'a> {
    /// Creates rows from the arrays of a [`Csr`].
    pub fn new(offsets: &'a [i64], items: &'a [u32], sequence: Option<&'a [u32]>) -> Result<Rows<'a>> {
        let ascend = offsets.windows(2).all(|pair| pair[0] <= pair[1]);
        let ends = (
            offsets.first() == Some(&0),
            offsets.last() == Some(&(items.len() as i64)),
        );
        let places = sequence.is_none_or(|sequence| sequence.len() == items.len());
        if !ascend || ends != (true, true) || !places {
            return Err(Error::new(ErrorKind::Shape, "offsets, items and sequence don't match"));
        }
        Ok(Rows {
            offsets,
            items,
            sequence,
        })
    }

    fn rows(&self) -> impl Iterator<Item = std::ops::Range<usize>> + 'a {
        self.offsets.windows(2).map(|pair| pair[0] as usize..pair[1] as usize)
    }

    /// Marks the largest set of positives in which each user has at least `least_user` and each item at least
    /// `least_item` positives.
    ///
    /// Users and items with too few positives are removed repeatedly. The order of removal doesn't matter.
    pub fn core(&self, num_items: usize, least_user: u64, least_item: u64) -> Result<Vec<bool>> {
        let mut kept = try_with_capacity(self.items.len(), "positives")?;
        kept.resize(self.items.len(), true);
        let mut left = try_with_capacity(num_items, "items")?;
        left.resize(num_items, 0_u64);
        for &item in self.items {
            *left.get_mut(item as usize).ok_or_else(no_item)? += 1;
        }
        loop {
            let mut changed = false;
            for row in self.rows() {
                let (kept, items) = (&mut kept[row.clone()], &self.items[row]);
                let mut count = 0;
                for (kept, &item) in kept.iter_mut().zip(items) {
                    if *kept && left[item as usize] < least_item {
                        (*kept, changed) = (false, true);
                        left[item as usize] -= 1;
                    }
                    count += u64::from(*kept);
                }
                if count > 0 && count < least_user {
                    changed = true;
                    for (kept, &item) in kept.iter_mut().zip(items) {
                        left[item as usize] -= u64::from(*kept);
                        *kept = false;
                    }
                }
            }
            if !changed {
                return Ok(kept);
            }
        }
    }

    /// Returns the marked positives of all users. Positions in histories are renumbered without gaps.
    pub fn keep(&self, kept: &[bool]) -> Result<Csr> {
        if kept.len() != self.items.len() {
            return Err(Error::new(ErrorKind::Shape, "expected one mark for each positive"));
        }
        let total = kept.iter().filter(|kept| **kept).count();
        let (mut offsets, mut items) = (
            try_with_capacity(self.offsets.len(), "users")?,
            try_with_capacity(total, "items")?,
        );
        let mut sequence = self
            .sequence
            .map(|_| try_with_capacity(total, "their places in histories"))
            .transpose()?;
        let mut places = Vec::new();
        offsets.push(0);
        for row in self.rows() {
            let mark = &kept[row.clone()];
            let chosen = |all: &'a [u32]| {
                all[row.clone()]
                    .iter()
                    .zip(mark)
                    .filter(|(_, kept)| **kept)
                    .map(|(one, _)| *one)
            };
            items.extend(chosen(self.items));
            offsets.push(items.len() as i64);
            let (Some(all), Some(out)) = (self.sequence, &mut sequence) else {
                continue;
            };
            // The number of kept positives before each position.
            places.clear();
            places
                .try_reserve(row.len() + 1)
                .map_err(|_| Error::out_of_memory(4 * row.len(), "a user's history"))?;
            places.resize(row.len() + 1, 0_u32);
            for place in chosen(all) {
                *places.get_mut(place as usize + 1).ok_or_else(no_place)? = 1;
            }
            for place in 1..places.len() {
                places[place] += places[place - 1];
            }
            out.extend(chosen(all).map(|place| places[place as usize]));
        }
        Ok(Csr {
            offsets,
            items,
            sequence,
        })
    }
}

fn no_item() -> Error {
    Error::new(ErrorKind::ValueRange, "the number of an item is too large")
}

fn no_place() -> Error {
    Error::new(ErrorKind::ValueRange, "a position in a history is past its end")
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::csr::{Interactions, Stays, to_csr};

    fn of(rows: &[(u32, u32)]) -> Csr {
        let users: Vec<_> = rows.iter().map(|row| row.0).collect();
        let items: Vec<_> = rows.iter().map(|row| row.1).collect();
        let times: Vec<i64> = (0..rows.len() as i64).map(|i| i * 7 % 5).collect();
        let all = Interactions {
            users: &users,
            items: &items,
            times: Some(&times[..]),
        };
        to_csr(all, 8, Stays::First, 1).unwrap()
    }

    proptest! {
        #[test]
        fn a_core_is_what_peeling_leaves(
            rows in prop::collection::vec((0..8_u32, 0..8_u32), 0..60),
            least_user in 0..5_u64,
            least_item in 0..5_u64,
        ) {
            let all = of(&rows);
            let rows = Rows::new(&all.offsets, &all.items, all.sequence.as_deref()).unwrap();
            let users: Vec<u32> = (0..8).flat_map(|u| vec![u; (all.offsets[u as usize + 1] - all.offsets[u as usize]) as usize]).collect();
            let mut naive = vec![true; users.len()];
            loop {
                let count = |of: &[u32], one: u32| of.iter().zip(&naive).filter(|(x, kept)| **x == one && **kept).count() as u64;
                let next: Vec<bool> = (0..users.len())
                    .map(|i| naive[i] && count(&users, users[i]) >= least_user && count(&all.items, all.items[i]) >= least_item)
                    .collect();
                if next == naive {
                    break;
                }
                naive = next;
            }
            let kept = rows.core(8, least_user, least_item).unwrap();
            prop_assert_eq!(&kept, &naive);
            let left = rows.keep(&kept).unwrap();
            let sequence = all.sequence.as_deref().unwrap();
            let mut at = 0;
            for user in 0..8 {
                let row = (all.offsets[user] as usize..all.offsets[user + 1] as usize).filter(|&i| kept[i]);
                for i in row.clone() {
                    let place = row.clone().filter(|&j| sequence[j] < sequence[i]).count() as u32;
                    prop_assert_eq!((left.items[at], left.sequence.as_ref().unwrap()[at]), (all.items[i], place));
                    at += 1;
                }
                prop_assert_eq!(left.offsets[user + 1], at as i64);
            }
            prop_assert_eq!(left.items.len(), at);
        }
    }

    #[test]
    fn values_that_do_not_fit_are_refused() {
        assert!(Rows::new(&[0, 2], &[1], None).is_err());
        assert!(Rows::new(&[0, 1], &[1], Some(&[])).is_err());
        assert!(Rows::new(&[], &[], None).is_err());
        assert!(Rows::new(&[0, 2, 1], &[1], None).is_err());
        let rows = Rows::new(&[0, 1], &[1], Some(&[5])).unwrap();
        assert!(rows.core(1, 1, 1).is_err());
        assert!(rows.keep(&[true]).is_err());
        assert!(rows.keep(&[]).is_err());
    }
}
