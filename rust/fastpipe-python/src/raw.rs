//! The bytes of NumPy arrays of any dtype.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::slice;

use fastpipe_batch::Slab;
use fastpipe_engine::{Array, Byte};
use numpy::npyffi::{NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, get_type_object, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::Memory;

/// A new array that nobody else has seen. Its bytes aren't written yet.
pub(crate) struct Fresh<'py>(Bound<'py, PyUntypedArray>);

impl<'py> Fresh<'py> {
    /// An array of a dtype without objects, in C order, from NumPy's own allocator.
    pub(crate) fn new(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        // SAFETY: there is no memory given.
        unsafe { make(dtype, shape, std::ptr::null_mut()) }.map(Fresh)
    }

    /// An array of a dtype without objects, in C order, over a slab, which goes back to its pool when the last array over
    /// it dies.
    pub(crate) fn over(slab: Slab, dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let py = dtype.py();
        let len = shape
            .iter()
            .try_fold(dtype.itemsize(), |len, &size| len.checked_mul(size));
        if len != Some(slab.len()) {
            return Err(PyValueError::new_err(
                "there is more or less memory than an array takes",
            ));
        }
        let start = slab.as_ptr();
        let memory = Bound::new(py, Memory::of(slab))?;
        // SAFETY: the slab has as many bytes as the array takes, aligned for any dtype. They stay where they are until
        // `memory` dies, which becomes the base of the array before anyone else sees it.
        let array = unsafe { make(dtype, shape, start.cast())? };
        // SAFETY: NumPy's API as documented: `array` is an array that has no base yet, and the reference to `memory` is
        // taken over even if it fails.
        let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), memory.into_ptr()) } < 0;
        if failed {
            return Err(PyErr::fetch(py));
        }
        Ok(Fresh(array))
    }

    /// The bytes of its elements.
    pub(crate) fn bytes_mut(&mut self) -> &mut [Byte] {
        let len = self.0.len() * self.0.dtype().itemsize();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: `make` made the array, C-contiguous with elements of `itemsize` bytes, and nobody else has a reference to
        // it or its memory: NumPy just allocated it, or it is a slab of its own; `self` is borrowed exclusively. The bytes needn't be initialised. NumPy made an array of this
        // size, so it is at most `isize::MAX` bytes.
        unsafe { slice::from_raw_parts_mut((*self.0.as_array_ptr()).fields.data.cast(), len) }
    }

    /// The array, when all of it was written.
    pub(crate) fn into_array(self) -> Bound<'py, PyUntypedArray> {
        self.0
    }
}

/// A new array of a dtype without objects, in C order, over memory or, where that is null, from NumPy's own allocator.
///
/// # Safety
///
/// Memory must be aligned for the dtype and have as many bytes as the shape takes, for as long as the array lives or until
/// it has a base.
unsafe fn make<'py>(
    dtype: &Bound<'py, PyArrayDescr>,
    shape: &[usize],
    memory: *mut c_void,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = dtype.py();
    let dims = shape.iter().map(|&size| npy_intp::try_from(size));
    let mut dims: Vec<npy_intp> = dims.collect::<Result<_, _>>()?;
    let count = i32::try_from(dims.len())?;
    // NumPy would make room for a character, or write null pointers.
    if dtype.itemsize() == 0 || dtype.has_object() || dtype.has_subarray() {
        return Err(PyValueError::new_err("elements of this dtype can't be copied"));
    }
    // SAFETY: NumPy's API as documented: `dims` has `count` sizes, it takes over the reference to the dtype, and finds
    // strides of C order by itself. With null it makes its own memory, else the caller vouches for it, and it finds out by
    // itself that it is aligned and contiguous. It returns a new reference to an ndarray, or null and an exception.
    unsafe {
        let array = PY_ARRAY_API.PyArray_NewFromDescr(
            py,
            get_type_object(py, NpyTypes::PyArray_Type),
            dtype.clone().into_dtype_ptr(),
            count,
            dims.as_mut_ptr(),
            std::ptr::null_mut(),
            memory,
            if memory.is_null() { 0 } else { NPY_ARRAY_WRITEABLE },
            std::ptr::null_mut(),
        );
        Ok(Bound::from_owned_ptr_or_err(py, array)?.cast_into_unchecked())
    }
}

/// The bytes of an array that is kept.
pub(crate) struct Kept {
    /// Keeps the memory alive.
    _array: Py<PyUntypedArray>,
    start: *const Byte,
    len: usize,
}

// SAFETY: the reference may be dropped by any thread, and is used for nothing else. The bytes are only read, as by `bytes`.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// An array as [`bytes`] sees it.
    pub(crate) fn new(array: &Bound<'_, PyUntypedArray>) -> Option<Self> {
        let bytes = bytes(array)?;
        Some(Kept {
            start: bytes.as_ptr(),
            len: bytes.len(),
            _array: array.clone().unbind(),
        })
    }
}

impl Array for Kept {
    fn bytes(&self) -> &[Byte] {
        // SAFETY: they were the bytes of the array, and still are, since there is a reference to it: see `bytes`. Whether
        // this thread has the GIL makes no difference to them.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

/// The addresses of an array's first byte and behind its last one; None if it has no elements, or they go backwards.
pub(crate) fn extent(array: &Bound<'_, PyUntypedArray>) -> Option<Range<usize>> {
    let steps = array.shape().iter().zip(array.strides());
    let last = steps.map(|(&size, &stride)| Some(size.checked_sub(1)? * usize::try_from(stride).ok()?));
    let last: usize = last.sum::<Option<usize>>()?;
    // SAFETY: it is an array, of which there is a reference. The address is read, not what lies there.
    let start = unsafe { (*array.as_array_ptr()).fields.data }.addr();
    Some(start..start + last + array.dtype().itemsize())
}

/// The bytes of an array's elements; None if they aren't one behind the other in C order, or are references.
///
/// As with NumPy itself, who writes into the array while they are read makes them whatever he leaves behind.
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
