//! State of batches that are planned or in flight.

mod admit;
mod plan;

use std::collections::VecDeque;

use fastpipe_batch::Error;
use fastpipe_order::{BatchPlan, Cursor};

use crate::scatter::Scatter;
use crate::sequence::Sequence;

/// The state of admission. One thread at a time holds it, to admit batches.
pub(crate) struct Admission {
    /// `None` after the pass has ended, since it may hold a list of all rows of a window.
    cursor: Option<Cursor>,
    /// Batches that are planned but not started.
    planned: VecDeque<BatchPlan>,
    rows_planned: u64,
    /// Batches planned so far.
    plans: u64,
    /// Whether all batches are planned.
    complete: bool,
    /// Why the next batch couldn't be planned.
    unplanned: Option<Error>,
    /// Number of planned batches that were prepared: their units are being opened, or read by the system.
    prepared: usize,
    /// Expected bytes of the last batch: `rows_need` for its rows, and `need` for its rows and the units that end in
    /// it.
    rows_need: u64,
    need: u64,
    /// Epoch and window of the last batch that was started.
    window: Option<(u64, u64)>,
    /// The next batch to start, counted over all epochs.
    next: u64,
    /// The maximum number of batches that were in flight at once. Memory for this many batches is kept. Otherwise each
    /// round of batches would pay for page faults again.
    most_under_way: u64,
    epoch: u64,
    /// The batches in flight.
    begun: VecDeque<Begun>,
    pub(crate) sequence: Sequence,
    pub(crate) scatter: Scatter,
}

/// A batch in flight.
struct Begun {
    number: u64,
    /// Number of units that had been started up to this batch.
    units: u64,
    /// Nanoseconds that the batch is expected to take.
    cost: u64,
    /// Nanoseconds that the rest of its longest unit is expected to take, in this batch and later ones.
    longest: u64,
}

impl Admission {
    pub(crate) fn new(cursor: Cursor) -> Admission {
        Admission {
            epoch: cursor.current_epoch(),
            cursor: Some(cursor),
            planned: VecDeque::new(),
            rows_planned: 0,
            plans: 0,
            complete: false,
            unplanned: None,
            prepared: 0,
            window: None,
            rows_need: 0,
            need: 0,
            next: 0,
            most_under_way: 0,
            begun: VecDeque::new(),
            sequence: Sequence::default(),
            scatter: Scatter::default(),
        }
    }

    /// Releases everything.
    pub(crate) fn clear(&mut self) {
        self.cursor = None;
        self.planned = VecDeque::new();
        self.complete = true;
        self.sequence.clear();
        self.scatter.clear();
    }
}
