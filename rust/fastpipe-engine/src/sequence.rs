//! Units that are read from front to back, each once, and what batches of runs keep of them.
//!
//! A run starts where the run of the same unit in front of it ends, which is known when that one is decoded, or when
//! somebody has skipped its records without decoding them. A task whose start isn't known is parked, until somebody
//! comes there, or a thread that has nothing else to do finds it (`idle.rs`). Of units whose records can be read at
//! random every start is known.

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

/// Units of which more pieces are to come, with the number of pieces given out. At most the unit at a batch's end.
#[derive(Default)]
pub(crate) struct Sequence {
    units: HashMap<u64, InUse>,
    /// Units that are fetched before a batch is begun that reads them, by epoch.
    ahead: HashMap<(u64, u64), Ahead>,
    /// Cells made so far.
    cells: u64,
    /// Bytes of units that the system was asked to read.
    hinted: u64,
}

/// A unit of which more pieces are to come.
struct InUse {
    cell: Arc<SequenceCell>,
    /// Pieces given out.
    pieces: u32,
    /// The record behind them.
    next: u32,
}

/// Tasks whose turn hasn't come, by the cell and the piece of it that they wait for. (Cells don't hold them, since
/// tasks hold cells: what holds each other is never freed when a pass is left early.)
pub(crate) type Parked = Mutex<HashMap<(u64, u32), Task>>;

impl Sequence {
    /// Forgets units of which no more pieces come.
    pub(crate) fn release(&mut self, units: &[u64]) {
        for unit in units {
            self.units.remove(unit);
        }
    }

    /// A batch begins with this run. Where other ranks have the records in front of it, a unit that can't be read at
    /// random is begun again.
    pub(crate) fn begin_at(&mut self, run: &Run) {
        let skips = |open: &InUse| open.next != run.record && !open.cell.lock().random;
        if self.units.get(&run.unit).is_some_and(skips) {
            self.units.remove(&run.unit);
        }
    }

    /// Forgets the units of epochs before this one.
    pub(crate) fn keep_from(&mut self, epoch: u64) {
        self.units.clear();
        self.ahead.retain(|key, _| key.0 >= epoch);
    }

    /// Forgets all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
        self.ahead.clear();
    }

    /// Units that are fetched ahead.
    pub(crate) fn ahead(&self) -> usize {
        self.ahead.len()
    }

    /// Whether a unit is in use, or fetched ahead.
    pub(crate) fn is_fetched(&self, epoch: u64, unit: u64) -> bool {
        self.units.contains_key(&unit) || self.ahead.contains_key(&(epoch, unit))
    }

    /// Units begun so far.
    pub(crate) fn cells(&self) -> u64 {
        self.cells
    }

    /// Whether a unit is in use.
    pub(crate) fn has(&self, unit: u64) -> bool {
        self.units.contains_key(&unit)
    }

    /// Bytes that are reserved for units of which more pieces are to come.
    pub(crate) fn reserved(&self) -> u64 {
        let cells = self.units.values().map(|open| &open.cell);
        let open = cells.filter_map(|cell| Some(cell.lock().reserved.as_ref()?.bytes()));
        open.chain(self.ahead.values().map(|ahead| ahead.reserved.bytes()))
            .sum()
    }

    /// Whether any was begun.
    pub(crate) fn is_in_use(&self) -> bool {
        self.cells > 0
    }

    /// The next piece of a unit.
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

/// A unit that is being fetched, and the memory for it.
pub(crate) struct Ahead {
    pub(crate) fetch: Arc<Fetch>,
    pub(crate) reserved: Reserved,
}

/// A unit that batches in flight read in sequence.
pub(crate) struct SequenceCell {
    /// The unit, and which reading of it.
    pub(crate) unit: u64,
    pub(crate) epoch: u64,
    /// No other cell of the pass has it.
    pub(crate) id: u64,
    /// What it is opened from, if a call brings that.
    pub(crate) fetch: Option<Arc<Fetch>>,
    state: Mutex<SequenceState>,
}

pub(crate) struct SequenceState {
    /// The unit, while it is open.
    pub(crate) open: Option<Arc<OpenUnit>>,
    /// Its memory, if several batches read it.
    pub(crate) reserved: Option<Reserved>,
    /// Whether somebody is opening it.
    pub(crate) opening: bool,
    /// Where pieces start, as far as that is known.
    pub(crate) starts: Vec<Mark>,
    /// A piece that ends a task, its batch and its rows, until somebody begins it: others wait for it, and whoever has
    /// nothing else to do may do it for them.
    pub(crate) tail: Option<(u32, Arc<InFlightBatch>, Run, u64)>,
    /// The piece that was done so, if its task hasn't come to it yet.
    pub(crate) taken: Option<u32>,
    /// The piece that was begun last, and when.
    pub(crate) begun: Option<(u32, Instant)>,
    /// Pieces that are done.
    pub(crate) done: u32,
    /// How many there are, once all are given out.
    pub(crate) pieces: Option<u32>,
    /// Whether somebody is skipping records.
    pub(crate) skipping: bool,
    /// Whether skipping records has failed.
    pub(crate) unskippable: bool,
    /// What went wrong, in which piece: every later one fails alike.
    pub(crate) error: Option<(u32, Error)>,
    /// Why it couldn't be opened, if its pieces don't depend on each other: all fail alike.
    lost: Option<Error>,
    /// Whether any piece can be read as soon as the unit is open.
    random: bool,
}

impl SequenceState {
    /// Where a piece that begins with a record starts, if that is known.
    pub(crate) fn start(&self, piece: u32, record: u32) -> Mark {
        match self.random {
            true => Mark { record, byte: 0 },
            false => self.starts.get(piece as usize).copied().unwrap_or(Mark::START),
        }
    }

    /// Somebody begins a piece.
    pub(crate) fn begin(&mut self, piece: u32) {
        self.begun = Some((piece, Instant::now()));
        self.tail.take_if(|tail| tail.0 == piece);
    }

    /// What went wrong in front of a piece. (One behind it may have been read earlier.)
    pub(crate) fn error_before(&self, piece: u32) -> Option<&Error> {
        let before = self.error.as_ref().filter(|(at, _)| *at < piece);
        before.map(|(_, error)| error).or(self.lost.as_ref())
    }

    /// Something went wrong in a piece.
    pub(crate) fn fail(&mut self, piece: u32, error: Error) {
        if self.random {
            // Only of a unit that isn't open others fail as well.
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

    /// Whether it is known where a piece starts.
    pub(crate) fn is_known(&self, piece: u32) -> bool {
        self.random || (piece as usize) < self.starts.len()
    }

    /// Whether records can be skipped to find where a piece starts.
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

    /// Whether there is what it is opened from.
    pub(crate) fn is_there(&self) -> bool {
        self.fetch.as_ref().is_none_or(|fetch| fetch.is_done())
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, SequenceState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A run with the unit that it reads.
#[derive(Clone)]
pub(crate) struct Piece {
    pub(crate) run: Run,
    pub(crate) cell: Arc<SequenceCell>,
    /// Which piece of the unit it is.
    pub(crate) number: u32,
    /// Nanoseconds that it is expected to take.
    pub(crate) expected: u64,
}

/// Some runs of a batch, done one after the other by one thread at a time.
pub(crate) struct Task {
    pub(crate) in_flight: Arc<InFlightBatch>,
    pub(crate) pieces: Vec<Piece>,
    /// Pieces that are done.
    pub(crate) done: usize,
    /// Nanoseconds that it is expected to take.
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
