//! Units from which records are picked in random order, and the state that batches of picks share.
//!
//! A unit is opened and the starts of its records are found once. After that, any number of batches and threads pick
//! records from it concurrently.

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

/// Units from which records are picked.
#[derive(Default)]
pub(crate) struct Scatter {
    /// Units by epoch and index, each with the last batch that is known to need it.
    units: HashMap<(u64, u64), (Arc<RandomCell>, u64)>,
    /// Recently released units.
    released: VecDeque<(u64, u64)>,
}

/// The purpose of the memory for a batch's list of units, as named in error messages.
pub(super) const UNITS: &str = "the list of a batch's units; a smaller batch_size or shuffle_buffer needs less";

/// Number of released units that are remembered. The edge of a window cuts fewer units than this, even with many ranks.
const REMEMBERED: usize = 64;

impl Scatter {
    /// Releases `units`, from which no records are picked after batch `number`, unless a later batch needs them again.
    /// Batches in flight keep their own references.
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

    /// Releases the units of epochs before `epoch`.
    pub(crate) fn keep_from(&mut self, epoch: u64) {
        self.units.retain(|key, _| key.0 >= epoch);
    }

    /// Releases all units.
    pub(crate) fn clear(&mut self) {
        self.units.clear();
    }

    /// Bytes that are reserved for units from which records will be picked.
    pub(crate) fn reserved(&self) -> u64 {
        self.units.values().map(|(cell, _)| cell.reserved.bytes()).sum()
    }

    /// Whether a unit is open or being opened.
    pub(crate) fn has(&self, epoch: u64, unit: u64) -> bool {
        self.units.contains_key(&(epoch, unit))
    }

    /// Records that batch `number` needs `units`. Returns those units that are neither open nor being opened.
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
    /// The slots that each task fills.
    pub(super) tasks: Vec<Range<usize>>,
    /// Nanoseconds that each task is expected to take.
    pub(super) cost: u64,
    /// Number of units that aren't open yet, plus one while units are still being registered.
    pub(super) missing: AtomicUsize,
}

/// A unit from which batches in flight pick records.
pub(crate) struct RandomCell {
    /// The index of the unit, and the epoch for which it is read.
    pub(crate) unit: u64,
    pub(crate) epoch: u64,
    /// Its reserved memory, from the decision to open it.
    pub(crate) reserved: Reserved,
    state: Mutex<RandomState>,
}

/// The unit as batches see it: open and indexed, or the error that prevented this.
pub(crate) type Opened = Result<Arc<OpenUnit>, Error>;

enum RandomState {
    /// The unit is being opened; these batches wait for it.
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

    /// Returns the unit, or the error that occurred, if opening it has finished.
    pub(crate) fn opened(&self) -> Option<Opened> {
        match &*self.lock() {
            RandomState::Open(opened) => Some(opened.clone()),
            RandomState::Opening(_) => None,
        }
    }

    /// Makes a batch wait for this unit. Returns false if opening has finished, so that there is nothing to wait for.
    pub(crate) fn wait(&self, batch: &Arc<Waiting>) -> bool {
        match &mut *self.lock() {
            RandomState::Open(_) => false,
            RandomState::Opening(waiting) => {
                waiting.push(batch.clone());
                true
            }
        }
    }

    /// Stores the opened unit and returns the batches that waited for it.
    pub(crate) fn open(&self, opened: Opened) -> Vec<Arc<Waiting>> {
        match std::mem::replace(&mut *self.lock(), RandomState::Open(opened)) {
            RandomState::Opening(waiting) => waiting,
            RandomState::Open(_) => Vec::new(),
        }
    }
}
