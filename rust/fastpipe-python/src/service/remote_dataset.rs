//! A dataset whose batches are produced by servers.

use std::sync::Arc;

use fastpipe_wire::{RemoteUnits, read_columns};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::errors::IntoPy;
use crate::sources::data::{Data, Remote};

/// A dataset whose batches are produced by servers.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct RemoteDataset;

#[pymethods]
impl RemoteDataset {
    /// `columns` and `csr` are the results of `Data.columns_text` of the served dataset. `rows` contains the rows of
    /// each unit, or its groups if rows are `grouped`. `counted_rows` is the number of rows in an epoch if only servers
    /// can plan its batches. `uncut` is the number of units before large ones were split.
    ///
    /// `start(feed, order, progress, csr)` starts to receive the batches of a pass. Its arguments are the order as
    /// JSON, the progress from which the first epoch's steps are counted (None for its start), and whether sparse
    /// columns use Arrow's layout. `start` must not refer to the dataset.
    #[new]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    #[pyo3(signature = (columns, csr, rows, *, counted_rows, grouped, uncut, in_sequence, start))]
    fn new(
        py: Python<'_>,
        columns: &str,
        csr: Option<&str>,
        rows: PyReadonlyArray1<'_, u32>,
        counted_rows: Option<u64>,
        grouped: bool,
        uncut: Option<u64>,
        in_sequence: Option<&str>,
        start: Py<PyAny>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let read = |text: &str| read_columns(text).py(py);
        let csr = csr.map(read).transpose()?;
        let source = RemoteUnits::new(read(columns)?, csr, rows.as_array().to_vec(), in_sequence);
        let remote = Remote {
            start,
            counted_rows,
            grouped,
        };
        let data = Data::remote(Arc::new(source), uncut, remote);
        Ok(PyClassInitializer::from(data).add_subclass(RemoteDataset))
    }
}
