//! How far an epoch has come, as it is saved: the same for all ranks.

use std::fmt;

use crate::failure::PlanError;
use crate::rank_shards::Remaining;
use crate::window::Place;

/// How far an epoch has come: all that is needed to go on. It is the same for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// The epoch.
    pub epoch: u64,
    /// Batches that each rank has had in it.
    pub step: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// What was left when these ranks began to share it, less finished rounds.
    pub remaining: Remaining,
    /// Batches that each rank has had of that.
    pub taken: u64,
    /// Where windows that come next start: spares looking for them.
    pub places: Vec<(u64, Place)>,
}

impl State {
    /// The start of an epoch.
    pub fn start(epoch: u64, ranks: u64) -> State {
        State {
            epoch,
            ranks,
            ..State::default()
        }
    }
}

/// Why a state can't be gone on from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// Another number of ranks, and the order doesn't allow it.
    Ranks {
        /// The state's.
        saved: u64,
        /// This order's.
        now: u64,
    },
    /// It isn't one that an order of these units can have.
    Impossible,
    /// There is no memory for what it says.
    Plan(PlanError),
}

impl From<PlanError> for StateError {
    fn from(error: PlanError) -> Self {
        StateError::Plan(error)
    }
}

impl fmt::Display for StateError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            StateError::Ranks { saved, now } => write!(
                f,
                "it was saved with world_size={saved}, and this reader has world_size={now}: where ranks have units of \
                 their own that can't change within an epoch"
            ),
            StateError::Impossible => f.write_str("no reader of these files can have got to it: it is damaged"),
            StateError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}
