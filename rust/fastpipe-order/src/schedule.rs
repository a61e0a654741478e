//! Shares that change: assignments that follow each other.

use crate::assignment::Assignment;
use crate::failure::{Patience, Result, with_room};

/// Maximum number of phases. Each one has a table of up to a few megabytes.
pub const MOST_PHASES: usize = 64;

/// The rows from `first` on, until the next phase.
#[derive(Debug)]
struct Phase {
    first: u64,
    assignment: Assignment,
    /// The number of rows of each member before the phase.
    before: Vec<u64>,
}

/// The member of each row of a mixture.
#[derive(Debug)]
pub(crate) struct Schedule {
    phases: Vec<Phase>,
}

impl Schedule {
    /// Creates a schedule of at least one phase. A phase has its first row and the shares of the members from there on.
    /// First rows are in strictly ascending order, from 0 on. With a seed, rows are assigned at random. The conditions
    /// of [`Assignment::even`] apply.
    pub(crate) fn new(given: &[(u64, Vec<u64>)], seed: Option<u64>, patience: &mut Patience<'_>) -> Result<Schedule> {
        let mut phases: Vec<Phase> = with_room(given.len())?;
        for (first, shares) in given {
            let mut own = with_room(shares.len())?;
            own.extend_from_slice(shares);
            let before = match phases.last() {
                Some(last) => last.before(*first)?,
                None => vec![0; shares.len()],
            };
            phases.push(Phase {
                first: *first,
                assignment: match seed {
                    None => Assignment::even(own, patience)?,
                    Some(seed) => {
                        patience.look()?;
                        Assignment::random(own, seed, *first)?
                    }
                },
                before,
            });
        }
        Ok(Schedule { phases })
    }

    /// Returns the number of rows of each member before a row.
    pub(crate) fn before(&self, row: u64) -> Result<Vec<u64>> {
        let phase = self.phases.partition_point(|phase| phase.first <= row);
        self.phases[phase - 1].before(row)
    }

    /// Returns the members of `rows` successive rows, in several lists.
    pub(crate) fn members(&self, first: u64, rows: u64) -> impl Iterator<Item = &[u16]> {
        let end = first.saturating_add(rows);
        let ends = self.phases[1..].iter().map(|phase| phase.first).chain([u64::MAX]);
        self.phases.iter().zip(ends).flat_map(move |(phase, next)| {
            let (from, to) = (first.max(phase.first), end.min(next));
            phase.assignment.members(from - phase.first, to.saturating_sub(from))
        })
    }

    /// Returns the row that is the `nth` of a member, counted from 0. `None` if there is none, or if the row exceeds 64
    /// bits.
    pub(crate) fn find(&self, member: usize, nth: u64) -> Option<u64> {
        let phase = self.phases.partition_point(|phase| phase.before[member] <= nth);
        let phase = &self.phases[phase - 1];
        let row = phase.assignment.find(member, nth - phase.before[member])?;
        row.checked_add(phase.first)
    }

    /// Returns the bytes of all tables.
    pub(crate) fn bytes(&self) -> u64 {
        self.phases.iter().map(|phase| phase.assignment.bytes()).sum()
    }
}

impl Phase {
    /// Returns the number of rows of each member before a row of this phase.
    fn before(&self, row: u64) -> Result<Vec<u64>> {
        let mut before = self.assignment.before(row - self.first)?;
        before
            .iter_mut()
            .zip(&self.before)
            .for_each(|(own, before)| *own += before);
        Ok(before)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn random_phases_have_different_sequences() {
        let phases = [(0, vec![1, 1]), (1000, vec![1, 1])];
        let schedule = Schedule::new(&phases, Some(7), &mut Patience(&mut || false)).unwrap();
        let [first, second] = [0, 1000].map(|row| schedule.members(row, 1000).collect::<Vec<_>>().concat());
        assert_ne!(first, second);
    }
}
