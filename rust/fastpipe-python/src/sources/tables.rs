//! Tables in memory as a data set.

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

/// A table in memory, ready to be read. Its units are stretches of rows.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct TableDataset {
    source: Arc<TableSource>,
    features: Vec<Feature>,
}

#[pymethods]
impl TableDataset {
    /// Takes whatever has `__arrow_c_stream__` or `__arrow_c_array__`, without copying it.
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

    /// Name, kind, shape, dtype and nulls of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// For each feature that is codes of a dictionary, what they stand for.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        listed(self.source.symbols())
    }

    /// The row that a record of a unit is.
    fn row_of(&self, unit: u64, record: u32) -> PyResult<u64> {
        let row = self.source.row_of(unit, record);
        row.ok_or_else(|| PyIndexError::new_err(format!("there is no row {record} in unit {unit}")))
    }

    /// A digest of the table's columns and of some of its rows, in 16 bytes.
    fn digest<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        let digest = py.detach(|| self.source.digest()).py(py)?;
        Ok(PyBytes::new(py, &digest))
    }
}
