//! Calls into Python that may wait: threads of Python's answer what threads of a pass ask.
//!
//! Python's threads are daemons, so a read that hangs doesn't keep a program from ending. They end with the last pass,
//! and before the interpreter does if their reads end in time.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_columns::{Answer, Slice};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::arrays::arrow_import::import;
use crate::errors::{Raised, guarded};

/// Where threads of Python's find what they are to answer.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCalls(pub(crate) Arc<fastpipe_columns::UnitCalls>);

#[pymethods]
impl UnitCalls {
    /// Waits for a call; None once no pass is left, and then the thread must end.
    fn next(&self, py: Python<'_>) -> Option<UnitCall> {
        py.detach(|| self.0.next()).map(UnitCall)
    }

    /// Lets the threads end after the calls that they answer; whatever asks from now on gets an error.
    fn end(&self, py: Python<'_>) {
        py.detach(|| self.0.end());
    }
}

/// A call that is to be answered once.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCall(fastpipe_columns::UnitCall);

impl UnitCall {
    fn give(&self, py: Python<'_>, answer: Answer) {
        py.detach(|| self.0.give(answer));
    }
}

#[pymethods]
impl UnitCall {
    /// The unit that is wanted.
    #[getter]
    fn unit(&self) -> u64 {
        self.0.slice().unit
    }

    /// Which of its rows, and how many a slice has: `(first, end)`. None if all of them are wanted at once.
    #[getter]
    fn rows(&self) -> Option<(u32, u32)> {
        let Slice { rows, whole, .. } = self.0.slice();
        (!whole).then_some((rows.start, rows.end))
    }

    /// Answers with whatever is Arrow. What is wrong with it is raised, and the call isn't answered then.
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
