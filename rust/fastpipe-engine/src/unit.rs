//! Units in use.
//!
//! There are two ways of using one. *In sequence*: batches that follow one another read it piece by piece, each from where the
//! one before stopped; nothing has to be looked for, but a piece waits until it is known where it starts. *At random*: it is opened, the starts
//! of its records are found once, and from then on any number of batches and threads pick records at once.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fastpipe_batch::{Error, Mark, Unit};
use fastpipe_order::Run;

use crate::budget::Reserved;
use crate::fetch::Fetch;
use crate::job::Job;
use crate::memory::Memory;
use crate::scatter::Waiting;

/// An open unit, whose memory goes back where it came from.
pub(crate) struct OpenUnit {
    unit: Box<dyn Unit>,
    memory: Arc<Memory>,
}

impl OpenUnit {
    pub(crate) fn new(unit: Box<dyn Unit>, memory: Arc<Memory>) -> Self {
        OpenUnit { unit, memory }
    }

    pub(crate) fn get(&self) -> &dyn Unit {
        &*self.unit
    }

    pub(crate) fn get_mut(&mut self) -> &mut dyn Unit {
        &mut *self.unit
    }
}

impl Drop for OpenUnit {
    fn drop(&mut self) {
        self.unit.recycle(&self.memory.buffers);
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
    /// A piece that ends a task, its batch and its rows, until somebody begins it: others wait for it, and whoever has nothing
    /// else to do may do it for them.
    pub(crate) tail: Option<(u32, Arc<Job>, Run, u64)>,
    /// The piece that was done so, if its task hasn't come to it yet.
    pub(crate) taken: Option<u32>,
    /// The piece that was begun last, and when.
    pub(crate) begun: Option<(u32, Instant)>,
    /// Pieces that are done.
    pub(crate) done: u32,
    /// How many there are, once all are given out.
    pub(crate) pieces: Option<u32>,
    /// Whether somebody is passing over records.
    pub(crate) passing: bool,
    /// Whether passing over records has failed.
    pub(crate) impassable: bool,
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

    /// Whether records can be passed over to find where a piece starts.
    pub(crate) fn can_be_passed_over(&self, piece: u32) -> bool {
        piece > 0
            && !self.random
            && self.starts.len() == piece as usize
            && self.error.is_none()
            && !(self.opening || self.passing || self.impassable)
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
            passing: false,
            impassable: false,
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

/// A unit of which batches in flight pick records.
pub(crate) struct RandomCell {
    /// The unit, and which reading of it.
    pub(crate) unit: u64,
    pub(crate) epoch: u64,
    /// Its memory, from when it is decided to open it.
    pub(crate) reserved: Reserved,
    state: Mutex<RandomState>,
}

/// The unit as batches see it: open and indexed, or what went wrong.
pub(crate) type Opened = Result<Arc<OpenUnit>, Error>;

enum RandomState {
    /// Being opened, and who waits for that.
    Opening(Vec<Arc<Waiting>>),
    Open(Opened),
}

impl RandomCell {
    pub(crate) fn new(unit: u64, epoch: u64, reserved: Reserved) -> Self {
        RandomCell {
            unit,
            epoch,
            reserved,
            state: Mutex::new(RandomState::Opening(Vec::new())),
        }
    }

    fn lock(&self) -> MutexGuard<'_, RandomState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The unit, if it is open.
    pub(crate) fn opened(&self) -> Option<Opened> {
        match &*self.lock() {
            RandomState::Open(opened) => Some(opened.clone()),
            RandomState::Opening(_) => None,
        }
    }

    /// Lets a batch wait; false if there is nothing to wait for.
    pub(crate) fn wait(&self, batch: &Arc<Waiting>) -> bool {
        match &mut *self.lock() {
            RandomState::Open(_) => false,
            RandomState::Opening(waiting) => {
                waiting.push(batch.clone());
                true
            }
        }
    }

    /// The unit has been opened. Returns who waited.
    pub(crate) fn open(&self, opened: Opened) -> Vec<Arc<Waiting>> {
        match std::mem::replace(&mut *self.lock(), RandomState::Open(opened)) {
            RandomState::Opening(waiting) => waiting,
            RandomState::Open(_) => Vec::new(),
        }
    }
}
