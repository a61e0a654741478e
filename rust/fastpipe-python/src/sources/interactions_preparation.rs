//! Converts raw interactions to positives: the steps of `Interactions` that process all of them.

use fastpipe_engine::default_threads;
use fastpipe_interactions::{Csr, DenseIds, Interactions, Rows, Stays, Time, dense_ids, to_csr};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;

/// Compressed sparse rows: offsets, items, and positions in the users' histories.
type Arrays<'py> = (
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<u32>>,
    Option<Bound<'py, PyArray1<u32>>>,
);

fn arrays(py: Python<'_>, rows: Csr) -> PyResult<Arrays<'_>> {
    let sequence = rows.sequence.map(|sequence| array(py, sequence)).transpose()?;
    Ok((array(py, rows.offsets)?, array(py, rows.items)?, sequence))
}

/// The distinct IDs in ascending order, and the position of each input ID among them.
type IdsAndPlaces<'py> = (Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>);

/// Assigns indices to IDs. Returns the distinct IDs in ascending order and the position of each input ID among them.
/// The IDs are a contiguous array of any integer type, without negative values.
#[pyfunction]
#[pyo3(signature = (ids, *, num_threads = None))]
pub(crate) fn number_ids<'py>(
    py: Python<'py>,
    ids: &Bound<'py, PyAny>,
    num_threads: Option<usize>,
) -> PyResult<IdsAndPlaces<'py>> {
    let threads = num_threads.unwrap_or_else(default_threads);
    macro_rules! of {
        ($($t:ty),*) => {$(
            if let Ok(ids) = ids.extract::<PyReadonlyArray1<'py, $t>>() {
                let ids = ids.as_slice()?;
                let DenseIds { distinct, codes } = py.detach(|| dense_ids(ids, threads)).py(py)?;
                return Ok((array(py, distinct)?, array(py, codes)?));
            }
        )*};
    }
    of!(i64, i32, u64, u32, i16, u16, i8, u8);
    Err(PyTypeError::new_err(
        "ids must be an array of integers in this machine's byte order",
    ))
}

/// Sorts interactions by user and item. Of several interactions with the same user and item, keeps the `"first"` or the
/// `"last"`.
#[pyfunction]
#[pyo3(signature = (users, items, times, *, num_users, duplicates, num_threads = None))]
pub(crate) fn compress_interactions<'py>(
    py: Python<'py>,
    users: PyReadonlyArray1<'py, u32>,
    items: PyReadonlyArray1<'py, u32>,
    times: Option<&Bound<'py, PyAny>>,
    num_users: usize,
    duplicates: &str,
    num_threads: Option<usize>,
) -> PyResult<Arrays<'py>> {
    let threads = num_threads.unwrap_or_else(default_threads);
    let stays = match duplicates {
        "first" => Stays::First,
        "last" => Stays::Last,
        _ => {
            return Err(PyValueError::new_err("duplicates must be \"first\" or \"last\""));
        }
    };
    let (users, items) = (users.as_slice()?, items.as_slice()?);
    let Some(times) = times else {
        return rows::<i64>(py, users, items, None, (num_users, stays, threads));
    };
    macro_rules! of {
        ($($t:ty),*) => {$(
            if let Ok(times) = times.extract::<PyReadonlyArray1<'py, $t>>() {
                return rows(py, users, items, Some(times.as_slice()?), (num_users, stays, threads));
            }
        )*};
    }
    of!(i64, f64, i32, f32, u64, u32);
    Err(PyTypeError::new_err(
        "times must be an array of 32-bit or 64-bit numbers in this machine's byte order",
    ))
}

fn rows<'py, T: Time>(
    py: Python<'py>,
    users: &[u32],
    items: &[u32],
    times: Option<&[T]>,
    (num_users, stays, threads): (usize, Stays, usize),
) -> PyResult<Arrays<'py>> {
    let all = Interactions { users, items, times };
    let rows = py.detach(|| to_csr(all, num_users, stays, threads));
    arrays(py, rows.py(py)?)
}

/// Marks the largest set of positives in which each remaining user has at least `least_user` of them, and each
/// remaining item at least `least_item`.
#[pyfunction]
pub(crate) fn core_of<'py>(
    py: Python<'py>,
    indptr: PyReadonlyArray1<'py, i64>,
    items: PyReadonlyArray1<'py, u32>,
    num_items: usize,
    least_user: u64,
    least_item: u64,
) -> PyResult<Bound<'py, PyArray1<bool>>> {
    let (indptr, items) = (indptr.as_slice()?, items.as_slice()?);
    let kept = py.detach(|| Rows::new(indptr, items, None)?.core(num_items, least_user, least_item));
    array(py, kept.py(py)?)
}

/// Returns the marked positives for the same users. Positions in histories are renumbered without gaps.
#[pyfunction]
pub(crate) fn keep_positives<'py>(
    py: Python<'py>,
    indptr: PyReadonlyArray1<'py, i64>,
    items: PyReadonlyArray1<'py, u32>,
    sequence: Option<PyReadonlyArray1<'py, u32>>,
    kept: PyReadonlyArray1<'py, bool>,
) -> PyResult<Arrays<'py>> {
    let (indptr, items, kept) = (indptr.as_slice()?, items.as_slice()?, kept.as_slice()?);
    let sequence = sequence.as_ref().map(|sequence| sequence.as_slice()).transpose()?;
    let left = py.detach(|| Rows::new(indptr, items, sequence)?.keep(kept));
    arrays(py, left.py(py)?)
}
