//! Schemas of columns, and record batches, as PyCapsules of Arrow's C data interface.

use std::collections::HashMap;

use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema};
use arrow_array::{Array, RecordBatch, StructArray};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, SchemaRef};
use fastpipe_batch::{ColumnSpec, Error, ErrorKind};
use fastpipe_columns::schema;
use fastpipe_engine::VALID;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::errors::{IntoPy, guarded};

/// Returns the Arrow schema of batches with these columns.
pub(crate) fn schema_of(
    columns: &[ColumnSpec],
    padded: bool,
    metadata: HashMap<String, String>,
) -> Result<SchemaRef, Error> {
    // A NUL would end a C string early.
    let names = columns.iter().map(|column| &*column.name);
    let texts = metadata.iter().flat_map(|(key, value)| [&**key, &**value]);
    if let Some(text) = names.chain(texts).find(|text| text.contains('\0')) {
        let reason = format!("Arrow does not support a column named {text:?}: names must not contain NUL characters");
        return Err(Error::new(ErrorKind::Schema, reason));
    }
    schema(columns, padded.then_some(VALID), metadata)
}

fn unexported(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Internal, format!("Arrow data can't be exported: {error}"))
}

/// Exports a schema or a type as a capsule.
pub(crate) fn schema_capsule<T>(py: Python<'_>, schema: T) -> PyResult<Bound<'_, PyCapsule>>
where
    FFI_ArrowSchema: TryFrom<T, Error = ArrowError>,
{
    let schema = FFI_ArrowSchema::try_from(schema).map_err(|error| unexported(&error));
    PyCapsule::new_with_value(py, schema.py(py)?, c"arrow_schema")
}

/// Exports an array as two capsules: its schema or type, and its data.
pub(crate) fn array_capsules<'py, T>(py: Python<'py>, schema: T, data: &ArrayData) -> PyResult<Bound<'py, PyTuple>>
where
    FFI_ArrowSchema: TryFrom<T, Error = ArrowError>,
{
    let array = PyCapsule::new_with_value(py, FFI_ArrowArray::new(data), c"arrow_array")?;
    PyTuple::new(py, [schema_capsule(py, schema)?, array])
}

/// Exports a record batch as two capsules: its schema and its array.
pub(crate) fn batch_capsules<'py>(
    py: Python<'py>,
    schema: &SchemaRef,
    batch: RecordBatch,
) -> PyResult<Bound<'py, PyTuple>> {
    array_capsules(py, &**schema, &StructArray::from(batch).to_data())
}

/// Exports the schema of batches with these columns as a capsule. `padded` adds the column that marks valid rows.
pub(crate) fn arrow_schema<'py>(
    py: Python<'py>,
    columns: &[ColumnSpec],
    padded: bool,
    metadata: HashMap<String, String>,
) -> PyResult<Bound<'py, PyCapsule>> {
    guarded(py, || {
        schema_capsule(py, &*schema_of(columns, padded, metadata).py(py)?)
    })
}
