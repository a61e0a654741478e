//! Exports the batches of a pass to other libraries through Arrow's C data interface and its PyCapsules.
//!
//! The consumer of a stream calls it on any thread, with or without the GIL. The stream waits for a batch without the
//! GIL, since producing the batch may need Python. The remaining work is short and is done with the GIL. Therefore no
//! other thread can hold a lock of the pass when a process forks.

use std::collections::{HashMap, HashSet};

use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_array::{RecordBatch, RecordBatchReader};
use arrow_buffer::Buffer;
use arrow_schema::{ArrowError, SchemaRef};
use fastpipe_batch::{ColumnSpec, Error};
use fastpipe_columns::{buffer, to_record_batch};
use fastpipe_engine::Batch;
use pyo3::exceptions::{PyKeyboardInterrupt, PyMemoryError};
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::arrays::arrow_schema::{batch_capsules, schema_of};
use crate::errors::{IntoPy, guarded};
use crate::passes::pass::Pass;

/// A pass whose batches are drawn as Arrow record batches. The pass ends when this object or its stream is dropped.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ArrowBatches {
    pass: Py<Pass>,
    schema: SchemaRef,
    /// The columns in which NaN represents null.
    nan_is_null: HashSet<String>,
    /// A function that is called with the number of rows of each batch, and with None at the end of the pass.
    count: Option<Py<PyAny>>,
}

impl ArrowBatches {
    fn draw(&self, py: Python<'_>) -> PyResult<Option<RecordBatch>> {
        let drawn = self.pass.get().draw(py, |columns, batch| {
            py.detach(|| self.record_batch(columns, batch)).py(py)
        });
        if let Some(count) = &self.count {
            let rows = drawn
                .as_ref()
                .ok()
                .and_then(|batch| batch.as_ref().map(RecordBatch::num_rows));
            count.call1(py, (rows, drawn.is_ok()))?;
        }
        drawn
    }

    fn record_batch(&self, columns: &[ColumnSpec], batch: Batch) -> Result<RecordBatch, Error> {
        let slabs: Vec<Buffer> = batch.slabs.into_iter().map(buffer).collect();
        let parts = batch.parts.iter();
        let parts = parts.map(|part| match part.len {
            // The slab of an empty part may be unaligned.
            0 => Buffer::default(),
            len => slabs[part.slab].slice_with_length(part.offset, len),
        });
        let (rows, valid) = (batch.info.rows, batch.info.valid);
        let filled: HashSet<usize> = batch.info.filled_slots().collect();
        let is_valid = |row: usize| row < valid && !filled.contains(&row);
        to_record_batch(&self.schema, columns, parts, rows, is_valid, &self.nan_is_null)
    }
}

#[pymethods]
impl ArrowBatches {
    #[new]
    #[pyo3(signature = (started, metadata, nan_is_null, count=None))]
    fn new(
        py: Python<'_>,
        started: Py<Pass>,
        metadata: HashMap<String, String>,
        nan_is_null: HashSet<String>,
        count: Option<Py<PyAny>>,
    ) -> PyResult<Self> {
        let pass = started.get();
        let schema = guarded(py, || schema_of(pass.columns(), pass.is_padded(), metadata).py(py))?;
        Ok(ArrowBatches {
            pass: started,
            schema,
            nan_is_null,
            count,
        })
    }

    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    /// Returns the next batch as the capsules of a schema and an array.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(batch) = self.draw(py)? else { return Ok(None) };
        guarded(py, || batch_capsules(py, &self.schema, batch).map(Some))
    }

    /// Returns the remaining batches as the capsule of a stream.
    fn stream<'py>(this: Bound<'py, Self>) -> PyResult<Bound<'py, PyCapsule>> {
        let py = this.py();
        guarded(py, || {
            let schema = this.get().schema.clone();
            let stream = Stream {
                batches: Some(this.unbind()),
                schema,
            };
            let stream = FFI_ArrowArrayStream::new(Box::new(stream));
            PyCapsule::new_with_value(py, stream, c"arrow_array_stream")
        })
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        visit.call(&self.pass)?;
        self.count.as_ref().map_or(Ok(()), |count| visit.call(count))
    }
}

/// The implementation of an exported C stream.
struct Stream {
    batches: Option<Py<ArrowBatches>>,
    schema: SchemaRef,
}

impl Iterator for Stream {
    type Item = Result<RecordBatch, ArrowError>;

    fn next(&mut self) -> Option<Self::Item> {
        let batches = self.batches.as_ref()?;
        let drawn = Python::try_attach(|py| guarded(py, || batches.get().draw(py)).map_err(|error| told(py, &error)));
        let ending = || Err(ArrowError::ExternalError("the interpreter is ending".into()));
        drawn.unwrap_or_else(ending).transpose()
    }
}

impl RecordBatchReader for Stream {
    fn schema(&self) -> SchemaRef {
        self.schema.clone()
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // This ends the pass now. Otherwise, it would end when a later thread with the GIL drops pending references.
        Python::try_attach(|_| drop(self.batches.take()));
    }
}

/// Converts an exception to text, which is all that a C stream can report.
fn told(py: Python<'_>, error: &PyErr) -> ArrowError {
    let class = error.get_type(py).fully_qualified_name();
    let name = class.map_or_else(|_| "an error".into(), |name| name.to_string());
    // A NUL would end a C string early.
    let text = format!("{name}: {}", error.value(py)).replace('\0', "\\0");
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // The consumer of the stream raises another exception instead, so Ctrl-C would be lost. This raises it again
        // when Python code next runs.
        let thread = py.import("_thread");
        if let Err(error) = thread.and_then(|thread| thread.call_method0("interrupt_main")) {
            error.write_unraisable(py, None);
        }
    }
    if error.is_instance_of::<PyMemoryError>(py) {
        return ArrowError::MemoryError(text);
    }
    ArrowError::ExternalError(text.into())
}
