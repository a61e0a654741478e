//! In-memory tables as a dataset.

use std::sync::Arc;

use fastpipe_batch::Feature;
use fastpipe_columns::{TableSource, infer_all, with_forms, without_nulls};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::arrow_import::import;
use crate::errors::{IntoPy, guarded};
use crate::sources::data::Data;
use crate::specs::features::{Described, describe, listed};
use crate::specs::wanted::Wanted;

/// An in-memory table that is ready to be read. Its units are ranges of rows.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct TableDataset {
    source: Arc<TableSource>,
    features: Vec<Feature>,
}

#[pymethods]
impl TableDataset {
    /// Takes an object with `__arrow_c_stream__` or `__arrow_c_array__`, without copying it.
    #[new]
    fn new(py: Python<'_>, table: &Bound<'_, PyAny>, wanted: Wanted) -> PyResult<PyClassInitializer<Self>> {
        let (schema, batches) = guarded(py, || import(table))?;
        let features = match wanted {
            Wanted::Features(features) => with_forms(&schema, &features).py(py)?,
            Wanted::Columns(columns) => {
                let known = py.detach(|| without_nulls(&schema, &batches));
                infer_all(&known, columns.as_deref()).py(py)?
            }
        };
        let source = guarded(py, || {
            py.detach(|| TableSource::new(schema, &batches, &features)).py(py)
        })?;
        let source = Arc::new(source);
        let dataset = TableDataset {
            source: source.clone(),
            features,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Returns the categories of each feature that consists of dictionary codes.
    fn categories(&self) -> Vec<(String, Vec<String>)> {
        listed(self.source.categories())
    }

    /// Returns the row index of a record in a unit.
    fn row_of(&self, unit: u64, record: u32) -> PyResult<u64> {
        let row = self.source.row_of(unit, record);
        row.ok_or_else(|| PyIndexError::new_err(format!("row {record} does not exist in unit {unit}")))
    }

    /// Returns a 16-byte digest of the table's columns and some of its rows.
    fn digest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = py.detach(|| self.source.digest()).py(py)?;
        Ok(PyBytes::new(py, &digest))
    }
}
