//! The parts that writers of files share.

use std::ffi::OsStr;
use std::fs::{File, OpenOptions};
use std::sync::{Mutex, MutexGuard};

use arrow_array::{Array, RecordBatch};
use fastpipe_batch::{Error, ErrorKind};
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::errors::IntoPy;

/// The state of a writer, until it is closed.
pub(crate) struct WriterState<S>(Mutex<Option<S>>);

impl<S> WriterState<S> {
    pub(crate) fn new(state: S) -> WriterState<S> {
        WriterState(Mutex::new(Some(state)))
    }

    /// Locks the state without waiting. Another thread may hold the lock while it waits for the GIL.
    pub(crate) fn lock(&self) -> PyResult<MutexGuard<'_, Option<S>>> {
        let busy = |_| PyRuntimeError::new_err("another thread is writing with this writer, or has failed to write");
        self.0.try_lock().map_err(busy)
    }
}

pub(crate) fn closed() -> PyErr {
    PyRuntimeError::new_err("the writer is closed")
}

/// Opens an existing file to append to it. `shown` is its name in errors.
pub(crate) fn open_to_append(path: &OsStr, shown: &str) -> Result<File, Error> {
    let file = OpenOptions::new().append(true).open(path);
    file.map_err(|error| Error::io(shown, &error))
}

/// Ensures that a file is on disk.
pub(crate) fn sync(file: &File, shown: &str) -> Result<(), Error> {
    file.sync_all().map_err(|error| Error::io(shown, &error))
}

/// Checks a batch, because offsets and texts from C's interface can't be trusted.
pub(crate) fn check(batch: &RecordBatch) -> Result<(), Error> {
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        column.to_data().validate_full().map_err(|error| {
            let reason = format!("damaged Arrow data: {error}");
            Error::new(ErrorKind::Malformed, reason).at_feature(field.name())
        })?;
    }
    Ok(())
}

/// Passes the rows of a batch to `push` in parts, each of at most as many rows as `rows_at_once` returns. A batch
/// without rows is one part. `on_progress` is called with the number of rows after each part, and signals are handled.
pub(crate) fn push_parts<W: Send>(
    py: Python<'_>,
    batch: &RecordBatch,
    writer: &mut W,
    rows_at_once: impl Fn(&W) -> usize,
    push: impl Fn(&mut W, &RecordBatch) -> Result<(), Error> + Sync,
    on_progress: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let (mut from, rows) = (0, batch.num_rows());
    loop {
        let part = batch.slice(from, rows_at_once(writer).min(rows - from));
        py.detach(|| push(writer, &part)).py(py)?;
        from += part.num_rows();
        if let Some(on_progress) = on_progress {
            on_progress.call1((part.num_rows(),))?;
        }
        py.check_signals()?;
        if from == rows {
            return Ok(());
        }
    }
}
