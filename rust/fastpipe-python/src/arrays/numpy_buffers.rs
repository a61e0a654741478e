//! The bytes of NumPy arrays of any dtype, and the slabs that arrays lie in.
#![allow(unsafe_code)]

use std::ffi::c_void;
use std::ops::Range;
use std::ptr::NonNull;
use std::slice;

use fastpipe_batch::Slab;
use fastpipe_rebatch::{Array, Byte};
use numpy::npyffi::{NPY_ARRAY_WRITEABLE, NpyTypes, PY_ARRAY_API, get_type_object, npy_intp};
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyWeakrefReference;

use crate::arrays::shared_slabs::SharedSlabs;

/// The memory of a batch: the base of its arrays.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Memory {
    slabs: Vec<Slab>,
}

#[pymethods]
impl Memory {
    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.slabs.iter().map(Slab::len).sum()
    }

    /// The slabs, uint8, and where each begins in a stretch of memory with room for all of them: what copies a batch
    /// elsewhere copies these.
    pub(crate) fn pieces<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<(Bound<'py, PyUntypedArray>, usize)>> {
        let bytes = dtype::<u8>(slf.py());
        // SAFETY: this many initialised bytes, which stay where they are until `slf`, the base of the array, dies.
        // Other arrays over them are views of the same memory, as NumPy's own are.
        let array = |slab: &Slab| unsafe { view(&bytes, &[slab.len()], slab.as_ptr(), slf.clone().into_any()) };
        let placed = slf.get().placed().filter(|(slab, _)| !slab.is_empty());
        placed.map(|(slab, start)| Ok((array(slab)?, start))).collect()
    }

    /// Lends the slabs to another process, which borrows each: address, size and offset of each of them. None if they
    /// don't all lie in that memory. They can be read here all the same, and must not be written to.
    fn lend(&self, slabs: &SharedSlabs) -> Option<Vec<(usize, usize, usize)>> {
        let filled = || self.slabs.iter().filter(|slab| !slab.is_empty());
        let memory = slabs.lender().arena().memory();
        let all = memory.start().addr().get()..memory.start().addr().get() + memory.len();
        if !filled().all(|slab| all.contains(&slab.as_ptr().addr())) {
            return None;
        }
        let lend = |slab: &Slab| {
            let offset = slabs.lender().lend(NonNull::new(slab.as_ptr())?)?;
            slab.detach();
            Some((slab.as_ptr().addr(), slab.len(), offset))
        };
        filled().map(lend).collect()
    }

    /// Where an array's first element lies in that stretch. None if not all of the array is in a slab.
    fn place(&self, array: &Bound<'_, PyUntypedArray>) -> Option<usize> {
        let extent = extent(array)?;
        self.placed().find_map(|(slab, start)| {
            let from = extent.start.checked_sub(slab.as_ptr().addr())?;
            let to = extent.end - slab.as_ptr().addr();
            (to <= slab.len()).then_some(start + from)
        })
    }
}

/// Where slabs begin in a stretch of all of them: at multiples of what GPUs want for whatever reads them.
const PIECES: usize = 256;

impl Memory {
    /// The slabs, each with where it begins in a stretch of all of them.
    fn placed(&self) -> impl Iterator<Item = (&Slab, usize)> {
        self.slabs.iter().scan(0, |end, slab| {
            let start = *end;
            *end += slab.len().next_multiple_of(PIECES);
            Some((slab, start))
        })
    }

    /// The memory of a batch.
    pub(crate) fn of_all(slabs: Vec<Slab>) -> Self {
        Memory { slabs }
    }

    /// One of the slabs.
    pub(crate) fn slab(&self, number: usize) -> &Slab {
        &self.slabs[number]
    }

    /// The memory of a single array.
    pub(crate) fn of(slab: Slab) -> Self {
        Memory { slabs: vec![slab] }
    }
}

/// A new array that nobody else has seen. Its bytes aren't written yet.
pub(crate) struct Fresh<'py>(Bound<'py, PyUntypedArray>);

impl<'py> Fresh<'py> {
    /// An array of a dtype without objects, in C order, from NumPy's own allocator.
    pub(crate) fn new(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        // SAFETY: there is no memory given.
        unsafe { make(dtype, shape, std::ptr::null_mut()) }.map(Fresh)
    }

    /// An array of a dtype without objects, in C order, over a slab, which goes back to its pool when the last array
    /// over it dies.
    pub(crate) fn over(slab: Slab, dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let len = shape
            .iter()
            .try_fold(dtype.itemsize(), |len, &size| len.checked_mul(size));
        if len != Some(slab.len()) {
            return Err(PyValueError::new_err(
                "there is more or less memory than an array takes",
            ));
        }
        let start = slab.as_ptr();
        let memory = Bound::new(dtype.py(), Memory::of(slab))?;
        // SAFETY: the slab has as many bytes as the array takes, aligned for any dtype. They stay where they are until
        // `memory` dies.
        unsafe { view(dtype, shape, start, memory.into_any()) }.map(Fresh)
    }

    /// An array of zeros of a dtype without objects, from NumPy's own allocator.
    pub(crate) fn zeros(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let mut array = Fresh::new(dtype, shape)?;
        array.bytes_mut().fill(Byte::new(0));
        Ok(array)
    }

    /// The bytes of its elements.
    pub(crate) fn bytes_mut(&mut self) -> &mut [Byte] {
        let len = self.0.len() * self.0.dtype().itemsize();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: `make` made the array, C-contiguous with elements of `itemsize` bytes, and nobody else has a
        // reference to it or its memory: NumPy just allocated it, or it is a slab of its own; `self` is borrowed
        // exclusively. The bytes needn't be initialised. NumPy made an array of this size, so it is at most
        // `isize::MAX` bytes.
        unsafe { slice::from_raw_parts_mut((*self.0.as_array_ptr()).fields.data.cast(), len) }
    }

    /// The array, when all of it was written.
    pub(crate) fn into_array(self) -> Bound<'py, PyUntypedArray> {
        self.0
    }
}

/// An array of a dtype without objects, in C order, over memory that lives as long as `base`.
///
/// # Safety
///
/// The memory is aligned for the dtype and has as many initialised bytes as the shape takes, valid for the dtype, which
/// stay where they are until `base` dies.
pub(crate) unsafe fn view<'py>(
    dtype: &Bound<'py, PyArrayDescr>,
    shape: &[usize],
    memory: *mut u8,
    base: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = dtype.py();
    // SAFETY: the caller's promise; `base` becomes that of the array before anyone else sees it.
    let array = unsafe { make(dtype, shape, memory.cast())? };
    // SAFETY: NumPy's API as documented: `array` is an array that has no base yet, and the reference to `base` is taken
    // over even if it fails.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), base.into_ptr()) } < 0;
    if failed {
        return Err(PyErr::fetch(py));
    }
    Ok(array)
}

/// A new array of a dtype without objects, in C order, over memory or, where that is null, from NumPy's own allocator.
///
/// # Safety
///
/// Memory must be aligned for the dtype and have as many bytes as the shape takes, for as long as the array lives or
/// until it has a base.
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
    // strides of C order by itself. With null it makes its own memory, else the caller vouches for it, and it finds out
    // by itself that it is aligned and contiguous. It returns a new reference to an ndarray, or null and an exception.
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

/// A reference to an array that keeps it from being resized.
///
/// NumPy refuses to resize an array that others refer to, but not with `refcheck=False`. It always refuses where there
/// is a weak reference, so there is one. (What else takes an array's memory away is documented as not to be done:
/// `__setstate__` on a live array, and programs in C.)
pub(crate) struct Pinned {
    array: Py<PyUntypedArray>,
    _weak: Py<PyWeakrefReference>,
}

impl Pinned {
    pub(crate) fn new(array: &Bound<'_, PyUntypedArray>) -> PyResult<Self> {
        let weak = PyWeakrefReference::new(array)?;
        Ok(Pinned {
            array: array.clone().unbind(),
            _weak: weak.unbind(),
        })
    }

    pub(crate) fn bind<'a, 'py>(&'a self, py: Python<'py>) -> &'a Bound<'py, PyUntypedArray> {
        self.array.bind(py)
    }
}

/// The bytes of an array that is kept.
pub(crate) struct Kept {
    /// Keeps the memory alive, and where it is.
    _array: Pinned,
    start: *const Byte,
    len: usize,
}

// SAFETY: the reference may be dropped by any thread, and is used for nothing else. The bytes are only read, as by
// `bytes`.
unsafe impl Send for Kept {}
// SAFETY: as above.
unsafe impl Sync for Kept {}

impl Kept {
    /// An array as [`bytes`] sees it.
    pub(crate) fn new(array: &Bound<'_, PyUntypedArray>) -> PyResult<Option<Self>> {
        let pinned = Pinned::new(array)?;
        Ok(bytes(array).map(|bytes| Kept {
            start: bytes.as_ptr(),
            len: bytes.len(),
            _array: pinned,
        }))
    }
}

impl Array for Kept {
    fn bytes(&self) -> &[Byte] {
        // SAFETY: they were the bytes of the array when it was pinned, and still are: see `Pinned`. Whether this thread
        // has the GIL makes no difference to them.
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
/// Whoever lets other threads run while it has them has [pinned](Pinned) the array. As with NumPy itself, who writes
/// into the array while they are read makes them whatever he leaves behind.
pub(crate) fn bytes<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Option<&'a [Byte]> {
    let dtype = array.dtype();
    if !array.is_c_contiguous() || dtype.has_object() {
        return None;
    }
    let len = array.len() * dtype.itemsize();
    if len == 0 {
        return Some(&[]);
    }
    // SAFETY: the elements are contiguous, `itemsize` bytes each, and alive as long as the array isn't resized: the
    // caller has pinned it, or lets no other thread run while it has them. The bytes needn't be initialised.
    Some(unsafe { slice::from_raw_parts((*array.as_array_ptr()).fields.data.cast(), len) })
}
