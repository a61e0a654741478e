//! Remote files, by URL.

use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Contents, Result};
use fastpipe_remote::{Entry, RemoteObject, Store};
use pyo3::prelude::*;

use crate::errors::IntoPy;

/// The options of a store: their names and values.
type Options = Vec<(String, String)>;

/// The URL of an object, its size, its entity tag, and its modification time in nanoseconds since 1970.
type Listed = (String, u64, Option<String>, i128);

/// A file in an object store or on a web server.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct RemoteFile {
    object: Arc<RemoteObject>,
    options: Options,
}

impl RemoteFile {
    /// Returns the file for reading.
    pub(crate) fn contents(&self) -> Contents {
        Contents::Remote(self.object.clone())
    }
}

#[pymethods]
impl RemoteFile {
    /// Opens the file at a URL.
    #[staticmethod]
    fn open(py: Python<'_>, url: &str, options: Options) -> PyResult<Self> {
        let object = interruptible(py, |cancelled| RemoteObject::open(url, &options, cancelled))?;
        let object = Arc::new(object);
        Ok(RemoteFile { object, options })
    }

    /// Returns a file of a listing. Nothing is read.
    #[staticmethod]
    fn listed(py: Python<'_>, found: Listed, options: Options) -> PyResult<Self> {
        let (url, size, etag, modified) = found;
        let entry = Entry {
            url,
            size,
            etag,
            modified,
        };
        let object = Arc::new(RemoteObject::listed(entry, &options).py(py)?);
        Ok(RemoteFile { object, options })
    }

    /// Returns the file as a listing would.
    #[getter]
    fn entry(&self) -> Listed {
        let Entry {
            url,
            size,
            etag,
            modified,
        } = self.object.entry().clone();
        (url, size, etag, modified)
    }

    fn __str__(&self) -> &str {
        &self.object.entry().url
    }

    // Options may contain credentials.
    fn __repr__(&self) -> String {
        format!("RemoteFile({:?})", self.object.entry().url)
    }

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<(Bound<'py, PyAny>, (Listed, Options))> {
        let listed = py.get_type::<RemoteFile>().getattr("listed")?;
        Ok((listed, (self.entry(), self.options.clone())))
    }
}

/// Lists the objects below a URL, ordered by name.
#[pyfunction]
pub(crate) fn list_remote(py: Python<'_>, url: &str, options: Options) -> PyResult<Vec<Listed>> {
    let found = interruptible(py, |cancelled| Store::list(url, &options, cancelled))?;
    let listed = |entry: Entry| (entry.url, entry.size, entry.etag, entry.modified);
    Ok(found.into_iter().map(listed).collect())
}

/// Waits for a call that can be interrupted by a signal.
fn interruptible<T: Send>(py: Python<'_>, call: impl FnOnce(&dyn Fn() -> bool) -> Result<T> + Send) -> PyResult<T> {
    let raised = Mutex::new(None);
    let result = py.detach(|| {
        let cancelled = || match Python::attach(|py| py.check_signals()) {
            Ok(()) => false,
            Err(error) => {
                *raised.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                true
            }
        };
        call(&cancelled)
    });
    match raised.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some(error) => Err(error),
        None => result.py(py),
    }
}
