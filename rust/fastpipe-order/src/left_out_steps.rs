//! Steps that are left out of every epoch, and the numbering of the steps that remain.

use crate::failure::{Result, copied, with_room};

/// Steps that are left out, counted within an epoch. In every function, `n` numbers only the steps that remain.
#[derive(Debug, Default)]
pub struct LeftOutSteps {
    /// Ranges `start..end` in ascending order, with at least one step between them.
    ranges: Vec<(u64, u64)>,
    /// Number of remaining steps before each range, in ascending order.
    before: Vec<u64>,
}

impl LeftOutSteps {
    /// Creates the union of these ranges `start..end`, which may overlap.
    pub(crate) fn new(ranges: &[(u64, u64)]) -> Result<LeftOutSteps> {
        let mut sorted = copied(ranges)?;
        sorted.retain(|(start, end)| start < end);
        sorted.sort_unstable();
        sorted.dedup_by(|next, range| {
            let joins = next.0 <= range.1;
            if joins {
                range.1 = range.1.max(next.1);
            }
            joins
        });
        let mut before = with_room(sorted.len())?;
        let mut left_out = 0;
        for (start, end) in &sorted {
            before.push(start - left_out);
            left_out += end - start;
        }
        Ok(LeftOutSteps { ranges: sorted, before })
    }

    /// Whether all steps remain.
    pub fn is_empty(&self) -> bool {
        self.ranges.is_empty()
    }

    /// Returns the step of number `n`.
    pub fn step(&self, n: u64) -> u64 {
        match self.before.partition_point(|&before| before <= n).checked_sub(1) {
            None => n,
            Some(last) => self.ranges[last].1.saturating_add(n - self.before[last]),
        }
    }

    /// Returns the number of steps that remain before a step.
    pub fn remaining_before(&self, step: u64) -> u64 {
        match self.ranges.partition_point(|range| range.0 < step).checked_sub(1) {
            None => step,
            Some(last) => self.before[last] + step.saturating_sub(self.ranges[last].1),
        }
    }

    /// Returns the first step at or after this one that remains.
    pub fn next(&self, step: u64) -> u64 {
        self.step(self.remaining_before(step))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn remaining_steps_are_numbered_in_sequence(ranges in prop::collection::vec((0..60u64, 0..60u64), 0..6)) {
            let steps = LeftOutSteps::new(&ranges).unwrap();
            let remains = |step: &u64| !ranges.iter().any(|(start, end)| (start..end).contains(&step));
            let remaining: Vec<u64> = (0..200).filter(remains).collect();
            prop_assert_eq!(steps.is_empty(), remaining.len() == 200);
            for (n, &step) in (0..).zip(&remaining) {
                prop_assert_eq!(steps.step(n), step);
            }
            for step in 0..100 {
                let n = remaining.iter().filter(|&&earlier| earlier < step).count();
                prop_assert_eq!(steps.remaining_before(step), n as u64);
                prop_assert_eq!(steps.next(step), remaining[n]);
            }
        }
    }

    #[test]
    fn ranges_may_be_huge() {
        let steps = LeftOutSteps::new(&[(2, u64::MAX), (5, 9), (u64::MAX, u64::MAX)]).unwrap();
        assert_eq!(
            (steps.step(1), steps.step(2), steps.step(u64::MAX)),
            (1, u64::MAX, u64::MAX)
        );
        assert_eq!((steps.remaining_before(u64::MAX), steps.next(7)), (2, u64::MAX));
    }
}
