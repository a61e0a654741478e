//! The state of an epoch in the form that Python stores.

use fastpipe_order::{PartialChunk, Place, Remaining, State};
use pyo3::prelude::*;

/// The state of an epoch. It uses lists because JSON turns tuples into lists.
#[derive(FromPyObject, IntoPyObject)]
#[pyo3(from_item_all)]
pub(crate) struct Progress {
    epoch: u64,
    step: u64,
    world_size: u64,
    taken: u64,
    next: u64,
    open: Vec<[u64; 2]>,
    late: Vec<[u64; 2]>,
    places: Vec<[u64; 3]>,
}

impl From<&State> for Progress {
    fn from(state: &State) -> Self {
        let pairs = |open: &[PartialChunk]| open.iter().map(|open| [open.chunk, open.from]).collect();
        let place = |(window, place): &(u64, Place)| [*window, place.unit, u64::from(place.record)];
        Progress {
            epoch: state.epoch,
            step: state.step,
            world_size: state.ranks,
            taken: state.taken,
            next: state.remaining.next,
            open: pairs(&state.remaining.partial),
            late: pairs(&state.remaining.deferred),
            places: state.places.iter().map(place).collect(),
        }
    }
}

impl From<Progress> for State {
    fn from(progress: Progress) -> State {
        let open = |pairs: Vec<[u64; 2]>| {
            pairs
                .into_iter()
                .map(|[chunk, from]| PartialChunk { chunk, from })
                .collect()
        };
        let place = |[window, unit, record]: [u64; 3]| {
            // No unit has this many records, so the place is rejected later.
            let record = u32::try_from(record).unwrap_or(u32::MAX);
            (window, Place { unit, record })
        };
        State {
            epoch: progress.epoch,
            step: progress.step,
            ranks: progress.world_size,
            taken: progress.taken,
            remaining: Remaining {
                partial: open(progress.open),
                deferred: open(progress.late),
                next: progress.next,
            },
            places: progress.places.into_iter().map(place).collect(),
        }
    }
}
