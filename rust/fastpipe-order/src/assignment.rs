//! Decides which member of a mixture each row comes from: evenly, or at random.
//!
//! The even assignment is the chairman assignment of R. Tijdeman, The chairman assignment problem (1980). Of `k`
//! members, a member with share `w` gets `x` of the first `j` rows, and `x` differs from `w * j` by at most `1 - 1 /
//! (2k - 2)`, for every `j`. Shares are integers, so the assignment repeats after as many rows as their sum. One period
//! is kept as a table, which makes every question about any row a lookup.
//!
//! A random assignment is a table too: a uniform permutation of rows whose members have exact shares. It has as many
//! rows as possible up to `LONGEST_RANDOM`, and then repeats. So it also has exact counts and lookups for any row.

use std::cmp::{Ordering, Reverse};
use std::collections::BinaryHeap;

use fastpipe_random::{Draws, Key, Purpose};

use crate::failure::{Patience, Result, filled, reserve, with_room};

/// Maximum sum of the shares.
pub const LONGEST_PERIOD: u64 = 1 << 20;

/// Maximum number of members.
pub const MOST_MEMBERS: usize = 1 << 12;

/// Maximum number of rows after which a random assignment repeats, unless the sum of the shares is larger.
const LONGEST_RANDOM: u64 = 1 << 18;

/// Minimum number of rows in the table of members. Longer lists are faster to iterate over.
const LEAST_ROWS: usize = 1 << 10;

/// Minimum number of rows between two stored counts.
const STRIDE: usize = 64;

/// The member of each row of a mixture.
#[derive(Debug)]
pub(crate) struct Assignment {
    /// The rows that each member has in a period.
    shares: Vec<u64>,
    /// The number of rows after which the assignment repeats.
    period: u64,
    /// The member of each row of a period. A short period is repeated a few times.
    members: Vec<u16>,
    /// For every `stride`-th row of a period, the number of earlier rows of each member.
    counts: Vec<u32>,
    stride: usize,
}

/// When a member may get its next row, or must have got it, counted in rows: `numerator / share`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Due {
    numerator: u64,
    share: u64,
    member: u16,
}

impl Ord for Due {
    fn cmp(&self, other: &Due) -> Ordering {
        // Both factors are at most 2^35 and 2^20.
        let (own, theirs) = (self.numerator * other.share, other.numerator * self.share);
        own.cmp(&theirs).then(self.member.cmp(&other.member))
    }
}

impl PartialOrd for Due {
    fn partial_cmp(&self, other: &Due) -> Option<Ordering> {
        Some(self.cmp(other))
    }
}

impl Assignment {
    /// Assigns rows to members evenly, in proportion to their shares. There are at most [`MOST_MEMBERS`] members, and
    /// the sum of the shares is from 1 to [`LONGEST_PERIOD`].
    pub(crate) fn even(shares: Vec<u64>, patience: &mut Patience<'_>) -> Result<Assignment> {
        let period: u64 = shares.iter().sum();
        let mut assignment = Assignment::empty(shares, period)?;
        let (shares, stride) = (&assignment.shares, assignment.stride);
        let sharing = shares.iter().filter(|&&share| share > 0).count() as u64;
        // 2k - 2. With a single member, any value works.
        let scale = (2 * sharing).saturating_sub(2).max(1);
        let mut counts = filled(0u32, shares.len())?;
        // A member with `x` rows may get row `j`, counted from 1, if `share * j / period - x >= 1 / scale`.
        let release = |member: usize, x: u64| {
            let share = shares[member];
            (period * (x * scale + 1)).div_ceil(share * scale)
        };
        let (mut waiting, mut ready) = (BinaryHeap::new(), BinaryHeap::new());
        waiting.extend(
            (0..shares.len())
                .filter(|&m| shares[m] > 0)
                .map(|m| Reverse((release(m, 0), m))),
        );
        for row in 1..=period {
            if row % (1 << 16) == 0 {
                patience.look()?;
            }
            while let Some(&Reverse((first, member))) = waiting.peek()
                && (first <= row || ready.is_empty())
            {
                waiting.pop();
                let x = u64::from(counts[member]);
                ready.push(Reverse(Due {
                    numerator: (x + 1) * scale - u64::from(sharing > 1),
                    share: shares[member],
                    member: member as u16,
                }));
            }
            // Of the members that may get the row, the first that must have got it.
            let Some(Reverse(Due { member, .. })) = ready.pop() else {
                break;
            };
            if (row - 1).is_multiple_of(stride as u64) {
                assignment.counts.extend_from_slice(&counts);
            }
            assignment.members.push(member);
            let member = usize::from(member);
            counts[member] += 1;
            waiting.push(Reverse((release(member, counts[member].into()), member)));
        }
        let period = assignment.members.len();
        while assignment.members.len() < LEAST_ROWS {
            reserve(&mut assignment.members, period)?;
            assignment.members.extend_from_within(..period);
        }
        Ok(assignment)
    }

    /// Assigns rows to members at random. The conditions of [`Assignment::even`] apply.
    pub(crate) fn random(mut shares: Vec<u64>, seed: u64, stream: u64) -> Result<Assignment> {
        let times = (LONGEST_RANDOM / shares.iter().sum::<u64>()).max(1);
        shares.iter_mut().for_each(|share| *share *= times);
        let period: u64 = shares.iter().sum();
        let mut assignment = Assignment::empty(shares, period)?;
        let Assignment {
            shares,
            members,
            counts,
            stride,
            ..
        } = &mut assignment;
        for (member, &share) in (0u16..).zip(shares.iter()) {
            members.resize(members.len() + share as usize, member);
        }
        Draws::new(Key { seed, epoch: 0 }, Purpose::Assignment, stream)
            .swap(0, period as usize, members, |row| period - row);
        let mut before = filled(0u32, shares.len())?;
        for own in members.chunks(*stride) {
            counts.extend_from_slice(&before);
            own.iter().for_each(|&member| before[usize::from(member)] += 1);
        }
        Ok(assignment)
    }

    /// Returns an assignment without rows, with room for `period` rows.
    fn empty(shares: Vec<u64>, period: u64) -> Result<Assignment> {
        let stride = STRIDE.max(shares.len());
        Ok(Assignment {
            members: with_room(period as usize)?,
            counts: with_room((period as usize / stride + 1) * shares.len())?,
            shares,
            period,
            stride,
        })
    }

    /// Returns the members of `rows` successive rows, in several lists.
    pub(crate) fn members(&self, first: u64, rows: u64) -> impl Iterator<Item = &[u16]> {
        let (mut from, mut left) = ((first % self.period) as usize, rows as usize);
        std::iter::from_fn(move || {
            let rest = &self.members[from..];
            let list = &rest[..left.min(rest.len())];
            (from, left) = (0, left - list.len());
            (!list.is_empty()).then_some(list)
        })
    }

    /// Returns the number of rows of each member before a row.
    pub(crate) fn before(&self, row: u64) -> Result<Vec<u64>> {
        let (periods, row) = (row / self.period, (row % self.period) as usize);
        let stored = row / self.stride;
        let counts = &self.counts[stored * self.shares.len()..][..self.shares.len()];
        let mut before = with_room(counts.len())?;
        before.extend(
            counts
                .iter()
                .zip(&self.shares)
                .map(|(&count, share)| periods * share + u64::from(count)),
        );
        for &member in &self.members[stored * self.stride..row] {
            before[usize::from(member)] += 1;
        }
        Ok(before)
    }

    /// Returns the row that is the `nth` of a member, counted from 0. `None` if the member has no share, or if the row
    /// exceeds 64 bits.
    pub(crate) fn find(&self, member: usize, nth: u64) -> Option<u64> {
        let share = self.shares[member];
        let (periods, mut left) = (nth.checked_div(share)?, nth % share);
        let stored = self.counts.len() / self.shares.len();
        let count = |index: usize| u64::from(self.counts[index * self.shares.len() + member]);
        let (mut low, mut high) = (0, stored);
        while high - low > 1 {
            let middle = low.midpoint(high);
            if count(middle) <= left {
                low = middle;
            } else {
                high = middle;
            }
        }
        left -= count(low);
        let from = low * self.stride;
        let mut own = (from..)
            .zip(&self.members[from..])
            .filter(|&(_, &m)| usize::from(m) == member);
        let (row, _) = own.nth(left as usize)?;
        periods.checked_mul(self.period)?.checked_add(row as u64)
    }

    /// Returns the bytes of the tables for these numbers of rows and members.
    pub(crate) fn bytes(&self) -> u64 {
        (self.members.len() * size_of::<u16>() + self.counts.len() * size_of::<u32>()) as u64
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn members_of(assignment: &Assignment, first: u64, rows: u64) -> Vec<usize> {
        let lists = assignment.members(first, rows);
        lists.flatten().map(|&member| usize::from(member)).collect()
    }

    fn member_of(assignment: &Assignment, row: u64) -> usize {
        usize::from(assignment.members[(row % assignment.period) as usize])
    }

    fn assigned(shares: &[u64]) -> Assignment {
        Assignment::even(shares.to_vec(), &mut Patience(&mut || false)).unwrap()
    }

    proptest! {
        #[test]
        fn every_prefix_is_within_one_row_of_each_share(
            shares in proptest::collection::vec(prop_oneof![0u64..4, 1u64..50, 1u64..3000], 1..20),
            rows in proptest::collection::vec(any::<u32>(), 10),
        ) {
            let period: u64 = shares.iter().sum();
            prop_assume!(period > 0);
            let assignment = assigned(&shares);
            prop_assert_eq!(assignment.period, period);
            let members = shares.iter().filter(|&&share| share > 0).count() as i64;
            let mut counts = vec![0i64; shares.len()];
            let mut found = vec![Vec::new(); shares.len()];
            for row in 0..period {
                let before: Vec<i64> = assignment.before(row).unwrap().iter().map(|&n| n as i64).collect();
                prop_assert_eq!(&before, &counts);
                let member = member_of(&assignment, row);
                counts[member] += 1;
                found[member].push(row);
                for (&count, &share) in counts.iter().zip(&shares) {
                    let deviation = (count * period as i64 - share as i64 * (row as i64 + 1)).abs();
                    // At most 1 - 1 / (2k - 2), and 0 for a single member.
                    prop_assert!(deviation * (2 * members - 2) <= period as i64 * (2 * members - 3).max(0));
                }
            }
            for (member, own) in found.iter().enumerate() {
                prop_assert_eq!(own.len() as u64, shares[member]);
                for (nth, row) in own.iter().enumerate() {
                    prop_assert_eq!(assignment.find(member, nth as u64), Some(*row));
                    let later = assignment.find(member, nth as u64 + 5 * shares[member]);
                    prop_assert_eq!(later, Some(row + 5 * period));
                }
            }
            for row in rows.into_iter().map(u64::from) {
                let members = members_of(&assignment, row, 100);
                let naive: Vec<usize> = (row..row + 100).map(|row| member_of(&assignment, row)).collect();
                prop_assert_eq!(members, naive);
                let before = assignment.before(row).unwrap();
                let (periods, rest) = (row / period, row % period);
                for (member, own) in found.iter().enumerate() {
                    let naive = periods * shares[member] + own.iter().filter(|&&at| at < rest).count() as u64;
                    prop_assert_eq!(before[member], naive);
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(8))]
        #[test]
        fn random_assignments_are_permutations_with_exact_shares(
            shares in proptest::collection::vec(prop_oneof![0u64..4, 1u64..50, 1u64..9000], 1..90),
            seed: u64,
            stream: u64,
        ) {
            let sum: u64 = shares.iter().sum();
            prop_assume!(sum > 0);
            let assignment = Assignment::random(shares.clone(), seed, stream).unwrap();
            let times = (LONGEST_RANDOM / sum).max(1);
            let period = times * sum;
            prop_assert_eq!(assignment.period, period);
            let mut naive: Vec<usize> = (0..shares.len())
                .flat_map(|member| std::iter::repeat_n(member, (shares[member] * times) as usize))
                .collect();
            let draws = Draws::new(Key { seed, epoch: 0 }, Purpose::Assignment, stream);
            for row in 0..naive.len() {
                naive.swap(row, row + draws.below(row as u64, period - row as u64) as usize);
            }
            prop_assert_eq!(members_of(&assignment, 0, period), naive.clone());
            let mut counts = vec![0; shares.len()];
            for (row, member) in (0..).zip(naive) {
                if row % 97 == 0 {
                    prop_assert_eq!(assignment.before(row).unwrap(), counts.clone());
                    prop_assert_eq!(assignment.find(member, counts[member]), Some(row));
                    let later = counts[member] + 2 * times * shares[member];
                    prop_assert_eq!(assignment.find(member, later), Some(row + 2 * period));
                }
                counts[member] += 1;
            }
            let exact: Vec<u64> = shares.iter().map(|share| share * times).collect();
            prop_assert_eq!(assignment.before(period).unwrap(), exact);
        }
    }

    #[test]
    fn the_longest_period_and_most_members_work() {
        let longest = assigned(&[LONGEST_PERIOD - 1, 1]);
        assert_eq!(longest.find(1, 0).map(|row| member_of(&longest, row)), Some(1));
        let mut many = vec![1; MOST_MEMBERS];
        many[0] = LONGEST_PERIOD - MOST_MEMBERS as u64 + 1;
        let many = assigned(&many);
        assert_eq!(
            many.before(LONGEST_PERIOD).unwrap()[..2],
            [LONGEST_PERIOD - MOST_MEMBERS as u64 + 1, 1]
        );
        assert_eq!(many.find(1, u64::MAX), None);
    }
}
