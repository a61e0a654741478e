//! Files that lie in memory: bytes of Python, which are read where they are.

use bytes::Bytes;
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
