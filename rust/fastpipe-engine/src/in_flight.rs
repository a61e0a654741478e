//! Batches in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, Fragment, Rows};

use crate::batch::BatchInfo;
use crate::budget::Reserved;

/// Records placed between two looks at whether the pass was closed: far below 100 ms of work.
pub(crate) const RECORDS_AT_ONCE: usize = 1024;

/// Work that is worth a task of its own, in nanoseconds.
pub(crate) const SMALLEST_TASK: u64 = 50_000;

/// A batch in flight.
pub(crate) struct InFlightBatch {
    /// Counted over all epochs of the pass.
    pub(crate) number: u64,
    /// Number of its rows.
    pub(crate) size: usize,
    /// Which of the source's classes it is made of, or mostly.
    pub(crate) class: u32,
    /// Tasks that are not done.
    pending: AtomicUsize,
    outputs: Mutex<TaskOutputs>,
}

/// What tasks leave.
#[derive(Default)]
pub(crate) struct TaskOutputs {
    pub(crate) info: Option<BatchInfo>,
    pub(crate) rows: Option<Arc<Rows>>,
    pub(crate) fragments: Vec<Fragment>,
    /// The batch's memory.
    pub(crate) reserved: Option<Reserved>,
    /// The error of the earliest row.
    error: Option<(u32, Error)>,
}

impl TaskOutputs {
    fn fail(&mut self, slot: u32, error: Error) {
        if self.error.as_ref().is_none_or(|(earlier, _)| slot < *earlier) {
            self.error = Some((slot, error));
        }
    }
}

impl InFlightBatch {
    pub(crate) fn new(number: u64, info: BatchInfo, tasks: usize, class: u32, reserved: Reserved) -> Self {
        let size = info.rows;
        let outputs = TaskOutputs {
            info: Some(info),
            reserved: Some(reserved),
            ..TaskOutputs::default()
        };
        InFlightBatch {
            number,
            size,
            class,
            pending: AtomicUsize::new(tasks),
            outputs: Mutex::new(outputs),
        }
    }

    fn outputs(&self) -> MutexGuard<'_, TaskOutputs> {
        self.outputs.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Where its rows are written; made for whoever comes first. An error of `make` is the batch's as well.
    pub(crate) fn rows(&self, make: impl FnOnce() -> Result<Rows, Error>) -> Result<Arc<Rows>, Error> {
        let mut outputs = self.outputs();
        if let Some(rows) = &outputs.rows {
            return Ok(rows.clone());
        }
        let rows = make().map(Arc::new);
        match &rows {
            Ok(rows) => outputs.rows = Some(rows.clone()),
            Err(error) => outputs.fail(0, error.clone()),
        }
        rows
    }

    pub(crate) fn leave(&self, fragment: Fragment) {
        self.outputs().fragments.push(fragment);
    }

    /// Notes an error of the row at `slot`. That of the earliest row is reported, whichever thread is first.
    pub(crate) fn fail(&self, slot: u32, error: Error) {
        self.outputs().fail(slot, error);
    }

    /// Somebody does a part of a task, which hasn't ended, as a task of its own.
    pub(crate) fn split_task(&self) {
        self.pending.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends a task. The last one gets what all of them left.
    pub(crate) fn end_task(&self) -> Option<Result<TaskOutputs, Error>> {
        if self.pending.fetch_sub(1, Ordering::AcqRel) != 1 {
            return None;
        }
        let mut outputs = std::mem::take(&mut *self.outputs());
        Some(match outputs.error.take() {
            Some((_, error)) => Err(error),
            None => Ok(outputs),
        })
    }
}
