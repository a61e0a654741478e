//! The bytes of NumPy arrays of any dtype.
#![allow(unsafe_code)]

use std::slice;

use fastpipe_engine::Byte;
use numpy::npyffi::{NpyTypes, PY_ARRAY_API, get_type_object, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

/// A new array that nobody else has seen. Its bytes aren't written yet.
pub(crate) struct Fresh<'py>(Bound<'py, PyUntypedArray>);

impl<'py> Fresh<'py> {
    /// An array of a dtype without objects, in C order, from NumPy's own allocator.
    pub(crate) fn new(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let py = dtype.py();
        let dims = shape.iter().map(|&size| npy_intp::try_from(size));
        let mut dims: Vec<npy_intp> = dims.collect::<Result<_, _>>()?;
        let count = i32::try_from(dims.len())?;
        // NumPy would make room for a character, or write null pointers.
        if dtype.itemsize() == 0 || dtype.has_object() || dtype.has_subarray() {
            return Err(PyValueError::new_err("elements of this dtype can't be copied"));
        }
        // SAFETY: NumPy's API as documented: `dims` has `count` sizes, it takes over the reference to the dtype, and makes
        // its own memory as there is none given. It returns a new reference to an ndarray, or null and an exception.
        let array = unsafe {
            let array = PY_ARRAY_API.PyArray_NewFromDescr(
                py,
                get_type_object(py, NpyTypes::PyArray_Type),
                dtype.clone().into_dtype_ptr(),
                count,
                dims.as_mut_ptr(),
                std::ptr::null_mut(),
                std::ptr::null_mut(),
                0,
                std::ptr::null_mut(),
            );
            Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked()
        };
        Ok(Fresh(array))
    }

    /// The bytes of its elements.
    pub(crate) fn bytes_mut(&mut self) -> &mut [Byte] {
        let len = self.0.len() * self.0.dtype().itemsize();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: `new` made the array, C-contiguous with elements of `itemsize` bytes, and nobody else has a reference to
        // it or its memory; `self` is borrowed exclusively. The bytes needn't be initialised. NumPy made an array of this
        // size, so it is at most `isize::MAX` bytes.
        unsafe { slice::from_raw_parts_mut((*self.0.as_array_ptr()).fields.data.cast(), len) }
    }

    /// The array, when all of it was written.
    pub(crate) fn into_array(self) -> Bound<'py, PyUntypedArray> {
        self.0
    }
}

/// The bytes of an array's elements; None if they aren't one behind the other in C order, or are references.
///
/// As with NumPy itself, a thread that writes into the array while they are read makes them whatever it leaves behind.
pub(crate) fn bytes<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Option<&'a [Byte]> {
    let dtype = array.dtype();
    if !array.is_c_contiguous() || dtype.has_object() {
        return None;
    }
    let len = array.len() * dtype.itemsize();
    if len == 0 {
        return Some(&[]);
    }
    // SAFETY: the elements are contiguous, `itemsize` bytes each, and alive as long as the array, of which there is a
    // reference: NumPy refuses to resize an array that others refer to. The bytes needn't be initialised.
    Some(unsafe { slice::from_raw_parts((*array.as_array_ptr()).fields.data.cast(), len) })
}
