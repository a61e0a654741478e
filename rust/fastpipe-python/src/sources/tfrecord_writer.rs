//! Writes Arrow data to a TFRecord file.

use std::ffi::OsString;
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::sync::{Arc, Mutex, MutexGuard};

use arrow_array::{Array, RecordBatch};
use fastpipe_batch::{Error, ErrorKind, path_text};
use fastpipe_tfrecord::encode;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arrays::arrow_import::each;
use crate::errors::{IntoPy, guarded};

/// The maximum number of rows that are encoded at once, and their approximate size. Signals are handled after them.
const ROWS: usize = 4096;
const BYTES: usize = 1 << 20;
/// The number of rows that are encoded first, when their size is unknown.
const FIRST_ROWS: usize = 64;

/// A TFRecord file that is being written. The path must name an existing file, to which the writer appends.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct TfRecordWriter {
    state: Mutex<Option<State>>,
}

struct State {
    file: File,
    path: Arc<str>,
    rows: u64,
    bytes: u64,
    /// Working memory for encoded records.
    encoded: Vec<u8>,
    /// The number of rows to encode next.
    at_once: usize,
}

impl State {
    fn push(&mut self, batch: &RecordBatch) -> Result<(), Error> {
        self.encoded.clear();
        let first = self.rows;
        encode(batch, &mut self.encoded).map_err(|error| {
            let row = error.location().record.map(|row| first + row);
            row.map_or(error.clone(), |row| error.with_record(row))
        })?;
        let written = self.file.write_all(&self.encoded);
        written.map_err(|error| Error::io(&self.path, &error))?;
        self.rows += batch.num_rows() as u64;
        self.bytes += self.encoded.len() as u64;
        let row = self.encoded.len() / batch.num_rows().max(1);
        self.at_once = (BYTES / row.max(1)).clamp(1, ROWS);
        Ok(())
    }
}

impl TfRecordWriter {
    /// Locks the state without waiting. Another thread may hold the lock while it waits for the GIL.
    fn locked(&self) -> PyResult<MutexGuard<'_, Option<State>>> {
        let busy = |_| PyRuntimeError::new_err("another thread is writing with this writer, or has failed to write");
        self.state.try_lock().map_err(busy)
    }
}

fn closed() -> PyErr {
    PyRuntimeError::new_err("the writer is closed")
}

#[pymethods]
impl TfRecordWriter {
    /// `shown` is the name of the file in errors.
    #[new]
    #[pyo3(signature = (path, *, shown))]
    fn new(py: Python<'_>, path: OsString, shown: OsString) -> PyResult<Self> {
        let shown: Arc<str> = path_text(&shown).into();
        let file = OpenOptions::new().append(true).open(&path);
        let file = file.map_err(|error| Error::io(&shown, &error)).py(py)?;
        let state = State {
            file,
            path: shown,
            rows: 0,
            bytes: 0,
            encoded: Vec::new(),
            at_once: FIRST_ROWS,
        };
        Ok(TfRecordWriter {
            state: Mutex::new(Some(state)),
        })
    }

    /// Writes the batches of an object with `__arrow_c_stream__` or `__arrow_c_array__` one by one. `told` is called
    /// with the number of rows each time that rows are encoded.
    fn write(&self, table: &Bound<'_, PyAny>, told: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let py = table.py();
        let mut locked = self.locked()?;
        let state = &mut *locked;
        guarded(py, || {
            each(table, |batch| {
                let state = state.as_mut().ok_or_else(closed)?;
                py.detach(|| sound(&batch)).py(py)?;
                let mut from = 0;
                loop {
                    let part = batch.slice(from, state.at_once.min(batch.num_rows() - from));
                    py.detach(|| state.push(&part)).py(py)?;
                    from += part.num_rows();
                    if let Some(told) = told {
                        told.call1((part.num_rows(),))?;
                    }
                    py.check_signals()?;
                    if from == batch.num_rows() {
                        return Ok(());
                    }
                }
            })
            .map(drop)
        })
    }

    /// Ensures that the file is on disk. Returns the numbers of rows and bytes that were written.
    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let state = self.locked()?.take().ok_or_else(closed)?;
        let synced = py.detach(|| state.file.sync_all().map_err(|error| Error::io(&state.path, &error)));
        synced.py(py)?;
        Ok((state.rows, state.bytes))
    }

    /// Closes the file.
    fn close(&self) -> PyResult<()> {
        drop(self.locked()?.take());
        Ok(())
    }
}

/// Checks a batch, because offsets and texts from C's interface can't be trusted.
fn sound(batch: &RecordBatch) -> Result<(), Error> {
    for (field, column) in batch.schema().fields().iter().zip(batch.columns()) {
        column.to_data().validate_full().map_err(|error| {
            let reason = format!("damaged Arrow data: {error}");
            Error::new(ErrorKind::Malformed, reason).at_feature(field.name())
        })?;
    }
    Ok(())
}
