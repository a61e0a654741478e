//! Converts interactions into compressed sparse rows, sorted by user and then by item, without duplicate pairs.
//!
//! A counting sort by user is followed by a sort of each user's items. Each thread handles a range of users, so its
//! output is a contiguous range of the result. It reads all interactions, because sequential reads are fast. With
//! times, an entry is an item and the index of its interaction, which identifies the time. So times are neither copied
//! nor sorted as a whole.

use fastpipe_batch::{Error, ErrorKind, Result, try_with_capacity};

use crate::parallel::{do_all, threads_for};

/// Bits of an entry for the index of the interaction. The other 31 bits are the item.
const NUMBER: u32 = 33;

/// Items by user. The items of user `u` are `items[offsets[u]..offsets[u + 1]]`, ascending.
#[derive(Debug, PartialEq, Eq)]
pub struct Csr {
    /// The start of each user's items, and the end of the last user's items.
    pub offsets: Vec<i64>,
    /// The items.
    pub items: Vec<u32>,
    /// If there are times: the position of each item in its user's history, from 0 for the earliest.
    pub sequence: Option<Vec<u32>>,
}

/// Interactions: a user and an item each, and optionally a time.
#[derive(Clone, Copy, Debug)]
pub struct Interactions<'a, T> {
    /// Users, each less than the number of users.
    pub users: &'a [u32],
    /// Items, each less than 2^31.
    pub items: &'a [u32],
    /// Times, one for each interaction, if they are known.
    pub times: Option<&'a [T]>,
}

/// Selects the interaction that is kept if a user and an item have several. At equal times, or without times, the order
/// of the input decides.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stays {
    /// Keeps the earliest.
    First,
    /// Keeps the latest.
    Last,
}

/// A type of times. Only the order matters.
pub trait Time: Copy + Send + Sync {
    /// Converts the time into a number with the same order. Equal times have equal numbers.
    fn key(self) -> u64;
}

macro_rules! times {
    ($($t:ty),*) => {$(
        impl Time for $t {
            #[inline(always)]
            fn key(self) -> u64 {
                (i128::from(self) - i128::from(<$t>::MIN)) as u64
            }
        }
    )*};
}
times!(i32, i64, u32, u64);

impl Time for f64 {
    #[inline(always)]
    fn key(self) -> u64 {
        let bits = (self + 0.0).to_bits(); // -0.0 is 0.0.
        bits ^ (((bits as i64) >> 63) as u64 | 1 << 63)
    }
}

impl Time for f32 {
    #[inline(always)]
    fn key(self) -> u64 {
        f64::from(self).key()
    }
}

/// Sorts interactions by user and item, and keeps one interaction of each pair.
pub fn to_csr<T: Time>(all: Interactions<'_, T>, users: usize, stays: Stays, threads: usize) -> Result<Csr> {
    check(&all, users)?;
    let threads = threads_for(all.users.len(), threads);
    let offsets = starts(all.users, users, threads)?;
    let Some(times) = all.times else {
        let rows = scattered(
            all,
            &offsets,
            threads,
            |item, _| item,
            |row| deduplicated(row, |item| item),
        )?;
        let (mut items, lengths, stretches) = rows;
        let mut end = 0;
        for (start, kept) in stretches {
            items.copy_within(start..start + kept, end);
            end += kept;
        }
        items.truncate(end);
        items.shrink_to_fit();
        return Ok(Csr {
            offsets: summed(offsets, &lengths),
            items,
            sequence: None,
        });
    };
    let entry = |item, number| u64::from(item) << NUMBER | number as u64;
    let settle = |row: &mut [u64]| placed(row, times, stays);
    let (entries, lengths, stretches) = scattered(all, &offsets, threads, entry, settle)?;
    let total = stretches.iter().map(|(_, kept)| kept).sum();
    let (mut items, mut sequence) = (
        try_with_capacity(total, "items")?,
        try_with_capacity(total, "their places in histories")?,
    );
    items.resize(total, 0);
    sequence.resize(total, 0);
    let (mut tasks, mut to) = (Vec::new(), (&mut items[..], &mut sequence[..]));
    for (start, kept) in stretches {
        let (items, items_left) = to.0.split_at_mut(kept);
        let (sequence, sequence_left) = to.1.split_at_mut(kept);
        to = (items_left, sequence_left);
        tasks.push((&entries[start..start + kept], items, sequence));
    }
    do_all(
        tasks,
        threads,
        || (),
        |(), _, (entries, items, sequence)| {
            for ((&entry, item), place) in entries.iter().zip(items).zip(sequence) {
                (*item, *place) = ((entry >> 32) as u32, entry as u32);
            }
            Ok(())
        },
    )?;
    Ok(Csr {
        offsets: summed(offsets, &lengths),
        items,
        sequence: Some(sequence),
    })
}

fn check<T>(all: &Interactions<'_, T>, users: usize) -> Result<()> {
    let count = all.users.len();
    if all.items.len() != count || all.times.is_some_and(|times| times.len() != count) {
        return Err(Error::new(
            ErrorKind::Shape,
            "users, items and times must have the same length",
        ));
    }
    if count as u64 >= 1 << NUMBER || users as u64 >= 1 << 31 {
        let reason = format!("expected fewer than 2^{NUMBER} interactions and fewer than 2^31 users");
        return Err(Error::new(ErrorKind::Limit, reason));
    }
    let wrong = all.users.iter().any(|&user| user as usize >= users) || all.items.iter().any(|&item| item >> 31 != 0);
    match wrong {
        true => Err(Error::new(
            ErrorKind::ValueRange,
            "the number of a user or an item is too large",
        )),
        false => Ok(()),
    }
}

/// Returns the start of each user's entries, and the end of the last user's, including duplicates.
fn starts(all: &[u32], users: usize, threads: usize) -> Result<Vec<i64>> {
    let mut offsets = try_with_capacity(users + 1, "users")?;
    offsets.resize(users + 1, 0_i64);
    let each = users.div_ceil(threads).max(1);
    let tasks = offsets[1..].chunks_mut(each).collect();
    do_all(
        tasks,
        threads,
        || (),
        |(), number, counts: &mut [i64]| {
            let first = (number * each) as u32;
            for user in all {
                if let Some(count) = counts.get_mut(user.wrapping_sub(first) as usize) {
                    *count += 1;
                }
            }
            Ok(())
        },
    )?;
    for user in 1..=users {
        offsets[user] += offsets[user - 1];
    }
    Ok(offsets)
}

/// All entries by user; the number of entries that each user keeps; and for each thread's range, its start and the
/// number of kept entries, which come first.
type Scattered<E> = (Vec<E>, Vec<u32>, Vec<(usize, usize)>);

/// Groups entries by user, and calls `settle` for each user. `settle` moves the entries to keep to the front, and
/// returns their number.
fn scattered<T: Time, E: Copy + Default + Send>(
    all: Interactions<'_, T>,
    offsets: &[i64],
    threads: usize,
    entry: impl Fn(u32, usize) -> E + Sync,
    settle: impl Fn(&mut [E]) -> Result<usize> + Sync,
) -> Result<Scattered<E>> {
    let users = offsets.len() - 1;
    let mut entries = try_with_capacity(all.users.len(), "interactions")?;
    entries.resize(all.users.len(), E::default());
    let mut lengths = try_with_capacity(users, "users")?;
    lengths.resize(users, 0_u32);
    let mut stretches = Vec::new();
    let (mut tasks, mut entries_left, mut lengths_left, mut first) =
        (Vec::new(), &mut entries[..], &mut lengths[..], 0);
    let mut kept = vec![0; threads];
    for (number, kept) in (1..).zip(&mut kept) {
        // Each range has about the same number of entries.
        let until = (all.users.len() as u128 * number / threads as u128) as i64;
        let end = if number == threads as u128 {
            users
        } else {
            offsets.partition_point(|&at| at < until).min(users)
        };
        let end = end.max(first);
        let (mine, others) = entries_left.split_at_mut((offsets[end] - offsets[first]) as usize);
        let (counts, rest) = lengths_left.split_at_mut(end - first);
        (entries_left, lengths_left) = (others, rest);
        stretches.push(offsets[first] as usize);
        tasks.push((first, mine, counts, kept));
        first = end;
    }
    do_all(
        tasks,
        threads,
        || (),
        |(), _, (first, mine, counts, kept)| {
            let base = offsets[first];
            for (number, (&user, &item)) in all.users.iter().zip(all.items).enumerate() {
                let own = (user as usize).wrapping_sub(first);
                if let Some(count) = counts.get_mut(own) {
                    mine[(offsets[user as usize] - base) as usize + *count as usize] = entry(item, number);
                    *count += 1;
                }
            }
            for (user, count) in (first..).zip(counts) {
                let start = (offsets[user] - base) as usize;
                let left = settle(&mut mine[start..start + *count as usize])?;
                mine.copy_within(start..start + left, *kept);
                *kept += left;
                *count = left as u32;
            }
            Ok(())
        },
    )?;
    let stretches = stretches.into_iter().zip(kept).collect();
    Ok((entries, lengths, stretches))
}

/// Recomputes the offsets for the number of items that each user keeps.
fn summed(mut offsets: Vec<i64>, lengths: &[u32]) -> Vec<i64> {
    let mut end = 0;
    for (offset, &length) in offsets[1..].iter_mut().zip(lengths) {
        end += i64::from(length);
        *offset = end;
    }
    offsets
}

/// Sorts entries and moves the first of equal entries to the front. Returns the number of entries to keep.
fn deduplicated<E: Ord + Copy>(row: &mut [E], what: impl Fn(E) -> u32) -> Result<usize> {
    row.sort_unstable();
    let mut left = 0;
    for i in 0..row.len() {
        if left == 0 || what(row[i]) != what(row[left - 1]) {
            row[left] = row[i];
            left += 1;
        }
    }
    Ok(left)
}

/// Sorts a user's entries by item, keeps one of each, and replaces the index of its interaction by its position in the
/// user's history. Returns the number of entries to keep.
fn placed<T: Time>(row: &mut [u64], times: &[T], stays: Stays) -> Result<usize> {
    let number = |entry: u64| entry & ((1 << NUMBER) - 1);
    // After the sort, entries of an item are in the order of the input.
    let age = |entry: u64| (times[number(entry) as usize].key(), number(entry));
    row.sort_unstable();
    let mut left = 0;
    for i in 0..row.len() {
        let entry = row[i];
        if left == 0 || row[left - 1] >> NUMBER != entry >> NUMBER {
            row[left] = entry;
            left += 1;
        } else if (age(entry) < age(row[left - 1])) == (stays == Stays::First) {
            row[left - 1] = entry;
        }
    }
    let mut history = try_with_capacity(left, "a user's history")?;
    history.extend(row[..left].iter().zip(0_u32..).map(|(&entry, at)| (age(entry), at)));
    history.sort_unstable();
    for (&(_, at), place) in history.iter().zip(0_u64..) {
        let entry = &mut row[at as usize];
        *entry = (*entry >> NUMBER) << 32 | place;
    }
    Ok(left)
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn naive(users: &[u32], items: &[u32], times: Option<&[f64]>, count: usize, stays: Stays) -> Csr {
        let age = |i: usize| (times.map_or(0.0, |times| times[i]), i);
        let mut chosen: BTreeMap<(u32, u32), usize> = BTreeMap::new();
        for i in 0..users.len() {
            let one = chosen.entry((users[i], items[i])).or_insert(i);
            if (age(i) < age(*one)) == (stays == Stays::First) {
                *one = i;
            }
        }
        let mut offsets = vec![0; count + 1];
        for &(user, _) in chosen.keys() {
            offsets[user as usize + 1..].iter_mut().for_each(|end| *end += 1);
        }
        let before = |user: u32, i: usize| {
            chosen
                .iter()
                .filter(|&(&(u, _), &j)| u == user && age(j) < age(i))
                .count() as u32
        };
        Csr {
            offsets,
            items: chosen.keys().map(|&(_, item)| item).collect(),
            sequence: times.map(|_| chosen.iter().map(|(&(user, _), &i)| before(user, i)).collect()),
        }
    }

    proptest! {
        #[test]
        fn rows_are_those_of_the_naive_way(
            rows in prop::collection::vec((0..6_u32, 0..8_u32, prop::sample::select(vec![-1.5, -0.0, 0.0, 2.0, 1e300])), 0..60),
            last in any::<bool>(),
            threads in 1..6_usize,
        ) {
            let users: Vec<_> = rows.iter().map(|row| row.0).collect();
            let items: Vec<_> = rows.iter().map(|row| row.1).collect();
            let times: Vec<f64> = rows.iter().map(|row| row.2).collect();
            let stays = if last { Stays::Last } else { Stays::First };
            for times in [None, Some(&times[..])] {
                let all = Interactions { users: &users, items: &items, times };
                prop_assert_eq!(to_csr(all, 7, stays, threads).unwrap(), naive(&users, &items, times, 7, stays));
            }
        }

        #[test]
        fn keys_order_as_times_do(a in any::<i64>(), b in any::<i64>(), x in any::<f64>(), y in any::<f64>()) {
            prop_assert_eq!(a.cmp(&b), a.key().cmp(&b.key()));
            prop_assert_eq!((a as i32).cmp(&(b as i32)), (a as i32).key().cmp(&(b as i32).key()));
            prop_assert_eq!((a as u64).cmp(&(b as u64)), (a as u64).key().cmp(&(b as u64).key()));
            if let Some(order) = x.partial_cmp(&y) {
                prop_assert_eq!(order, x.key().cmp(&y.key()));
            }
        }
    }

    #[test]
    fn the_result_does_not_depend_on_the_number_of_threads() {
        let word = |i: u64| (i.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 33) as u32;
        let count = 300_000;
        let users: Vec<u32> = (0..count).map(|i| word(i) % 50 * (word(i + 7) % 40)).collect();
        let items: Vec<u32> = (0..count).map(|i| word(i * 3) % 3000).collect();
        let times: Vec<i64> = (0..count).map(|i| i64::from(word(i * 5) % 1000)).collect();
        for times in [None, Some(&times[..])] {
            let all = Interactions {
                users: &users,
                items: &items,
                times,
            };
            let one = to_csr(all, 2000, Stays::First, 1).unwrap();
            for threads in [2, 3, 16] {
                assert!(to_csr(all, 2000, Stays::First, threads).unwrap() == one);
            }
        }
    }

    #[test]
    fn numbers_that_are_too_large_are_refused() {
        let of = |users, items, times| Interactions::<i64> { users, items, times };
        for wrong in [
            of(&[2], &[0], None),
            of(&[0], &[1 << 31], None),
            of(&[0], &[], None),
            of(&[0], &[0], Some(&[])),
        ] {
            assert!(to_csr(wrong, 2, Stays::First, 1).is_err());
        }
    }
}
