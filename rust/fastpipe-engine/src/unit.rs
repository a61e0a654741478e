//! Units in use: fetched and opened once, read piece by piece in the order of the pieces.

use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, Mark, Unit};

use crate::job::Task;

/// A unit that batches in flight take rows from.
pub(crate) struct UnitCell {
    /// The unit, and which reading of it.
    pub(crate) unit: u64,
    pub(crate) epoch: u64,
    state: Mutex<UnitState>,
}

#[derive(Default)]
pub(crate) struct UnitState {
    /// The unit, while nobody is reading it and it is open.
    pub(crate) open: Option<Box<dyn Unit>>,
    /// Where the last piece ended.
    pub(crate) mark: Mark,
    /// Pieces that are done.
    pub(crate) done: u32,
    /// What went wrong: every later piece fails alike.
    pub(crate) error: Option<Error>,
    /// Tasks whose turn hasn't come, by the piece that they wait for.
    parked: Vec<(u32, Task)>,
}

impl UnitCell {
    pub(crate) fn new(unit: u64, epoch: u64) -> Self {
        UnitCell {
            unit,
            epoch,
            state: Mutex::default(),
        }
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, UnitState> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl UnitState {
    /// Keeps a task until `piece` is the next one.
    pub(crate) fn park(&mut self, piece: u32, task: Task) {
        self.parked.push((piece, task));
    }

    /// Ends a piece. Returns the task that waited for it.
    pub(crate) fn advance(&mut self) -> Option<Task> {
        self.done += 1;
        let next = self.parked.iter().position(|(piece, _)| *piece == self.done)?;
        Some(self.parked.swap_remove(next).1)
    }
}
