//! Units that are read sequentially, each once, and the state that batches of runs share.
//!
//! Each run reads one *piece* of a unit. A *cell* is the state of a unit that several tasks share while they read its
//! pieces.
//!
//! A piece starts where the previous piece of the same unit ends. That position is known once the previous piece has
//! been decoded, or once a thread has skipped its records without decoding them. A task whose start isn't known is
//! parked until another task reaches that position, or an idle thread finds it (`skip_ahead.rs`). If the records of a
//! unit can be read in any order, all starts are known.

mod reading;
mod skip_ahead;

use std::collections::HashMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fastpipe_batch::{Error, Mark};
use fastpipe_order::Run;

use crate::budget::Reserved;
use crate::fetch::Fetch;
use crate::in_flight::InFlightBatch;
use crate::schedule::Urgency;
use crate::unit::OpenUnit;

/// Units with more pieces to come. Between two batches, this is at most the unit at the end of the earlier batch.
#[derive(Default)]
pub(crate) struct Sequence {
    units: HashMap<u64, InUse>,
    /// Units that are fetched before the batch that reads them starts, by epoch and unit.
    ahead: HashMap<(u64, u64), Ahead>,
    /// Number of cells created so far.
    cells: u64,
    /// Bytes of units that the system was asked to read in advance.
    hinted: u64,
}

/// A unit with more pieces to come.
struct InUse {
    cell: Arc<SequenceCell>,
    /// Number of pieces created so far.
    pieces: u32,
    /// The record after these pieces.
    next: u32,
}

/// Tasks that can't continue yet, by the cell and the piece that they wait for. Cells don't own these tasks, because
/// tasks own cells. Such a cycle would never be freed if a pass is left early.
pub(crate) type Parked = Mutex<HashMap<(u64, u32), Task>>;

impl Sequence {
    /// Drops units that have no more pieces.
    pub(crate) fn release(&mut self, units: &[u64]) {
        for unit in units {
            self.units.remove(unit);
        }
    }

    /// Prepares the unit of the first run of a batch. If the preceding records belong to other ranks, a unit that must
    /// be read sequentially is started again.
    pub(crate) fn begin_at(&mut self, run: &Run) {
        let skips = |open: &InUse| open.next != run.record && !open.cell.lock().random;
        if self.units.get(&run.unit).is_some_and(skips) {
            self.units.remove(&run.unit);
        }
    }

    /// Drops the units of epochs before `epoch`.
    pub(crate) fn keep_from(&mut self, epoch: u64) {
        self.units.clear();
        self.ahead.retain(|key, _| key.0 >= epoch);
    }

    /// Drops all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
        self.ahead.clear();
    }

    /// Number of units that are fetched in advance.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead.len()
    }

    /// Whether a unit is in use, or is fetched in advance.
    pub(crate) fn is_fetched(&self, epoch: u64, unit: u64) -> bool {
        self.units.contains_key(&unit) || self.ahead.contains_key(&(epoch, unit))
    }

    /// Number of units started so far.
    pub(crate) fn cells(&self) -> u64 {
        self.cells
    }

    /// Whether a unit is in use.
    pub(crate) fn has(&self, unit: u64) -> bool {
        self.units.contains_key(&unit)
    }

    /// Bytes that are reserved for units with more pieces to come.
    pub(crate) fn reserved(&self) -> u64 {
        let cells = self.units.values().map(|open| &open.cell);
        let open = cells.filter_map(|cell| Some(cell.lock().reserved.as_ref()?.bytes()));
        open.chain(self.ahead.values().map(|ahead| ahead.reserved.bytes()))
            .sum()
    }

    /// Whether any unit was started.
    pub(crate) fn is_in_use(&self) -> bool {
        self.cells > 0
    }

    /// Creates the next piece of a unit. `last` means that the unit has no more pieces.
    fn piece(&mut self, run: Run, epoch: u64, last: bool, expected: u64, random: bool) -> Piece {
        let open = self.units.remove(&run.unit).map(|open| (open.cell, open.pieces));
        let (cell, number) = open.unwrap_or_else(|| {
            self.cells += 1;
            let ahead = self.ahead.remove(&(epoch, run.unit));
            (
                Arc::new(SequenceCell::new(run.unit, epoch, self.cells, random, ahead)),
                0,
            )
        });
        if last {
            cell.lock().pieces = Some(number + 1);
        } else {
            let open = InUse {
                cell: cell.clone(),
                pieces: number + 1,
                next: run.record + run.rows,
            };
            self.units.insert(run.unit, open);
        }
        Piece {
            run,
            cell,
            number,
            expected,
        }
    }
}

/// A unit that is being fetched, and its reserved memory.
pub(crate) struct Ahead {
    pub(crate) fetch: Arc<Fetch>,
    pub(crate) reserved: Reserved,
}

/// A unit that batches in flight read sequentially.
pub(crate) struct SequenceCell {
    /// The index of the unit, and the epoch for which it is read.
    pub(crate) unit: u64,
    pub(crate) epoch: u64,
    /// The unique id of the cell within the pass.
    pub(crate) id: u64,
    /// The fetch that provides the data of the unit, if the source fetches.
    pub(crate) fetch: Option<Arc<Fetch>>,
    state: Mutex<SequenceState>,
}

pub(crate) struct SequenceState {
    /// The open unit, until its last piece is done.
    pub(crate) open: Option<Arc<OpenUnit>>,
    /// Its reserved memory, if several batches read it.
    pub(crate) reserved: Option<Reserved>,
    /// Whether a thread is opening it.
    pub(crate) opening: bool,
    /// The starts of pieces that are known so far.
    pub(crate) starts: Vec<Mark>,
    /// The last piece of a task, with its batch, its run and its expected time, until a thread begins it. Other tasks
    /// wait for this piece, and an idle thread may process it in place of its task.
    pub(crate) tail: Option<(u32, Arc<InFlightBatch>, Run, u64)>,
    /// The piece that an idle thread has processed, if its task hasn't reached it yet.
    pub(crate) taken: Option<u32>,
    /// The piece that was started last, and the time of its start.
    pub(crate) begun: Option<(u32, Instant)>,
    /// Number of pieces that are done.
    pub(crate) done: u32,
    /// Total number of pieces, once all are created.
    pub(crate) pieces: Option<u32>,
    /// Whether a thread is skipping records.
    pub(crate) skipping: bool,
    /// Whether skipping records has failed.
    pub(crate) unskippable: bool,
    /// The error of the earliest piece that failed. All later pieces fail with the same error.
    pub(crate) error: Option<(u32, Error)>,
    /// The error that prevented opening the unit, if pieces don't depend on each other. All pieces fail with it.
    lost: Option<Error>,
    /// Whether any piece can be read once the unit is open.
    random: bool,
}

impl SequenceState {
    /// Returns where a piece whose first record is `record` starts, or the start of the unit if that isn't known.
    pub(crate) fn start(&self, piece: u32, record: u32) -> Mark {
        match self.random {
            true => Mark { record, byte: 0 },
            false => self.starts.get(piece as usize).copied().unwrap_or(Mark::START),
        }
    }

    /// Records that a thread begins a piece.
    pub(crate) fn begin(&mut self, piece: u32) {
        self.begun = Some((piece, Instant::now()));
        self.tail.take_if(|tail| tail.0 == piece);
    }

    /// Returns the error of a piece before this one. An error of a later piece, which may have been read first, doesn't
    /// count.
    pub(crate) fn error_before(&self, piece: u32) -> Option<&Error> {
        let before = self.error.as_ref().filter(|(at, _)| *at < piece);
        before.map(|(_, error)| error).or(self.lost.as_ref())
    }

    /// Records an error in a piece.
    pub(crate) fn fail(&mut self, piece: u32, error: Error) {
        if self.random {
            // Other pieces fail as well only if the unit couldn't be opened.
            if self.open.is_none() {
                self.lost.get_or_insert(error);
            }
        } else if self.error.as_ref().is_none_or(|(at, _)| piece < *at) {
            self.error = Some((piece, error));
        }
    }

    /// Whether a piece can't be read yet.
    pub(crate) fn must_wait(&self, piece: u32) -> bool {
        self.error_before(piece).is_none() && (self.opening || !self.is_known(piece))
    }

    /// Whether the start of a piece is known.
    pub(crate) fn is_known(&self, piece: u32) -> bool {
        self.random || (piece as usize) < self.starts.len()
    }

    /// Whether the start of a piece can be found by skipping records.
    pub(crate) fn can_be_skipped(&self, piece: u32) -> bool {
        piece > 0
            && !self.random
            && self.starts.len() == piece as usize
            && self.error.is_none()
            && !(self.opening || self.skipping || self.unskippable)
    }
}

impl SequenceCell {
    pub(crate) fn new(unit: u64, epoch: u64, id: u64, random: bool, ahead: Option<Ahead>) -> Self {
        let (fetch, reserved) = ahead.map_or((None, None), |ahead| (Some(ahead.fetch), Some(ahead.reserved)));
        let state = SequenceState {
            open: None,
            reserved,
            opening: false,
            starts: vec![Mark::START],
            tail: None,
            taken: None,
            begun: None,
            done: 0,
            pieces: None,
            skipping: false,
            unskippable: false,
            error: None,
            lost: None,
            random,
        };
        SequenceCell {
            unit,
            epoch,
            id,
            fetch,
            state: Mutex::new(state),
        }
    }

    /// Whether the data from which the unit is opened is available.
    pub(crate) fn is_there(&self) -> bool {
        self.fetch.as_ref().is_none_or(|fetch| fetch.is_done())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SequenceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run and the unit that it reads.
#[derive(Clone)]
pub(crate) struct Piece {
    pub(crate) run: Run,
    pub(crate) cell: Arc<SequenceCell>,
    /// The index of the piece within its unit.
    pub(crate) number: u32,
    /// Nanoseconds that the piece is expected to take.
    pub(crate) expected: u64,
}

/// Some runs of a batch, which are processed one after the other, by one thread at a time.
pub(crate) struct Task {
    pub(crate) in_flight: Arc<InFlightBatch>,
    pub(crate) pieces: Vec<Piece>,
    /// Number of pieces that are done.
    pub(crate) done: usize,
    /// Nanoseconds that the task is expected to take.
    pub(crate) cost: u64,
}

impl Task {
    pub(crate) fn urgency(&self) -> Urgency {
        Urgency {
            batch: self.in_flight.number,
            cost: self.cost,
        }
    }
}
