//! Rows that are drawn at random, with the index of each draw, for stratified samples.

use std::ops::Range;

use fastpipe_batch::{Error, try_with_capacity};
use fastpipe_engine::unplanned;
use fastpipe_order::{Drawn, Key, Part};
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;

/// `rows` rows drawn from `total` without replacement, by seed and epoch. The first `skipped` draws are skipped.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Drawing(fastpipe_order::Drawing);

#[pymethods]
impl Drawing {
    /// Draws `rows` of `total` rows, or fewer if fewer are left.
    #[new]
    #[pyo3(signature = (total, rows, *, skipped = 0, seed, epoch = 0))]
    fn new(py: Python<'_>, total: u64, rows: u64, skipped: u64, seed: u64, epoch: u64) -> PyResult<Drawing> {
        let key = Key { seed, epoch };
        let drawing = py.detach(|| fastpipe_order::Drawing::new(total, rows, skipped, key));
        Ok(Drawing(drawing.map_err(unplanned).py(py)?))
    }

    /// Returns the drawn rows from `start` to `end - 1` in ascending order, with the index of each row's draw, from 0.
    fn within<'py>(&self, py: Python<'py>, start: u64, end: u64) -> PyResult<RowsAndDraws<'py>> {
        let (rows, draws) = py.detach(|| self.lists(start..end)).py(py)?;
        Ok((array(py, rows)?, array(py, draws)?))
    }
}

impl Drawing {
    fn lists(&self, range: Range<u64>) -> Result<(Vec<i64>, Vec<i64>), Error> {
        let drawn = self.0.within(range).map_err(unplanned)?;
        let list = |of: fn(&Drawn) -> u64| {
            let mut list = try_with_capacity(drawn.len(), "the drawn rows")?;
            list.extend(drawn.iter().map(|drawn| of(drawn) as i64));
            Ok::<Vec<i64>, Error>(list)
        };
        Ok((list(|drawn| drawn.row)?, list(|drawn| drawn.draw)?))
    }
}

/// Draws rows without replacement from several units. For each unit, the arrays contain its index, its first row, its
/// number of rows and the number of rows to draw. Returns the indices of the drawn rows.
#[pyfunction]
#[pyo3(signature = (units, firsts, rows, drawn, *, seed, epoch = 0))]
pub(crate) fn drawn_within<'py>(
    py: Python<'py>,
    units: PyReadonlyArray1<'py, i64>,
    firsts: PyReadonlyArray1<'py, i64>,
    rows: PyReadonlyArray1<'py, i64>,
    drawn: PyReadonlyArray1<'py, i64>,
    seed: u64,
    epoch: u64,
) -> PyResult<Bound<'py, PyArray1<i64>>> {
    let (units, firsts) = (units.as_slice()?, firsts.as_slice()?);
    let (rows, drawn) = (rows.as_slice()?, drawn.as_slice()?);
    if [firsts.len(), rows.len(), drawn.len()] != [units.len(); 3] {
        return Err(PyValueError::new_err(
            "units, firsts, rows and drawn must have the same length",
        ));
    }
    let found =
        py.detach(|| {
            let small = |count: i64| u32::try_from(count).unwrap_or(0);
            let mut parts = try_with_capacity(units.len(), "the sampled units")?;
            parts.extend(units.iter().zip(firsts).zip(rows.iter().zip(drawn)).map(
                |((&unit, &first), (&rows, &drawn))| Part {
                    unit: unit as u64,
                    first: first as u64,
                    rows: small(rows),
                    drawn: small(drawn),
                },
            ));
            let found = fastpipe_order::drawn_within(&parts, Key { seed, epoch }).map_err(unplanned)?;
            let mut list = try_with_capacity(found.len(), "the drawn rows")?;
            list.extend(found.into_iter().map(|row| row as i64));
            Ok::<_, Error>(list)
        });
    array(py, found.py(py)?)
}

type RowsAndDraws<'py> = (Bound<'py, PyArray1<i64>>, Bound<'py, PyArray1<i64>>);
