//! Hashes of the values of a column.

use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;

/// Returns the 64-bit XXH3 hash of each integer's eight bytes, the lowest first.
#[pyfunction]
pub(crate) fn hash_integers<'py>(
    py: Python<'py>,
    values: PyReadonlyArray1<'py, i64>,
    seed: u64,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let values = values.as_slice()?;
    let hashes = py.detach(|| fastpipe_batch::hash_integers(values, seed)).py(py)?;
    array(py, hashes)
}

/// Returns the 64-bit XXH3 hash of each text. Text `i` has the bytes `offsets[i]` to `offsets[i + 1] - 1`.
#[pyfunction]
pub(crate) fn hash_texts<'py>(
    py: Python<'py>,
    bytes: PyReadonlyArray1<'py, u8>,
    offsets: PyReadonlyArray1<'py, i64>,
    seed: u64,
) -> PyResult<Bound<'py, PyArray1<u64>>> {
    let (bytes, offsets) = (bytes.as_slice()?, offsets.as_slice()?);
    let hashes = py.detach(|| fastpipe_batch::hash_texts(bytes, offsets, seed)).py(py)?;
    array(py, hashes)
}
