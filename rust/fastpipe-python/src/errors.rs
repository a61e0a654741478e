//! Converts errors to Python exceptions. No other file does this.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, release_address_space, text_path};
use fastpipe_engine::panicked;
use fastpipe_files::Halt;
use fastpipe_service::faults::Reason;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyBytes, PyDict, PyType};

/// Returns the name of an exception class and the class's index in the cache of `class`.
const fn numbered(kind: ErrorKind) -> (usize, &'static str) {
    match kind {
        ErrorKind::Malformed => (0, "MalformedFileError"),
        ErrorKind::Limit => (1, "LimitError"),
        ErrorKind::Schema => (2, "SchemaError"),
        ErrorKind::Unsupported => (3, "UnsupportedError"),
        ErrorKind::Shape => (4, "ShapeError"),
        ErrorKind::ValueRange => (5, "ValueRangeError"),
        ErrorKind::Null => (6, "NullValueError"),
        ErrorKind::NotFound => (7, "MissingFileError"),
        ErrorKind::Storage => (8, "StorageError"),
        ErrorKind::OutOfMemory => (9, "OutOfMemoryError"),
        ErrorKind::Closed => (10, "PassClosedError"),
        // Internal errors, and kinds that are added later.
        _ => (11, "FastpipeError"),
    }
}

/// Returns the name of the exception class for errors of this kind.
pub(crate) const fn name(kind: ErrorKind) -> &'static str {
    numbered(kind).1
}

fn class(py: Python<'_>, kind: ErrorKind) -> PyResult<Bound<'_, PyType>> {
    static CLASSES: [PyOnceLock<Py<PyType>>; 12] = [const { PyOnceLock::new() }; 12];
    let (i, name) = numbered(kind);
    CLASSES[i].import(py, "fastpipe.errors", name).cloned()
}

/// Runs code that creates Python objects. PyO3 panics if Python can't allocate an object: `guarded` turns that panic
/// into a `MemoryError`. It turns any other panic into an ordinary error, because `except Exception` doesn't catch a
/// `PanicException`.
pub(crate) fn guarded<T>(py: Python<'_>, part: impl FnOnce() -> PyResult<T>) -> PyResult<T> {
    catch_unwind(AssertUnwindSafe(part)).unwrap_or_else(|panic| {
        // Python may have set an exception that PyO3 did not fetch before it panicked.
        let raised = catch_unwind(AssertUnwindSafe(|| PyErr::take(py))).ok().flatten();
        let is_memory = |error: &PyErr| error.is_instance_of::<PyMemoryError>(py);
        Err(match raised {
            Some(error) if is_memory(&error) => error,
            _ => to_py(py, &panicked(&*panic)),
        })
    })
}

/// An exception that user code raised.
///
/// The pass moves the exception out of the error. Its traceback references the pass, so an error that kept it would
/// leak both.
pub(crate) struct Raised {
    exception: Mutex<Option<Py<PyAny>>>,
    traceback: Option<Py<PyAny>>,
    /// Whether the exception already has a note that says where it was raised.
    noted: AtomicBool,
}

impl Raised {
    pub(crate) fn new(py: Python<'_>, raised: PyErr) -> Self {
        Raised {
            traceback: raised.traceback(py).map(|traceback| traceback.into_any().unbind()),
            exception: Mutex::new(Some(raised.into_value(py).into_any())),
            noted: AtomicBool::new(false),
        }
    }

    /// An exception that was not raised while a unit was read, so it gets no note about a unit.
    pub(crate) fn elsewhere(py: Python<'_>, raised: PyErr) -> Self {
        Raised {
            noted: AtomicBool::new(true),
            ..Raised::new(py, raised)
        }
    }

    /// Moves the exception to the caller, which keeps it from then on. Returns `None` if it was moved before.
    pub(crate) fn take(&self) -> Option<Py<PyAny>> {
        self.exception.lock().unwrap_or_else(PoisonError::into_inner).take()
    }

    /// Restores the original traceback so that the exception can be raised again. Adds a note about the location the
    /// first time.
    pub(crate) fn again(&self, py: Python<'_>, exception: &Bound<'_, PyAny>, error: &Error) -> PyErr {
        let prepare = || {
            exception.setattr("__traceback__", self.traceback.as_ref())?;
            if !self.noted.swap(true, Ordering::Relaxed) {
                let note = format!("raised while fastpipe read a unit{}", error.location());
                exception.call_method1("add_note", (note,))?;
            }
            Ok(())
        };
        match prepare() {
            Ok(()) => PyErr::from_value(exception.clone()),
            Err(failed) => {
                let failed: PyErr = failed;
                failed.set_cause(py, Some(PyErr::from_value(exception.clone())));
                failed
            }
        }
    }
}

/// Returns the exception that user code raised, if that is the cause of the error.
pub(crate) fn raised_of(error: &Error) -> Option<&Raised> {
    error.cause().and_then(|cause| cause.downcast_ref())
}

/// Returns the exception for an error, with the error's location as attributes.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    if error.kind() == ErrorKind::OutOfMemory {
        // This frees memory for the exception and for the code that handles it.
        release_address_space();
    }
    let made = catch_unwind(AssertUnwindSafe(|| make(py, error)));
    made.unwrap_or_else(|_| PyMemoryError::new_err(()))
}

fn make(py: Python<'_>, error: &Error) -> PyErr {
    let make = || -> PyResult<PyErr> {
        if let Some(raised) = raised_of(error)
            && let Some(exception) = raised.take()
        {
            return Ok(raised.again(py, exception.bind(py), error));
        }
        if let Some(reason) = error.cause().and_then(|cause| cause.downcast_ref()) {
            let exception = match reason {
                Reason::Service(text) => py.import("fastpipe.errors")?.call_method1("ServiceError", (text,))?,
                Reason::Told(metadata, server) => {
                    let metadata = PyBytes::new(py, metadata);
                    py.import("fastpipe.service._wire")?
                        .call_method1("as_error", (metadata, server))?
                }
            };
            return Ok(PyErr::from_value(exception));
        }
        let at = error.location();
        let kwargs = PyDict::new(py);
        kwargs.set_item("path", at.path.as_deref().map(text_path))?;
        kwargs.set_item("unit", at.unit.as_deref())?;
        kwargs.set_item("block", at.block)?;
        kwargs.set_item("offset", at.offset)?;
        kwargs.set_item("record", at.record)?;
        kwargs.set_item("feature", at.feature.as_deref())?;
        kwargs.set_item("reason", error.reason())?;
        let exception = class(py, error.kind())?.call((error.to_string(),), Some(&kwargs))?;
        if let Some(errno) = error.os_error()
            && matches!(error.kind(), ErrorKind::NotFound | ErrorKind::Storage)
        {
            exception.setattr("errno", errno)?;
        }
        Ok(PyErr::from_value(exception))
    };
    make().unwrap_or_else(|failed| failed)
}

/// Returns the error that ends a pass after a batch could not be delivered.
pub(crate) fn lost(py: Python<'_>, error: &PyErr) -> Error {
    if error.is_instance_of::<PyMemoryError>(py) {
        let reason =
            "out of memory: Python could not allocate the arrays of a batch; release batches, or read smaller ones";
        Error::new(ErrorKind::OutOfMemory, reason)
    } else {
        Error::new(ErrorKind::Raised, format!("a batch could not be delivered: {error}"))
    }
}

/// Turns the error of a result into an exception.
pub(crate) trait IntoPy<T> {
    fn py(self, py: Python<'_>) -> PyResult<T>;
}

impl<T> IntoPy<T> for Result<T, Error> {
    fn py(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|e| to_py(py, &e))
    }
}

impl<T> IntoPy<T> for Result<T, Halt<PyErr>> {
    fn py(self, py: Python<'_>) -> PyResult<T> {
        self.map_err(|halt| match halt {
            Halt::Failed(error) => to_py(py, &error),
            Halt::Interrupted(error) => error,
        })
    }
}
