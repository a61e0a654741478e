//! The saved position in an epoch, which is the same for all ranks.

use std::fmt;

use crate::failure::PlanError;
use crate::rank_shards::Remaining;
use crate::window::Place;

/// The position in an epoch, with everything needed to resume. It is the same for all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct State {
    /// Index of the epoch.
    pub epoch: u64,
    /// Number of batches that each rank has had in the epoch.
    pub step: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// Batches that were left when this number of ranks began to share them, without finished rounds.
    pub remaining: Remaining,
    /// Number of batches that each rank has had of these.
    pub taken: u64,
    /// Start positions of the next windows, which save a search.
    pub places: Vec<(u64, Place)>,
}

impl State {
    /// Returns the state at the start of an epoch.
    pub fn start(epoch: u64, ranks: u64) -> State {
        State {
            epoch,
            ranks,
            ..State::default()
        }
    }
}

/// The reason why a state can't be resumed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum StateError {
    /// The number of ranks differs, and the order doesn't allow that.
    Ranks {
        /// Number of ranks in the state.
        saved: u64,
        /// Number of ranks of this order.
        now: u64,
    },
    /// No order of these units has such a state.
    Impossible,
    /// Memory for the state can't be allocated.
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
                "it was saved with world_size={saved}, but this reader has world_size={now}: if ranks have separate \
                 units, world_size can't change within an epoch"
            ),
            StateError::Impossible => f.write_str("its position doesn't exist in this dataset, so it is damaged"),
            StateError::Plan(error) => error.fmt(f),
        }
    }
}

impl std::error::Error for StateError {}
