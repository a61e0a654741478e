//! Decodes encoded Avro values to Arrow data of the corresponding types.

use std::ffi::OsString;
use std::sync::Arc;

use fastpipe_avro_write::Columns;
use fastpipe_batch::path_text;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::arrays::arrow_import::import;
use crate::arrays::arrow_schema::{batch_capsules, schema_capsule};
use crate::errors::{IntoPy, guarded};

/// Columns of the records of a file.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct AvroColumns(Columns);

#[pymethods]
impl AvroColumns {
    /// Selects columns of a file with this schema by name, or all columns if `names` is None.
    #[new]
    #[pyo3(signature = (path, schema, names=None))]
    fn new(py: Python<'_>, path: OsString, schema: &str, names: Option<Vec<String>>) -> PyResult<Self> {
        let path: Arc<str> = path_text(&path).into();
        let columns = Columns::new(schema, names.as_deref()).map_err(|e| e.at_path(&path));
        Ok(AvroColumns(columns.py(py)?))
    }

    /// Returns the names of the columns.
    fn names(&self) -> Vec<&str> {
        self.0
            .schema()
            .fields()
            .iter()
            .map(|field| field.name().as_str())
            .collect()
    }

    /// Whether both encode values in the same way and with the same meaning, so that one can decode the values of the
    /// other.
    fn decode_as(&self, other: &AvroColumns) -> bool {
        self.0.decode_as(&other.0)
    }

    fn __arrow_c_schema__<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyCapsule>> {
        guarded(py, || schema_capsule(py, &**self.0.schema()))
    }

    /// Decodes the `large_binary` columns of a record batch, which are in the order of the names. Ignores further
    /// columns.
    fn decode<'py>(&self, table: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyTuple>> {
        let py = table.py();
        guarded(py, || {
            let (schema, batches) = import(table)?;
            let batch = batches.into_iter().next();
            let batch = batch.unwrap_or_else(|| arrow_array::RecordBatch::new_empty(schema));
            let decoded = py.detach(|| self.0.decode(&batch)).py(py)?;
            batch_capsules(py, self.0.schema(), decoded)
        })
    }
}
