//! Batches in flight.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, Fragment, Rows};

use crate::batch::BatchInfo;
use crate::budget::Reserved;

/// Number of records that are placed before checking again whether the pass was closed. They take far less than 100 ms.
pub(crate) const RECORDS_AT_ONCE: usize = 1024;

/// The minimum work that justifies a separate task, in nanoseconds.
pub(crate) const SMALLEST_TASK: u64 = 50_000;

/// A batch in flight.
pub(crate) struct InFlightBatch {
    /// The index of the batch, counted over all epochs of the pass.
    pub(crate) number: u64,
    /// Number of rows in the batch.
    pub(crate) size: usize,
    /// The class of its first unit.
    pub(crate) class: u32,
    /// Number of tasks that are not done.
    pending: AtomicUsize,
    outputs: Mutex<TaskOutputs>,
}

/// The results of the tasks of a batch.
#[derive(Default)]
pub(crate) struct TaskOutputs {
    pub(crate) info: Option<BatchInfo>,
    pub(crate) rows: Option<Arc<Rows>>,
    pub(crate) fragments: Vec<Fragment>,
    /// The memory reserved for the batch.
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

    /// Returns the rows that the tasks write to; the first caller creates them with `make`. If `make` fails, the batch
    /// fails with the same error.
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

    /// Records an error of the row at `slot`. The error of the earliest row is reported, even if another row fails
    /// first.
    pub(crate) fn fail(&self, slot: u32, error: Error) {
        self.outputs().fail(slot, error);
    }

    /// Counts one more task, because another thread takes over a part of a task that hasn't ended.
    pub(crate) fn split_task(&self) {
        self.pending.fetch_add(1, Ordering::AcqRel);
    }

    /// Ends a task. The last call returns the results of all tasks.
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
