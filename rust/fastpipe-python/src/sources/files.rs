//! Files of a dataset: on disk, or bytes of Python, which are read where they are.

use std::ffi::OsString;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::path_text;
use fastpipe_engine::default_threads;
use fastpipe_files::{IndexCache, Opening};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::errors::IntoPy;

/// The bytes of a file that is in memory: the `bytes`, and from where to where.
pub(crate) type InMemory = Option<(PyBackedBytes, usize, usize)>;

/// The bytes of a file. They are kept alive, not copied.
pub(crate) fn contents(of: InMemory) -> PyResult<Option<Bytes>> {
    let Some((whole, start, end)) = of else {
        return Ok(None);
    };
    if start > end || end > whole.len() {
        let reason = format!("there are no bytes {start} to {end} of {}", whole.len());
        return Err(PyIndexError::new_err(reason));
    }
    Ok(Some(Bytes::from_owner(whole).slice(start..end)))
}

/// Files, and the cache of their indexes: from a list of paths or names, each with its bytes if they are in memory, and
/// the folder of the cache.
pub(crate) struct Files {
    pub(crate) paths: Vec<Arc<str>>,
    contents: Vec<Option<Bytes>>,
    cache: Option<IndexCache>,
}

impl<'py> FromPyObject<'_, 'py> for Files {
    type Error = PyErr;

    fn extract(lowered: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let (files, cache): (Vec<(OsString, InMemory)>, Option<PathBuf>) = lowered.extract()?;
        let (paths, places): (Vec<_>, Vec<_>) = files.into_iter().unzip();
        Ok(Files {
            paths: paths.iter().map(|path| path_text(path).into()).collect(),
            contents: places.into_iter().map(contents).collect::<PyResult<_>>()?,
            cache: cache.map(|d| IndexCache::open(&d)).transpose().py(lowered.py())?,
        })
    }
}

impl Files {
    /// How they are opened; with `tolerant`, damaged files too.
    pub(crate) fn opening(&self, tolerant: bool) -> Opening<'_> {
        Opening {
            contents: &self.contents,
            cache: self.cache.as_ref(),
            tolerant,
            threads: default_threads(),
        }
    }
}
