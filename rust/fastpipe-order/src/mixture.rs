//! Mixtures: orders whose rows come from several other orders, the members, in given shares.
//!
//! A mixture's units are those of all members, one member after the other. A member that is exhausted before the
//! mixture starts again with its next epoch, and its units then have other numbers: pass `p` over unit `u` is unit
//! `p * n + u`, where `n` is the number of all units. So the units of different passes are never confused.

use std::fmt;
use std::sync::Arc;

use crate::assignment::{LONGEST_PERIOD, MOST_MEMBERS};
use crate::failure::{Patience, PlanError, with_room};
use crate::order::Order;
use crate::schedule::{MOST_PHASES, Schedule};
use crate::settings::{Kind, Settings, ShardBy};
use crate::units::Units;

/// When an epoch of a mixture ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stop {
    /// Before the first row of a member that has no rows left. No row occurs twice.
    FirstExhausted,
    /// When each row of every member with a share has occurred. Exhausted members start again.
    AllExhausted,
    /// After this many rows. Exhausted members start again.
    Rows(u64),
}

/// One of the orders that are mixed.
#[derive(Debug)]
pub(crate) struct Member {
    /// The order, in which an incomplete last batch is included.
    pub(crate) order: Arc<Order>,
    /// Number of its rows.
    pub(crate) rows: u64,
    /// The number of its first unit in the mixture.
    pub(crate) first_unit: u64,
    /// Number of passes over the member that an epoch of the mixture begins, at least 1.
    pub(crate) passes: u64,
}

/// The members of a mixture and their shares.
#[derive(Debug)]
pub struct Mixture {
    pub(crate) members: Vec<Member>,
    pub(crate) schedule: Schedule,
    rows: u64,
    units: u64,
}

/// The reason why orders can't be mixed.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum MixtureError {
    /// There are no members, no shares, too many members or phases, phases that aren't in order, or a sum of shares
    /// above 2^20.
    Shares,
    /// A member is divided among ranks.
    Ranks(usize),
    /// A member with a share has no rows.
    Empty(usize),
    /// A member gets no more shares before all its rows have occurred.
    Never(usize),
    /// There are too many rows or units to count.
    TooLong,
    /// The assignment of rows to members can't be planned.
    Plan(PlanError),
}

impl fmt::Display for MixtureError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            MixtureError::Shares => write!(
                f,
                "a mixture has 1 to {MOST_MEMBERS} members and 1 to {MOST_PHASES} phases with shares whose sum is 1 to {LONGEST_PERIOD}"
            ),
            MixtureError::Ranks(member) => write!(f, "member {member} of a mixture is divided among ranks"),
            MixtureError::Empty(member) => write!(f, "member {member} of a mixture has no rows"),
            MixtureError::Never(member) => write!(f, "member {member} of a mixture is never exhausted"),
            MixtureError::TooLong => f.write_str("a mixture has more than 2^62 rows or units"),
            MixtureError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for MixtureError {}

impl From<PlanError> for MixtureError {
    fn from(error: PlanError) -> Self {
        MixtureError::Plan(error)
    }
}

impl Order {
    /// Creates an order of the rows of a mixture. `units` are the units of all members, one member after the other.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory can't be allocated, as for [`Order::new`].
    pub fn of_mixture(units: &Arc<Units>, settings: Settings, mixture: Arc<Mixture>) -> Result<Order, PlanError> {
        let settings = Settings {
            kind: Kind::Mixture,
            shuffle_buffer: mixture.buffers(),
            // Each rank reads units of all members.
            shard_by: ShardBy::Batch,
            ..settings
        };
        Order::of_composed(units, settings, mixture)
    }
}

const MOST: u64 = 1 << 62;

impl Mixture {
    /// Mixes the rows of orders. A phase has its first row, from 0 on, and a share for each member: of every
    /// `shares.iter().sum()` rows from there on, member `m` has `shares[m]`. With a seed, rows are assigned at random,
    /// and periods are longer. Calls `stop_planning` now and then; if it returns true, the result is an
    /// error.
    ///
    /// # Errors
    ///
    /// [`MixtureError`].
    pub fn new(
        orders: &[Arc<Order>],
        phases: &[(u64, Vec<u64>)],
        stop: Stop,
        seed: Option<u64>,
        stop_planning: &mut dyn FnMut() -> bool,
    ) -> Result<Mixture, MixtureError> {
        let fits = |shares: &Vec<u64>| {
            let sum = shares.iter().fold(0, |sum: u64, &share| sum.saturating_add(share));
            shares.len() == orders.len() && (1..=LONGEST_PERIOD).contains(&sum)
        };
        let ascend = phases.is_sorted_by(|(first, _), (next, _)| first < next);
        let begins = phases.first().is_some_and(|(first, _)| *first == 0);
        let few = orders.len() <= MOST_MEMBERS && phases.len() <= MOST_PHASES;
        if !few || !begins || !ascend || !phases.iter().all(|(_, shares)| fits(shares)) {
            return Err(MixtureError::Shares);
        }
        let shares = |index: usize| phases.iter().any(|(_, shares)| shares[index] > 0);
        let (mut members, mut units) = (with_room(orders.len())?, 0u64);
        for (index, order) in orders.iter().enumerate() {
            if order.settings().ranks != 1 {
                return Err(MixtureError::Ranks(index));
            }
            let order = order.with_last()?;
            let rows = order.epoch_rows();
            if rows == 0 && shares(index) {
                return Err(MixtureError::Empty(index));
            }
            let first_unit = units;
            units = order
                .unit_numbers()
                .and_then(|own| units.checked_add(own))
                .ok_or(MixtureError::TooLong)?;
            members.push(Member {
                order,
                rows,
                first_unit,
                passes: 1,
            });
        }
        let schedule = Schedule::new(phases, seed, &mut Patience(stop_planning))?;
        let sharing = || members.iter().enumerate().filter(|(index, _)| shares(*index));
        let rows = match stop {
            Stop::FirstExhausted => {
                let ends = sharing().filter_map(|(index, member)| schedule.find(index, member.rows));
                ends.min()
            }
            Stop::AllExhausted => {
                let mut most = 0;
                for (index, member) in sharing() {
                    let last = schedule
                        .find(index, member.rows - 1)
                        .ok_or(MixtureError::Never(index))?;
                    most = most.max(last + 1);
                }
                Some(most)
            }
            Stop::Rows(rows) => Some(rows),
        };
        let rows = rows.filter(|&rows| rows <= MOST).ok_or(MixtureError::TooLong)?;
        let counts = schedule.before(rows)?;
        for (member, count) in members.iter_mut().zip(counts) {
            member.passes = count.div_ceil(member.rows.max(1)).max(1);
        }
        let mixture = Mixture {
            members,
            schedule,
            rows,
            units,
        };
        mixture.numbers().ok_or(MixtureError::TooLong)?;
        Ok(mixture)
    }

    /// Returns the number of rows of an epoch.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of units of all members.
    pub fn units(&self) -> u64 {
        self.units
    }

    /// Returns the number of units of a member, and the number of passes over it that an epoch begins.
    pub fn member(&self, index: usize) -> Option<(u64, u64)> {
        let member = self.members.get(index)?;
        Some((member.order.unit_numbers()?, member.passes))
    }

    /// Returns the number of rows of each member in an epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory for the counts can't be allocated.
    pub fn counts(&self) -> Result<Vec<u64>, PlanError> {
        self.schedule.before(self.rows)
    }

    /// Returns how many numbers of units occur: those of every pass over a member. `None` if they are too many.
    pub(crate) fn numbers(&self) -> Option<u64> {
        let passes = self.members.iter().map(|member| member.passes).max().unwrap_or(1);
        self.units.checked_mul(passes).filter(|&numbers| numbers <= MOST)
    }

    /// Returns the sum of the members' windows, pools and buffers, in rows. A sequential member has none.
    fn buffers(&self) -> u64 {
        let buffers = self
            .members
            .iter()
            .map(|member| member.order.settings().shuffle_buffer.min(member.rows));
        buffers.fold(1, u64::saturating_add)
    }
}
