//! NumPy arrays as Arrow arrays over the same memory.
#![allow(unsafe_code)] // One block: NumPy's memory as a buffer.

use std::panic::AssertUnwindSafe;
use std::ptr::NonNull;
use std::sync::Arc;

use arrow_array::ffi::FFI_ArrowSchema;
use arrow_buffer::Buffer;
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, Field};
use fastpipe_batch::{Error, ErrorKind};
use fastpipe_rebatch::Array;
use numpy::PyUntypedArray;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyTuple;

use crate::arrays::arrow_schema::array_capsules;
use crate::arrays::numpy_buffers::Kept;
use crate::errors::{IntoPy, guarded};

/// A valid Arrow array whose buffers are NumPy arrays.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ArrowArray {
    data: ArrayData,
}

#[pymethods]
impl ArrowArray {
    /// Creates an array of a type, which is a format string of Arrow's C data interface. The first buffer is the
    /// bitmap of valid values, or None. Buffers that aren't aligned are copied.
    #[new]
    #[pyo3(signature = (format, len, buffers, children=vec![]))]
    fn new(
        py: Python<'_>,
        format: &str,
        len: usize,
        buffers: Vec<Option<Bound<'_, PyUntypedArray>>>,
        children: Vec<(String, Py<ArrowArray>)>,
    ) -> PyResult<Self> {
        guarded(py, || {
            let mut buffers = buffers.iter().map(|array| array.as_ref().map(buffer).transpose());
            let bitmap = buffers.next().transpose()?.flatten();
            let buffers: Vec<Buffer> = buffers.flat_map(Result::transpose).collect::<PyResult<_>>()?;
            let children: Vec<(String, ArrayData)> = children
                .into_iter()
                .map(|(name, child)| (name, child.get().data.clone()))
                .collect();
            let data = py.detach(|| valid(format, len, bitmap, buffers, children));
            let data = data.map_err(|error| match error {
                ArrowError::InvalidArgumentError(reason) => Error::new(ErrorKind::Malformed, reason),
                other => Error::new(ErrorKind::Malformed, other.to_string()),
            });
            Ok(ArrowArray { data: data.py(py)? })
        })
    }

    fn __len__(&self) -> usize {
        self.data.len()
    }

    #[pyo3(signature = (requested_schema=None))]
    fn __arrow_c_array__<'py>(
        &self,
        py: Python<'py>,
        requested_schema: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyTuple>> {
        let _ = requested_schema; // Consumers convert arrays themselves if a producer does not.
        guarded(py, || array_capsules(py, self.data.data_type(), &self.data))
    }
}

fn valid(
    format: &str,
    len: usize,
    bitmap: Option<Buffer>,
    buffers: Vec<Buffer>,
    children: Vec<(String, ArrayData)>,
) -> Result<ArrayData, ArrowError> {
    let (names, children): (Vec<String>, Vec<ArrayData>) = children.into_iter().unzip();
    let fields = names.iter().zip(&children);
    let fields = fields.map(|(name, child)| Field::new(name, child.data_type().clone(), true));
    let fields = fields.map(|field| FFI_ArrowSchema::try_from(&field));
    let schema = FFI_ArrowSchema::try_new(format, fields.collect::<Result<_, _>>()?, None)?;
    ArrayData::builder(DataType::try_from(&schema)?)
        .len(len)
        .null_bit_buffer(bitmap)
        .buffers(buffers)
        .child_data(children)
        .align_buffers(true)
        .build()
}

/// A reference to a NumPy array. It is dropped with the GIL, because PyO3 would keep it until later otherwise.
struct Owner(Option<Kept>);

impl Drop for Owner {
    fn drop(&mut self) {
        Python::try_attach(|_| drop(self.0.take()));
    }
}

/// Returns an array's memory as a buffer, which keeps the array alive.
fn buffer(array: &Bound<'_, PyUntypedArray>) -> PyResult<Buffer> {
    let kept = Kept::new(array)?.ok_or_else(|| {
        PyValueError::new_err("internal error: an array of an Arrow column isn't contiguous; please report it")
    })?;
    let bytes = kept.bytes();
    if bytes.is_empty() {
        return Ok(Buffer::default());
    }
    let (start, len) = (NonNull::from(bytes).cast(), bytes.len());
    let owner = Arc::new(AssertUnwindSafe(Owner(Some(kept))));
    // SAFETY: the memory has `len` bytes, and `owner` keeps it in place. As in other Arrow data from Python, code that
    // writes to an array while it is read leaves the bytes unspecified.
    Ok(unsafe { Buffer::from_custom_allocation(start, len, owner) })
}
