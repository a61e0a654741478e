//! Batches of a pass for other libraries, through Arrow's C data interface and its PyCapsules.
//!
//! Whoever reads a stream calls it on any thread, with the GIL or without it. A batch is waited for without the GIL,
//! since Python may be what brings it; the rest is short, and done with the GIL: so no other thread can hold a lock of
//! the pass when a process forks.

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

use crate::arrays::arrow_schema::{array_capsules, schema_of};
use crate::errors::{IntoPy, guarded};
use crate::passes::pass::Pass;

/// A pass, the batches of which are drawn as Arrow record batches. It ends when this is dropped, or the stream of it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ArrowBatches {
    pass: Py<Pass>,
    schema: SchemaRef,
    /// The columns in which NaN is null.
    nan_is_null: HashSet<String>,
    /// Is called with the rows of each batch, and with None at the end of the pass.
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
            // Where there is nothing, a slab needn't begin at a multiple of anything.
            0 => Buffer::default(),
            len => slabs[part.slab].slice_with_length(part.offset, len),
        });
        let (rows, valid) = (batch.info.rows, batch.info.valid);
        to_record_batch(&self.schema, columns, parts, rows, valid, &self.nan_is_null)
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

    /// The next batch, as the capsules of a schema and of an array.
    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyTuple>>> {
        let Some(batch) = self.draw(py)? else { return Ok(None) };
        guarded(py, || array_capsules(py, &self.schema, batch).map(Some))
    }

    /// The batches to come, as the capsule of a stream.
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

/// What a stream of C's calls.
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
        // The pass ends now, not when the next thread with the GIL drops what others left.
        Python::try_attach(|_| drop(self.batches.take()));
    }
}

/// An exception as a stream of C's tells of it: as text.
fn told(py: Python<'_>, error: &PyErr) -> ArrowError {
    let class = error.get_type(py).fully_qualified_name();
    let name = class.map_or_else(|_| "an error".into(), |name| name.to_string());
    // A text of C's ends with NUL.
    let text = format!("{name}: {}", error.value(py)).replace('\0', "\\0");
    if error.is_instance_of::<PyKeyboardInterrupt>(py) {
        // Whoever reads the stream makes another exception of it, and Ctrl-C would be lost. It comes again when Python
        // runs.
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
