//! A data set whose batches others make.

use std::sync::Arc;

use fastpipe_wire::{RemoteUnits, read_columns};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;

use crate::errors::IntoPy;
use crate::sources::data::Data;

/// A data set whose batches others make.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct RemoteDataset;

#[pymethods]
impl RemoteDataset {
    /// `columns` and `csr` are what `Data.columns_text` of the data set elsewhere says, `rows` those of its units, and
    /// `uncut` how many these were before large ones were cut. `start(feed, order, progress, csr)` starts
    /// to receive the batches of a pass: of an order as JSON, with the progress from which the first epoch's steps are
    /// counted (None for its start), with sparse columns in Arrow's layout or not. It must not refer to the dataset.
    #[new]
    #[pyo3(signature = (columns, csr, rows, *, uncut, in_sequence, start))]
    fn new(
        py: Python<'_>,
        columns: &str,
        csr: Option<&str>,
        rows: PyReadonlyArray1<'_, u32>,
        uncut: Option<u64>,
        in_sequence: Option<&str>,
        start: Py<PyAny>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let read = |text: &str| read_columns(text).py(py);
        let csr = csr.map(read).transpose()?;
        let source = RemoteUnits::new(read(columns)?, csr, rows.as_array().to_vec(), in_sequence);
        let data = Data::remote(Arc::new(source), uncut, start);
        Ok(PyClassInitializer::from(data).add_subclass(RemoteDataset))
    }
}
