//! Files that lie in memory: bytes of Python, which are read where they are.

use std::ffi::OsString;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::path_text;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

/// Of each file its bytes, where they lie in memory: the `bytes`, and from where to where.
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

/// Files with their paths, as text, and with the bytes of those that lie in memory.
pub(crate) type PathsAndContents = (Vec<Arc<str>>, Vec<Option<Bytes>>);

/// Files of a data set.
pub(crate) fn files(paths: &[OsString], of: Vec<InMemory>) -> PyResult<PathsAndContents> {
    let paths = paths.iter().map(|path| path_text(path).into()).collect();
    Ok((paths, of.into_iter().map(contents).collect::<PyResult<_>>()?))
}
