//! Remote files, by URL.

use std::path::PathBuf;
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Contents, Result, Stored};
use fastpipe_files::LogRecord;
use fastpipe_remote::{BlockCache, CachedObject, Entry, RemoteObject, Store};
use pyo3::prelude::*;

use crate::callbacks::log;
use crate::errors::IntoPy;

/// The options of a store: their names and values.
type Options = Vec<(String, String)>;

/// The URL of an object, its size, its entity tag, and its modification time in nanoseconds since 1970.
type Listed = (String, u64, Option<String>, i128);

/// What `__reduce__` returns.
type Reduced<'py> = (Bound<'py, PyAny>, (Listed, Options, CacheArgument));

/// The folder of a block cache, and its size in bytes.
type CacheArgument = Option<(PathBuf, u64)>;

/// A file in an object store or on a web server.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct RemoteFile {
    object: Arc<RemoteObject>,
    /// The object, with its cache if it has one.
    stored: Arc<dyn Stored>,
    options: Options,
    folder: CacheArgument,
    cache: Option<Arc<BlockCache>>,
}

impl RemoteFile {
    /// Returns the file for reading.
    pub(crate) fn contents(&self) -> Contents {
        Contents::Remote(self.stored.clone())
    }

    fn new(object: RemoteObject, options: Options, folder: CacheArgument, cache: Option<Arc<BlockCache>>) -> Self {
        let object = Arc::new(object);
        let cached = cache
            .as_ref()
            .and_then(|cache| CachedObject::new(object.clone(), cache));
        let stored: Arc<dyn Stored> = match cached {
            Some(cached) => Arc::new(cached),
            None => object.clone(),
        };
        RemoteFile {
            object,
            stored,
            options,
            folder,
            cache,
        }
    }
}

/// Opens a cache, which may wait for other processes.
fn opened(folder: &CacheArgument) -> Result<Option<Arc<BlockCache>>> {
    let open = |(folder, size): &(PathBuf, u64)| BlockCache::open(folder, *size, warn);
    folder.as_ref().map(open).transpose()
}

fn warn(text: &str) {
    // A log that fails doesn't stop reading.
    Python::try_attach(|py| _ = log(py, &[LogRecord::warning(text.to_owned())]));
}

#[pymethods]
impl RemoteFile {
    /// Opens the file at a URL.
    #[staticmethod]
    #[pyo3(signature = (url, options, cache=None))]
    fn open(py: Python<'_>, url: &str, options: Options, cache: CacheArgument) -> PyResult<Self> {
        interruptible(py, |cancelled| {
            let opened = opened(&cache)?;
            let object = RemoteObject::open(url, &options, cancelled)?;
            Ok(RemoteFile::new(object, options, cache, opened))
        })
    }

    /// Returns a file of a listing. Nothing is read.
    #[staticmethod]
    #[pyo3(signature = (found, options, cache=None))]
    fn listed(py: Python<'_>, found: Listed, options: Options, cache: CacheArgument) -> PyResult<Self> {
        let (url, size, etag, modified) = found;
        let entry = Entry {
            url,
            size,
            etag,
            modified,
        };
        let new = || -> Result<RemoteFile> {
            let opened = opened(&cache)?;
            Ok(RemoteFile::new(
                RemoteObject::listed(entry, &options)?,
                options,
                cache,
                opened,
            ))
        };
        py.detach(new).py(py)
    }

    /// Returns the bytes that came from the block cache and from the storage, for all files with this cache.
    #[getter]
    fn cache_counts(&self) -> Option<(u64, u64)> {
        self.cache.as_ref().map(|cache| cache.counts())
    }

    /// Waits until the block cache has stored what was read.
    fn wait_for_cache(&self, py: Python<'_>) {
        if let Some(cache) = &self.cache {
            py.detach(|| cache.wait());
        }
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

    fn __reduce__<'py>(&self, py: Python<'py>) -> PyResult<Reduced<'py>> {
        let listed = py.get_type::<RemoteFile>().getattr("listed")?;
        Ok((listed, (self.entry(), self.options.clone(), self.folder.clone())))
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
