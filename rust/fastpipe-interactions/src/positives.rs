//! The items that users have interacted with, the positives, sorted by user in one compact structure.

use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind, Result, try_collect};

/// Maximum number of users and of items: batches contain both as int32.
const MOST: u64 = i32::MAX as u64;

/// The items of each user, as compressed sparse rows: 4 bytes per positive and 8 per user, for any number of items.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Positives {
    /// The start of each user's items, and the end of the last user's items.
    offsets: Vec<usize>,
    items: Vec<u32>,
    num_items: u32,
}

impl Positives {
    /// Creates positives. The items of user `u` are `items[offsets[u]..offsets[u + 1]]`. They must ascend and be less
    /// than `num_items`.
    pub fn new(offsets: &[i64], items: Vec<u32>, num_items: u64) -> Result<Positives> {
        let shape = |reason: String| Err(Error::new(ErrorKind::Shape, reason));
        let users = offsets.len().saturating_sub(1) as u64;
        if num_items == 0 || num_items > MOST || users > MOST {
            let reason = format!(
                "expected 1 to {MOST} items and up to as many users, found {num_items} items and {users} users"
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let (Some(&first), Some(&last)) = (offsets.first(), offsets.last()) else {
            return shape("expected one offset more than there are users, found none".into());
        };
        if first != 0 || usize::try_from(last) != Ok(items.len()) {
            let count = items.len();
            return shape(format!(
                "offsets must go from 0 to {count}, the number of positives, found {first} to {last}"
            ));
        }
        if let Some(user) = offsets.windows(2).position(|pair| pair[0] > pair[1]) {
            let (from, to) = (offsets[user], offsets[user + 1]);
            return shape(format!(
                "offsets must not descend, found {from} and then {to} at user {user}"
            ));
        }
        let positives = Positives {
            // The casts are exact: offsets ascend from 0 to a length.
            offsets: try_collect(offsets.iter().map(|&offset| offset as usize), "users")?,
            items,
            num_items: num_items as u32,
        };
        positives.check_items()?;
        Ok(positives)
    }

    fn check_items(&self) -> Result<()> {
        for user in 0..self.users() {
            let items = self.of(user);
            let fault = if let Some(pair) = items.windows(2).find(|pair| pair[0] >= pair[1]) {
                let (before, item) = (pair[0], pair[1]);
                format!("items must ascend, each once, found {item} after {before}: sort them, and drop duplicates")
            } else if let Some(item) = items.last().filter(|item| **item >= self.num_items) {
                format!(
                    "expected items below {}, the number of items, found {item}",
                    self.num_items
                )
            } else {
                continue;
            };
            return Err(Error::new(ErrorKind::ValueRange, format!("user {user}: {fault}")));
        }
        Ok(())
    }

    /// Number of users. Some may have no positives.
    pub fn users(&self) -> u32 {
        (self.offsets.len() - 1) as u32
    }

    /// Number of items. Some may have no positives.
    pub fn num_items(&self) -> u32 {
        self.num_items
    }

    /// Number of positives.
    pub fn len(&self) -> usize {
        self.items.len()
    }

    /// Whether the structure is empty.
    pub fn is_empty(&self) -> bool {
        self.items.is_empty()
    }

    /// Returns the items of a user, ascending.
    #[inline]
    pub fn of(&self, user: u32) -> &[u32] {
        &self.items[self.range(user)]
    }

    /// Returns the indices of a user's positives.
    #[inline]
    pub fn range(&self, user: u32) -> Range<usize> {
        self.offsets[user as usize]..self.offsets[user as usize + 1]
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn each_user_has_its_own_items() {
        let positives = Positives::new(&[0, 2, 2, 3], vec![1, 4, 0], 5).unwrap();
        assert_eq!((positives.users(), positives.num_items(), positives.len()), (3, 5, 3));
        assert_eq!([0, 1, 2].map(|user| positives.of(user)), [&[1, 4][..], &[], &[0]]);
        assert_eq!(positives.range(2), 2..3);
        let empty = Positives::new(&[0], vec![], 1).unwrap();
        assert!(empty.is_empty() && empty.users() == 0);
    }

    #[test]
    fn invalid_structures_are_refused() {
        use ErrorKind::{Limit, Shape, ValueRange};
        type Case<'a> = (&'a [i64], &'a [u32], u64, ErrorKind, &'a str);
        let cases: [Case<'_>; 11] = [
            (&[], &[], 5, Shape, "found none"),
            (&[1, 2], &[0, 1], 5, Shape, "found 1 to 2"),
            (&[0, 3], &[0, 1], 5, Shape, "found 0 to 3"),
            (&[0, -1], &[0, 1], 5, Shape, "found 0 to -1"),
            (&[0, 2, 1, 3], &[0, 1, 2], 5, Shape, "found 2 and then 1 at user 1"),
            (&[0, -1, 1], &[0], 5, Shape, "found 0 and then -1 at user 0"),
            (
                &[0, 1, 3],
                &[9, 3, 1],
                10,
                ValueRange,
                "user 1: items must ascend, each once, found 1 after 3",
            ),
            (
                &[0, 2],
                &[3, 3],
                10,
                ValueRange,
                "user 0: items must ascend, each once, found 3 after 3",
            ),
            (
                &[0, 1],
                &[5],
                5,
                ValueRange,
                "expected items below 5, the number of items, found 5",
            ),
            (&[0], &[], 0, Limit, "found 0 items"),
            (&[0], &[], 1 << 31, Limit, "items"),
        ];
        for (offsets, items, num_items, kind, reason) in cases {
            let error = Positives::new(offsets, items.to_vec(), num_items).unwrap_err();
            assert!(error.kind() == kind && error.reason().contains(reason), "{error:?}");
        }
    }
}
