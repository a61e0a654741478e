//! Writes Arrow data to a TFRecord file.

use std::ffi::OsString;
use std::fs::File;
use std::io::Write;
use std::sync::Arc;

use arrow_array::RecordBatch;
use fastpipe_batch::{Error, path_text};
use fastpipe_tfrecord::encode;
use pyo3::prelude::*;

use crate::arrays::arrow_import::each;
use crate::errors::{IntoPy, guarded};
use crate::sources::file_writer::{WriterState, check, closed, open_to_append, push_parts, sync};

/// The maximum number of rows that are encoded at once, and their approximate size. Signals are handled after them.
const ROWS: usize = 4096;
const BYTES: usize = 1 << 20;
/// The number of rows that are encoded first, when their size is unknown.
const FIRST_ROWS: usize = 64;

/// A TFRecord file that is being written. The path must name an existing file, to which the writer appends.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct TfRecordWriter {
    state: WriterState<State>,
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

#[pymethods]
impl TfRecordWriter {
    /// `shown` is the name of the file in errors.
    #[new]
    #[pyo3(signature = (path, *, shown))]
    fn new(py: Python<'_>, path: OsString, shown: OsString) -> PyResult<Self> {
        let shown: Arc<str> = path_text(&shown).into();
        let state = State {
            file: open_to_append(&path, &shown).py(py)?,
            path: shown,
            rows: 0,
            bytes: 0,
            encoded: Vec::new(),
            at_once: FIRST_ROWS,
        };
        Ok(TfRecordWriter {
            state: WriterState::new(state),
        })
    }

    /// Writes the batches of an object with `__arrow_c_stream__` or `__arrow_c_array__` one by one. `on_progress` is
    /// called with the number of rows each time that rows are encoded.
    fn write(&self, table: &Bound<'_, PyAny>, on_progress: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let py = table.py();
        let mut locked = self.state.lock()?;
        let state = &mut *locked;
        guarded(py, || {
            each(table, |batch| {
                let state = state.as_mut().ok_or_else(closed)?;
                py.detach(|| check(&batch)).py(py)?;
                push_parts(py, &batch, state, |state| state.at_once, State::push, on_progress)
            })
            .map(drop)
        })
    }

    /// Ensures that the file is on disk. Returns the numbers of rows and bytes that were written.
    fn finish(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let state = self.state.lock()?.take().ok_or_else(closed)?;
        py.detach(|| sync(&state.file, &state.path)).py(py)?;
        Ok((state.rows, state.bytes))
    }

    /// Closes the file.
    fn close(&self) -> PyResult<()> {
        drop(self.state.lock()?.take());
        Ok(())
    }
}
