//! The one place where errors become Python exceptions.

use fastpipe_batch::{Error, ErrorKind, text_path};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyType};

/// The name of an exception's class, with a number of its own.
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
        // Internal ones, and kinds to come.
        _ => (11, "FastpipeError"),
    }
}

/// The name of the exception's class for such an error.
pub(crate) const fn name(kind: ErrorKind) -> &'static str {
    numbered(kind).1
}

fn class(py: Python<'_>, kind: ErrorKind) -> PyResult<Bound<'_, PyType>> {
    static CLASSES: [PyOnceLock<Py<PyType>>; 12] = [const { PyOnceLock::new() }; 12];
    let (i, name) = numbered(kind);
    CLASSES[i].import(py, "fastpipe.errors", name).cloned()
}

/// The exception for an error, with its location as attributes.
pub(crate) fn to_py(py: Python<'_>, error: &Error) -> PyErr {
    let make = || -> PyResult<PyErr> {
        let at = error.location();
        let kwargs = PyDict::new(py);
        kwargs.set_item("path", at.path.as_deref().map(text_path))?;
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

/// Whether an error says that a file which was opened isn't as it should be.
pub(crate) const fn is_damage(kind: ErrorKind) -> bool {
    use ErrorKind::{Limit, Malformed, Schema, Unsupported};
    matches!(kind, Malformed | Limit | Schema | Unsupported)
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
