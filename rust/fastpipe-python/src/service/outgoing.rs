//! Batches that are lent to another process.

use fastpipe_engine::Batch;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::IntoPy;

/// What is lent of batches: what is said of them, and the offset and the length of each piece.
pub(crate) type Lent<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Lends batches to another process.
pub(crate) fn lend<'py>(py: Python<'py>, batches: Vec<Batch>, slabs: &SharedSlabs) -> PyResult<Lent<'py>> {
    let (said, pieces) = py.detach(|| fastpipe_wire::lend(batches, slabs.lender())).py(py)?;
    Ok((PyBytes::new(py, &said), PyBytes::new(py, &pieces)))
}
