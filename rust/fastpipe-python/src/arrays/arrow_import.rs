//! Imports other libraries' tables through Arrow's C data interface and its PyCapsules.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::ffi::CStr;
use std::sync::Arc;

use arrow_array::RecordBatch;
use arrow_array::ffi::{FFI_ArrowArray, FFI_ArrowSchema, from_ffi_and_data_type};
use arrow_array::ffi_stream::FFI_ArrowArrayStream;
use arrow_schema::{ArrowError, DataType, Field, Schema, SchemaRef};
use fastpipe_batch::{Error, ErrorKind};
use fastpipe_columns::record_batch;
use pyo3::exceptions::PyTypeError;
use pyo3::prelude::*;
use pyo3::types::{PyCapsule, PyTuple};

use crate::errors::IntoPy;

/// Returns the schema and all record batches of an object with `__arrow_c_stream__` or `__arrow_c_array__`.
pub(crate) fn import(table: &Bound<'_, PyAny>) -> PyResult<(SchemaRef, Vec<RecordBatch>)> {
    let mut batches = Vec::new();
    let schema = each(table, |batch| {
        batches.push(batch);
        Ok(())
    })?;
    Ok((schema, batches))
}

/// Passes the record batches of an object with `__arrow_c_stream__` or `__arrow_c_array__` to `take` one by one.
/// Returns their schema.
pub(crate) fn each(table: &Bound<'_, PyAny>, mut take: impl FnMut(RecordBatch) -> PyResult<()>) -> PyResult<SchemaRef> {
    let py = table.py();
    if table.hasattr("__arrow_c_stream__")? {
        let capsule = table.call_method0("__arrow_c_stream__")?.cast_into::<PyCapsule>()?;
        // SAFETY: a capsule of this name contains a stream. The stream is moved out of it, so it is released once.
        let mut stream = unsafe {
            let stream = pointer::<FFI_ArrowArrayStream>(&capsule, c"arrow_array_stream")?;
            Stream(FFI_ArrowArrayStream::from_raw(stream))
        };
        let schema = py.detach(|| stream.schema()).py(py)?;
        // The producer may need the GIL, on any thread.
        while let Some(batch) = py.detach(|| stream.next(&schema)).py(py)? {
            take(batch)?;
            py.check_signals()?;
        }
        return Ok(schema);
    }
    let pair = table.call_method0("__arrow_c_array__")?.cast_into::<PyTuple>()?;
    let capsule = |i: usize| Ok::<_, PyErr>(pair.get_item(i)?.cast_into::<PyCapsule>()?);
    let (schema, array) = (capsule(0)?, capsule(1)?);
    // SAFETY: capsules of these names contain a schema, which the capsule keeps, and an array, which is moved out.
    let (schema, array) = unsafe {
        let schema = pointer::<FFI_ArrowSchema>(&schema, c"arrow_schema")?;
        let array = pointer::<FFI_ArrowArray>(&array, c"arrow_array")?;
        (schema_of(&*schema), FFI_ArrowArray::from_raw(array))
    };
    let schema = schema.py(py)?;
    let batch = py.detach(|| batch_of(array, &schema)).py(py)?;
    take(batch)?;
    Ok(schema)
}

/// Returns the schema of an object with `__arrow_c_schema__`.
pub(crate) fn import_schema(schema: &Bound<'_, PyAny>) -> PyResult<SchemaRef> {
    let capsule = schema.call_method0("__arrow_c_schema__")?.cast_into::<PyCapsule>()?;
    // SAFETY: a capsule of this name contains a schema, which the capsule keeps.
    let schema = unsafe { schema_of(&*pointer::<FFI_ArrowSchema>(&capsule, c"arrow_schema")?) };
    schema.py(capsule.py())
}

/// Returns the address in a capsule, which must have this name.
fn pointer<T>(capsule: &Bound<'_, PyCapsule>, name: &CStr) -> PyResult<*mut T> {
    let held = capsule.pointer_checked(Some(name));
    let held = held.map_err(|_| PyTypeError::new_err(format!("an Arrow capsule must be named {name:?}")))?;
    Ok(held.as_ptr().cast())
}

fn schema_of(schema: &FFI_ArrowSchema) -> Result<SchemaRef, Error> {
    if schema.format() != "+s" {
        return Err(Error::new(
            ErrorKind::Unsupported,
            "this is a single Arrow array, not a table of columns: pass pyarrow.table({\"name\": array})",
        ));
    }
    let fields = schema.children().map(|column| -> Result<Field, ArrowError> {
        let ty = DataType::try_from(column)?;
        let field = Field::new(column.name().unwrap_or(""), ty, column.nullable());
        Ok(field.with_metadata(metadata_of(column)))
    });
    let fields: Result<Vec<Field>, ArrowError> = fields.collect();
    let fields =
        fields.map_err(|error| Error::new(ErrorKind::Unsupported, format!("the schema can't be read: {error}")))?;
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata_of(schema))))
}

/// Returns the metadata of a schema or a column, or none if it is not UTF-8. Arrow allows arbitrary bytes, but metadata
/// never affects values.
fn metadata_of(schema: &FFI_ArrowSchema) -> HashMap<String, String> {
    schema.metadata().unwrap_or_default()
}

fn batch_of(array: FFI_ArrowArray, schema: &SchemaRef) -> Result<RecordBatch, Error> {
    let ty = DataType::Struct(schema.fields.clone());
    // SAFETY: the array came with this schema, and the interface makes its producer responsible for the buffers.
    let data = unsafe { from_ffi_and_data_type(array, ty) };
    let mut data = data.map_err(|error| Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}")))?;
    // The interface allows buffers at any alignment.
    data.align_buffers();
    record_batch(schema, data)
}

/// A stream of record batches.
struct Stream(FFI_ArrowArrayStream);

impl Stream {
    fn schema(&mut self) -> Result<SchemaRef, Error> {
        let Some(get_schema) = self.0.get_schema else {
            return Err(Error::new(
                ErrorKind::Storage,
                "the Arrow stream was already read, or is closed",
            ));
        };
        let mut schema = FFI_ArrowSchema::empty();
        // SAFETY: the stream isn't released (a released stream has no functions), and `schema` may be overwritten.
        match unsafe { get_schema(&raw mut self.0, &raw mut schema) } {
            0 => schema_of(&schema),
            code => Err(self.failed(code)),
        }
    }

    fn next(&mut self, schema: &SchemaRef) -> Result<Option<RecordBatch>, Error> {
        let Some(get_next) = self.0.get_next else {
            return Ok(None);
        };
        let mut array = FFI_ArrowArray::empty();
        // SAFETY: the stream isn't released (a released stream has no functions), and `array` may be overwritten.
        match unsafe { get_next(&raw mut self.0, &raw mut array) } {
            0 if array.is_released() => Ok(None),
            0 => batch_of(array, schema).map(Some),
            code => Err(self.failed(code)),
        }
    }

    /// Returns an error with the producer's message about its last call, which failed.
    fn failed(&mut self, code: i32) -> Error {
        const OUT_OF_MEMORY: i32 = 12; // ENOMEM
        let said = self.0.get_last_error.and_then(|last_error| {
            // SAFETY: the stream isn't released. The text remains valid until the next call of the stream.
            let text = unsafe { last_error(&raw mut self.0) };
            // SAFETY: the text is not null and ends with NUL.
            (!text.is_null()).then(|| unsafe { CStr::from_ptr(text) }.to_string_lossy().into_owned())
        });
        let said = said.unwrap_or_else(|| format!("error {code}"));
        let kind = if code == OUT_OF_MEMORY {
            ErrorKind::OutOfMemory
        } else {
            ErrorKind::Storage
        };
        Error::new(kind, format!("the Arrow stream failed: {said}"))
    }
}
