//! Calls into Python that may block. Python threads answer the calls of a pass's threads.
//!
//! The Python threads are daemons, so a read that hangs doesn't keep a program from exiting. They end with the last
//! pass. When the interpreter ends, they end before it if their reads finish in time.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_columns::{Answer, Slice, ThreadEntry};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::arrays::arrow_import::import;
use crate::errors::{Raised, guarded};

/// The queue from which a Python thread takes the calls to answer. Each thread has its own object.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCalls(pub(crate) ThreadEntry);

#[pymethods]
impl UnitCalls {
    /// Waits for a call. Returns None once no pass is left; the thread must then end.
    fn next(&self, py: Python<'_>) -> Option<UnitCall> {
        py.detach(|| self.0.next()).map(UnitCall)
    }

    /// Ends the threads after the calls that they are answering. Later calls fail with an error.
    fn end(&self, py: Python<'_>) {
        py.detach(|| self.0.calls().end());
    }
}

/// A call that must be answered once.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCall(fastpipe_columns::UnitCall);

impl UnitCall {
    fn give(&self, py: Python<'_>, answer: Answer) {
        py.detach(|| self.0.give(answer));
    }
}

#[pymethods]
impl UnitCall {
    /// The unit to read.
    #[getter]
    fn unit(&self) -> u64 {
        self.0.slice().unit
    }

    /// The range of rows to read, as `(first, end)`. None if all rows are wanted at once.
    #[getter]
    fn rows(&self) -> Option<(u32, u32)> {
        let Slice { rows, whole, .. } = self.0.slice();
        (!whole).then_some((rows.start, rows.end))
    }

    /// Answers with Arrow data. If the data is invalid, raises an exception and leaves the call unanswered.
    fn answer(&self, py: Python<'_>, table: &Bound<'_, PyAny>) -> PyResult<()> {
        let imported = guarded(py, || import(table))?;
        self.give(py, Ok(imported));
        Ok(())
    }

    /// Answers with an exception.
    fn fail(&self, py: Python<'_>, exception: Bound<'_, PyAny>) {
        let raised = PyErr::from_value(exception);
        let kind = match raised.is_instance_of::<PyMemoryError>(py) {
            true => ErrorKind::OutOfMemory,
            false => ErrorKind::Raised,
        };
        let reason = format!("read({}) raised {raised}", self.0.slice().unit);
        let error = Error::new(kind, reason).with_cause(Arc::new(Raised::new(py, raised)));
        self.give(py, Err(error));
    }
}
