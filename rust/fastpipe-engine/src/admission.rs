//! What is known of batches that are under way, or will be.

mod admit;
mod plan;

use std::collections::VecDeque;

use fastpipe_batch::Error;
use fastpipe_order::{BatchPlan, Cursor};

use crate::scatter::Scatter;
use crate::sequence::Sequence;

/// Who admits batches holds this.
pub(crate) struct Admission {
    /// `None` once the pass has ended: it may list all rows of a window.
    cursor: Option<Cursor>,
    /// Batches that are planned and not begun.
    planned: VecDeque<BatchPlan>,
    rows_planned: u64,
    /// Batches planned so far.
    plans: u64,
    /// Whether all are planned.
    complete: bool,
    /// Why the one behind those that are planned can't be.
    unplanned: Option<Error>,
    /// How many of the planned batches were prepared: their units are being opened, or read by the system.
    prepared: usize,
    /// Bytes that the rows of the last batch were expected to take, and with units that end in it.
    rows_need: u64,
    need: u64,
    /// Epoch and window of the last batch that was begun.
    window: Option<(u64, u64)>,
    /// The next batch to be begun, counted over all epochs.
    next: u64,
    /// Batches that were under way at once. Memory for as many is kept, or each round of them would pay for page
    /// faults.
    most_under_way: u64,
    epoch: u64,
    /// The batches under way.
    begun: VecDeque<Begun>,
    pub(crate) sequence: Sequence,
    pub(crate) scatter: Scatter,
}

/// A batch under way.
struct Begun {
    number: u64,
    /// Units that had been begun with it.
    units: u64,
    /// Nanoseconds that it is expected to take.
    cost: u64,
    /// Nanoseconds that the rest of the longest of its units is expected to take, in this batch and those behind it.
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

    /// Lets go of everything.
    pub(crate) fn clear(&mut self) {
        self.cursor = None;
        self.planned = VecDeque::new();
        self.complete = true;
        self.sequence.clear();
        self.scatter.clear();
    }
}
