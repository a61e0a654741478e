//! Files of a dataset: on disk, in another storage, or Python bytes objects, which are read without a copy.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{Contents, path_text};
use fastpipe_engine::default_threads;
use fastpipe_files::{IndexCache, Opening};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors::IntoPy;
use crate::sources::remote::RemoteFile;

/// A file that isn't on a local disk.
#[derive(FromPyObject)]
pub(crate) enum Elsewhere<'py> {
    /// An in-memory file: a bytes object, and the start and end of the file in it.
    Memory(PyBackedBytes, usize, usize),
    /// A file in another storage.
    Remote(PyRef<'py, RemoteFile>),
}

/// Returns the contents of a file. Bytes are kept alive and not copied.
pub(crate) fn contents(of: Option<Elsewhere<'_>>) -> PyResult<Option<Contents>> {
    let (whole, start, end) = match of {
        None => return Ok(None),
        Some(Elsewhere::Remote(file)) => return Ok(Some(file.contents())),
        Some(Elsewhere::Memory(whole, start, end)) => (whole, start, end),
    };
    if start > end || end > whole.len() {
        let reason = format!(
            "bytes {start} to {end} are out of range for an object of {} bytes",
            whole.len()
        );
        return Err(PyIndexError::new_err(reason));
    }
    Ok(Some(Contents::Memory(Bytes::from_owner(whole).slice(start..end))))
}

/// Files and the cache of their indexes. Python passes a list of paths or names, each with its bytes or the remote file
/// if it isn't on a local disk, and the folder of the cache.
pub(crate) struct Files {
    pub(crate) paths: Vec<Arc<str>>,
    contents: Vec<Option<Contents>>,
    cache: Option<IndexCache>,
}

impl<'py> FromPyObject<'_, 'py> for Files {
    type Error = PyErr;

    fn extract(lowered: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (files, cache): (Vec<(OsString, Option<Elsewhere<'_>>)>, Option<PathBuf>) = lowered.extract()?;
        let (paths, places): (Vec<_>, Vec<_>) = files.into_iter().unzip();
        Ok(Files {
            paths: paths.iter().map(|path| path_text(path).into()).collect(),
            contents: places.into_iter().map(contents).collect::<PyResult<_>>()?,
            cache: cache.map(|d| IndexCache::open(&d)).transpose().py(lowered.py())?,
        })
    }
}

impl Files {
    /// Returns the options to open the files with. `tolerant` also opens damaged files.
    pub(crate) fn opening(&self, tolerant: bool) -> Opening<'_> {
        Opening {
            contents: &self.contents,
            cache: self.cache.as_ref(),
            tolerant,
            threads: default_threads(),
        }
    }
}
