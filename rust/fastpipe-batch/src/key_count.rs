//! Counts of the keys that were read, and of those that a vocabulary leaves out.

use std::iter::Sum;
use std::ops::AddAssign;

use crate::sink::Fragment;
use crate::spec::ColumnSpec;

/// A number of keys that were read, and how many of them were left out because the vocabulary lacks them. Nulls are not
/// keys.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeyCount {
    /// Number of keys.
    pub read: u64,
    /// How many of these were left out.
    pub dropped: u64,
}

impl KeyCount {
    /// Returns the keys that were counted after `before` was counted.
    pub fn since(self, before: KeyCount) -> KeyCount {
        KeyCount {
            read: self.read.saturating_sub(before.read),
            dropped: self.dropped.saturating_sub(before.dropped),
        }
    }
}

/// Counts that another process sent may be wrong, so sums saturate.
impl AddAssign for KeyCount {
    #[inline]
    fn add_assign(&mut self, more: KeyCount) {
        self.read = self.read.saturating_add(more.read);
        self.dropped = self.dropped.saturating_add(more.dropped);
    }
}

impl Sum for KeyCount {
    fn sum<I: Iterator<Item = KeyCount>>(counts: I) -> KeyCount {
        counts.fold(KeyCount::default(), |mut sum, more| {
            sum += more;
            sum
        })
    }
}

/// Adds the counts of a batch to those of earlier batches. Each has one count per column, or none.
pub fn add_key_counts(sums: &mut Vec<KeyCount>, more: &[KeyCount]) {
    if sums.len() < more.len() {
        sums.resize(more.len(), KeyCount::default());
    }
    for (sum, more) in sums.iter_mut().zip(more) {
        *sum += *more;
    }
}

/// Returns the counts of each column from the tasks of a batch. Returns nothing if no column left out keys or could
/// have.
pub(crate) fn key_counts(columns: &[ColumnSpec], fragments: &[Fragment]) -> Vec<KeyCount> {
    if fragments.iter().all(|fragment| fragment.keys().is_empty()) {
        return Vec::new();
    }
    let mut first = 0;
    let of_column = |column: &ColumnSpec| {
        let parts = first..first + column.parts().len();
        first = parts.end;
        let of_task = |fragment: &Fragment| {
            fragment
                .keys()
                .get(parts.clone())
                .unwrap_or_default()
                .iter()
                .copied()
                .sum()
        };
        fragments.iter().map(of_task).sum()
    };
    columns.iter().map(of_column).collect()
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::{DType, Form, Leaf, NestedForm, Overflow, Rows, Sink, SlabPool, assemble};

    fn count(read: u64, dropped: u64) -> KeyCount {
        KeyCount { read, dropped }
    }

    #[test]
    fn counts_of_tasks_are_added_up_by_column() {
        let ragged = NestedForm {
            ragged: 1,
            masks: vec![false],
            ..NestedForm::dense(&[], Leaf::Fixed(DType::I64))
        };
        let columns = [
            ColumnSpec::new("id", Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)))),
            ColumnSpec::new("words", Form::Nested(ragged)),
        ];
        let parts: Arc<[_]> = columns.iter().flat_map(|column| column.parts()).collect();
        let pool = SlabPool::new(1);
        let fill = |sink: &mut Sink<'_>, slot: i64| {
            sink.begin_row(slot as u32).unwrap();
            sink.writer(0).push(slot).unwrap();
            sink.writer(1).push(0i64).unwrap();
            sink.end_row().unwrap();
        };
        let batch = |counts: bool, reused: Fragment| {
            let rows = Rows::new(parts.clone(), 3, &pool).unwrap();
            let (mut first, mut second) = (
                Sink::new(&rows, reused).unwrap(),
                Sink::new(&rows, Fragment::default()).unwrap(),
            );
            fill(&mut first, 0);
            fill(&mut second, 2);
            fill(&mut first, 1);
            if counts {
                first.count_keys(1, 5, 2).unwrap();
                first.count_keys(2, 1, 0).unwrap();
                second.count_keys(2, 3, 3).unwrap();
                assert_eq!(second.count_keys(3, 1, 1), Err(Overflow::Row));
            }
            let mut fragments = [first.finish(), second.finish()];
            let assembled = assemble(&columns, rows, &mut fragments, &pool).unwrap();
            let [first, _] = fragments;
            (assembled.keys, first)
        };
        let (found, reused) = batch(true, Fragment::default());
        assert_eq!(found, [count(0, 0), count(9, 5)]);
        // Counts of an earlier batch don't remain in reused memory.
        let (found, reused) = batch(true, reused);
        assert_eq!(found, [count(0, 0), count(9, 5)]);
        assert_eq!(batch(false, reused).0, []);
    }

    #[test]
    fn sums_saturate() {
        let mut sums = vec![count(1, 1)];
        add_key_counts(&mut sums, &[]);
        assert_eq!(sums, [count(1, 1)]);
        add_key_counts(&mut sums, &[count(u64::MAX, 1), count(3, 2)]);
        assert_eq!(sums, [count(u64::MAX, 2), count(3, 2)]);
        assert_eq!(sums[1].since(count(1, 0)), count(2, 2));
        assert_eq!(count(0, 1).since(count(2, 0)), count(0, 1));
    }
}
