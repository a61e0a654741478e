//! Groups of a window's rows, by the rows' lengths. A length is a number of elements, for example of tokens.

use std::cmp::Reverse;
use std::collections::BTreeSet;

use crate::failure::{Result, collected, filled, reserve, with_room};

/// How rows are grouped.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Grouping {
    /// Groups of at most `capacity` elements, by best-fit decreasing (D. S. Johnson et al., Worst-case performance
    /// bounds for simple one-dimensional packing algorithms, 1974). Of a longer row, the first `capacity` elements
    /// count; with `split`, every further `capacity` elements are another piece.
    Pack {
        /// Maximum number of elements in a group, at least 1.
        capacity: u32,
        /// Whether longer rows are split.
        split: bool,
    },
    /// Groups of rows with similar lengths, for batches that are padded to the longest of their rows.
    Alike {
        /// Maximum number of rows in a group, at least 1.
        rows: u32,
        /// Maximum number of elements in a group after padding. A longer row is a group by itself.
        elements: u64,
    },
}

/// A row of a group, or a piece of it.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Item {
    /// Index of the row within its section.
    pub(crate) row: u32,
    /// The first element that belongs to the group.
    pub(crate) start: u32,
}

impl Grouping {
    /// Returns the number of items of a row.
    pub(crate) fn items(&self, length: u32) -> u32 {
        match *self {
            Grouping::Pack { capacity, split: true } => length.div_ceil(capacity.max(1)).max(1),
            _ => 1,
        }
    }

    /// Groups the rows of a window, which are numbered from `first` on. Appends their items, group by group, to
    /// `items`, and the end of each group to `ends`. Groups are in the sequence of their first items.
    pub(crate) fn group(&self, lengths: &[u32], first: u32, items: &mut Vec<Item>, ends: &mut Vec<u32>) -> Result<()> {
        let total: usize = lengths.iter().map(|&length| self.items(length) as usize).sum();
        let (mut own, mut sizes) = (with_room(total)?, with_room(total)?);
        for (row, &length) in (first..).zip(lengths) {
            let most = match *self {
                Grouping::Pack { capacity, .. } => capacity,
                Grouping::Alike { .. } => u32::MAX,
            };
            for piece in 0..self.items(length) {
                let start = piece * most;
                own.push(Item { row, start });
                sizes.push((length - start).min(most));
            }
        }
        let (mut group, count) = match *self {
            Grouping::Pack { capacity, .. } => best_fit(&sizes, capacity)?,
            Grouping::Alike { rows, elements } => alike(&sizes, rows, elements)?,
        };
        number_by_first(&mut group, count)?;
        // A counting sort by group.
        let mut places = filled(0u32, count as usize + 1)?;
        for &group in &group {
            places[group as usize + 1] += 1;
        }
        for at in 0..count as usize {
            places[at + 1] += places[at];
        }
        let before = items.len() as u32;
        reserve(ends, count as usize)?;
        ends.extend(places[1..].iter().map(|end| before + end));
        reserve(items, own.len())?;
        items.resize(items.len() + own.len(), Item { row: 0, start: 0 });
        for (&group, item) in group.iter().zip(own) {
            let place = &mut places[group as usize];
            items[(before + *place) as usize] = item;
            *place += 1;
        }
        Ok(())
    }
}

/// Returns the group of each item, and the number of groups. Each item is in the fullest group in which it fits; longer
/// items come first.
fn best_fit(sizes: &[u32], capacity: u32) -> Result<(Vec<u32>, u32)> {
    let mut longest_first: Vec<u32> = collected(0..sizes.len() as u32)?;
    longest_first.sort_unstable_by_key(|&item| (Reverse(sizes[item as usize]), item));
    let mut group = filled(0, sizes.len())?;
    // The free elements and the number of each group.
    let (mut open, mut count) = (BTreeSet::new(), 0);
    for item in longest_first {
        let size = sizes[item as usize];
        let (free, number) = open.range((size, 0)..).next().copied().unwrap_or((capacity, count));
        if !open.remove(&(free, number)) {
            count += 1;
        }
        open.insert((free - size, number));
        group[item as usize] = number;
    }
    Ok((group, count))
}

/// Returns the group of each item, and the number of groups. Groups are cut from the items by ascending size.
fn alike(sizes: &[u32], rows: u32, elements: u64) -> Result<(Vec<u32>, u32)> {
    let mut shortest_first: Vec<u32> = collected(0..sizes.len() as u32)?;
    shortest_first.sort_unstable_by_key(|&item| (sizes[item as usize], item));
    let mut group = filled(0, sizes.len())?;
    let (mut count, mut inside) = (0u32, u64::from(rows));
    for item in shortest_first {
        let size = u64::from(sizes[item as usize]);
        if inside == u64::from(rows) || (inside + 1) * size > elements {
            (count, inside) = (count + 1, 0);
        }
        inside += 1;
        group[item as usize] = count - 1;
    }
    Ok((group, count))
}

/// Renumbers groups in the sequence of their first items.
fn number_by_first(group: &mut [u32], count: u32) -> Result<()> {
    const NONE: u32 = u32::MAX;
    let (mut numbers, mut next) = (filled(NONE, count as usize)?, 0);
    for group in group {
        let number = &mut numbers[*group as usize];
        if *number == NONE {
            (*number, next) = (next, next + 1);
        }
        *group = *number;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn grouped(grouping: Grouping, lengths: &[u32]) -> Vec<Vec<(u32, u32)>> {
        let (mut items, mut ends) = (Vec::new(), vec![]);
        grouping.group(lengths, 0, &mut items, &mut ends).unwrap();
        let starts = std::iter::once(0).chain(ends.iter().copied());
        let spans = starts
            .zip(&ends)
            .map(|(start, &end)| &items[start as usize..end as usize]);
        spans
            .map(|span| span.iter().map(|item| (item.row, item.start)).collect())
            .collect()
    }

    #[test]
    fn the_fullest_group_with_room_is_used() {
        let packed = |lengths: &[u32], split| grouped(Grouping::Pack { capacity: 10, split }, lengths);
        // 7 and 6 open groups; 4 fits only beside 6, and 3 beside 7.
        assert_eq!(
            packed(&[3, 6, 4, 7], false),
            [vec![(0, 0), (3, 0)], vec![(1, 0), (2, 0)]]
        );
        assert_eq!(
            packed(&[25, 5], true),
            [vec![(0, 0)], vec![(0, 10)], vec![(0, 20), (1, 0)],]
        );
        assert_eq!(packed(&[25, 5], false), [vec![(0, 0)], vec![(1, 0)]]);
        assert_eq!(packed(&[0, 0], true), [vec![(0, 0), (1, 0)]]);
        assert_eq!(packed(&[], true), Vec::<Vec<(u32, u32)>>::new());
    }

    proptest! {
        /// Each row is in one group, or each of its pieces is. Groups aren't too large, and no two of them would fit
        /// into one.
        #[test]
        fn packs_hold_everything_and_are_full(
            lengths in proptest::collection::vec(0u32..40, 0..80), capacity in 1u32..30, split in any::<bool>(),
        ) {
            let groups = grouped(Grouping::Pack { capacity, split }, &lengths);
            let size = |&(row, start): &(u32, u32)| (lengths[row as usize] - start).min(capacity);
            let mut found: Vec<_> = groups.iter().flatten().copied().collect();
            found.sort_unstable();
            let count = |row: usize| if split { lengths[row].div_ceil(capacity).max(1) } else { 1 };
            let expected: Vec<_> = (0..lengths.len())
                .flat_map(|row| (0..count(row)).map(move |piece| (row as u32, piece * capacity)))
                .collect();
            prop_assert_eq!(found, expected);
            let mut sums: Vec<u32> = groups.iter().map(|group| group.iter().map(size).sum()).collect();
            prop_assert!(sums.iter().all(|&sum| sum <= capacity));
            prop_assert!(groups.is_sorted_by_key(|group| group[0]));
            sums.sort_unstable();
            prop_assert!(sums.len() < 2 || sums[0] + sums[1] > capacity);
        }

        #[test]
        fn groups_of_similar_rows_are_cut_from_sorted_lengths(
            lengths in proptest::collection::vec(0u32..40, 0..80), rows in 1u32..9, elements in 1u64..200,
        ) {
            let groups = grouped(Grouping::Alike { rows, elements }, &lengths);
            let mut found: Vec<_> = groups.iter().flatten().map(|item| item.0).collect();
            found.sort_unstable();
            prop_assert_eq!(found, (0..lengths.len() as u32).collect::<Vec<_>>());
            let mut ranges = Vec::new();
            for group in &groups {
                let of: Vec<u32> = group.iter().map(|item| lengths[item.0 as usize]).collect();
                let longest = *of.iter().max().unwrap();
                prop_assert!(of.len() == 1 || of.len() as u64 * u64::from(longest) <= elements);
                prop_assert!(of.len() <= rows as usize);
                ranges.push((*of.iter().min().unwrap(), longest));
            }
            ranges.sort_unstable();
            prop_assert!(ranges.windows(2).all(|pair| pair[0].1 <= pair[1].0));
        }
    }
}
