//! Units of which records are picked at random, and what batches of picks keep of them.
//!
//! A unit is opened, the starts of its records are found once, and from then on any number of batches and threads pick
//! records at once.

mod picking;

use std::collections::hash_map::Entry;
use std::collections::{HashMap, VecDeque};
use std::ops::Range;
use std::sync::atomic::AtomicUsize;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, Result, Row, try_reserve};

use crate::budget::Reserved;
use crate::in_flight::InFlightBatch;
use crate::unit::OpenUnit;

/// Units of which records are picked.
#[derive(Default)]
pub(crate) struct Scatter {
    /// By epoch and unit, with the last batch that is known to need it.
    units: HashMap<(u64, u64), (Arc<RandomCell>, u64)>,
    /// Those that were let go of lately.
    released: VecDeque<(u64, u64)>,
}

/// What memory is for that says which units a batch needs.
pub(super) const UNITS: &str = "the list of a batch's units; a smaller batch_size or shuffle_buffer needs less";

/// Units that are remembered after they were let go of: more than the edge of a window cuts, for many ranks.
const REMEMBERED: usize = 64;

impl Scatter {
    /// Lets go of units of which no more records are picked behind batch `number`, unless a later batch needs them
    /// again; batches under way still hold theirs.
    pub(crate) fn release(&mut self, epoch: u64, units: &[u64], number: u64) {
        for &unit in units {
            if let Entry::Occupied(entry) = self.units.entry((epoch, unit))
                && entry.get().1 <= number
            {
                self.released.push_back(*entry.key());
                entry.remove();
            }
        }
        let forget = self.released.len().saturating_sub(REMEMBERED);
        self.released.drain(..forget);
    }

    /// Lets go of the units of epochs before this one.
    pub(crate) fn keep_from(&mut self, epoch: u64) {
        self.units.retain(|key, _| key.0 >= epoch);
    }

    /// Lets go of all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
    }

    /// Bytes that are reserved for units of which records will be picked.
    pub(crate) fn reserved(&self) -> u64 {
        self.units.values().map(|(cell, _)| cell.reserved.bytes()).sum()
    }

    /// Whether a unit is open, or being opened.
    pub(crate) fn has(&self, epoch: u64, unit: u64) -> bool {
        self.units.contains_key(&(epoch, unit))
    }

    /// Notes that batch `number` needs units. Returns those that aren't open.
    pub(crate) fn want(&mut self, epoch: u64, number: u64, units: &[u64]) -> Result<Vec<u64>> {
        let mut new = Vec::new();
        for &unit in units {
            match self.units.get_mut(&(epoch, unit)) {
                Some((_, last)) => *last = number.max(*last),
                None => {
                    try_reserve(&mut new, 1, UNITS)?;
                    new.push(unit);
                }
            }
        }
        let working_memory = self.units.try_reserve(new.len());
        working_memory.map_err(|_| Error::out_of_memory(new.len() * size_of::<(u64, Arc<RandomCell>)>(), UNITS))?;
        Ok(new)
    }
}

/// A batch whose units are being opened.
pub(crate) struct Waiting {
    pub(super) in_flight: Arc<InFlightBatch>,
    pub(super) units: Vec<Arc<RandomCell>>,
    pub(super) rows: Vec<Row>,
    /// The slots of each task.
    pub(super) tasks: Vec<Range<usize>>,
    /// Nanoseconds that each is expected to take.
    pub(super) cost: u64,
    /// Units that are not open, and one for whoever still adds to them.
    pub(super) missing: AtomicUsize,
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
