//! The bytes of NumPy arrays of any dtype, and the slabs that contain arrays.
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

/// The memory of a batch. It is the base of the batch's arrays.
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

    /// Returns each slab as a uint8 array, with its offset in a contiguous copy of all slabs. Code that copies a whole
    /// batch copies these arrays.
    pub(crate) fn pieces<'py>(slf: &Bound<'py, Self>) -> PyResult<Vec<(Bound<'py, PyUntypedArray>, usize)>> {
        let bytes = dtype::<u8>(slf.py());
        // SAFETY: these bytes are initialized and stay in place until `slf`, the base of the array, is freed. Other
        // arrays over them are views of the same memory, as in NumPy.
        let array = |slab: &Slab| unsafe { view(&bytes, &[slab.len()], slab.as_ptr(), slf.clone().into_any()) };
        let placed = slf.get().placed().filter(|(slab, _)| !slab.is_empty());
        placed.map(|(slab, start)| Ok((array(slab)?, start))).collect()
    }

    /// Lends the slabs to another process, which borrows each one. Returns the address, size and offset of each slab,
    /// or None if a slab is not in that shared memory. This process can still read the slabs, but must not write to
    /// them.
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

    /// Returns the offset of an array's first element in the contiguous copy. None if the array is not entirely in one
    /// slab.
    fn place(&self, array: &Bound<'_, PyUntypedArray>) -> Option<usize> {
        let extent = extent(array)?;
        self.placed().find_map(|(slab, start)| {
            let from = extent.start.checked_sub(slab.as_ptr().addr())?;
            let to = extent.end - slab.as_ptr().addr();
            (to <= slab.len()).then_some(start + from)
        })
    }
}

/// The alignment of slabs in a contiguous copy, in bytes. GPU kernels read data at this alignment efficiently.
const PIECES: usize = 256;

impl Memory {
    /// Returns the slabs, each with its offset in a contiguous copy of all slabs.
    fn placed(&self) -> impl Iterator<Item = (&Slab, usize)> {
        self.slabs.iter().scan(0, |end, slab| {
            let start = *end;
            *end += slab.len().next_multiple_of(PIECES);
            Some((slab, start))
        })
    }

    /// Creates the memory of a batch from its slabs.
    pub(crate) fn of_all(slabs: Vec<Slab>) -> Self {
        Memory { slabs }
    }

    /// Returns the slab with this index.
    pub(crate) fn slab(&self, number: usize) -> &Slab {
        &self.slabs[number]
    }

    /// Creates the memory of a single array.
    pub(crate) fn of(slab: Slab) -> Self {
        Memory { slabs: vec![slab] }
    }
}

/// A new array to which no other reference exists. Its bytes are not yet written.
pub(crate) struct Fresh<'py>(Bound<'py, PyUntypedArray>);

impl<'py> Fresh<'py> {
    /// Creates an array of a dtype without objects, in C order, with NumPy's allocator.
    pub(crate) fn new(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        // SAFETY: no memory is passed.
        unsafe { make(dtype, shape, std::ptr::null_mut()) }.map(Fresh)
    }

    /// Creates an array of a dtype without objects, in C order, over a slab. The slab returns to its pool when the last
    /// array over it is freed.
    pub(crate) fn over(slab: Slab, dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let len = shape
            .iter()
            .try_fold(dtype.itemsize(), |len, &size| len.checked_mul(size));
        if len != Some(slab.len()) {
            return Err(PyValueError::new_err(
                "internal error: the memory of an array has the wrong size; please report it",
            ));
        }
        let start = slab.as_ptr();
        let memory = Bound::new(dtype.py(), Memory::of(slab))?;
        // SAFETY: the slab has exactly the size of the array, and is aligned for any dtype. Its bytes stay in place
        // until `memory` is freed.
        unsafe { view(dtype, shape, start, memory.into_any()) }.map(Fresh)
    }

    /// Creates an array of zeros of a dtype without objects, with NumPy's allocator.
    pub(crate) fn zeros(dtype: &Bound<'py, PyArrayDescr>, shape: &[usize]) -> PyResult<Self> {
        let mut array = Fresh::new(dtype, shape)?;
        array.bytes_mut().fill(Byte::new(0));
        Ok(array)
    }

    /// Returns the bytes of the array's elements.
    pub(crate) fn bytes_mut(&mut self) -> &mut [Byte] {
        let len = self.0.len() * self.0.dtype().itemsize();
        if len == 0 {
            return &mut [];
        }
        // SAFETY: `make` created the array, C-contiguous with elements of `itemsize` bytes. Nothing else references the
        // array or its memory: NumPy has just allocated it, or it has its own slab. `self` is borrowed exclusively. The
        // bytes may be uninitialized. NumPy created an array of this size, so it has at most `isize::MAX` bytes.
        unsafe { slice::from_raw_parts_mut((*self.0.as_array_ptr()).fields.data.cast(), len) }
    }

    /// Returns the array. The caller must have written all of it.
    pub(crate) fn into_array(self) -> Bound<'py, PyUntypedArray> {
        self.0
    }
}

/// Creates an array of a dtype without objects, in C order, over memory that `base` keeps alive.
///
/// # Safety
///
/// The memory must be aligned for the dtype. It must contain as many initialized bytes as the shape requires, valid for
/// the dtype, which stay in place until `base` is freed.
pub(crate) unsafe fn view<'py>(
    dtype: &Bound<'py, PyArrayDescr>,
    shape: &[usize],
    memory: *mut u8,
    base: Bound<'py, PyAny>,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = dtype.py();
    // SAFETY: the caller guarantees the conditions of `make`. The array gets its base before any other code sees it.
    let array = unsafe { make(dtype, shape, memory.cast())? };
    // SAFETY: this follows the documentation of NumPy's API. `array` has no base yet, and the function takes over the
    // reference to `base` even if it fails.
    let failed = unsafe { PY_ARRAY_API.PyArray_SetBaseObject(py, array.as_array_ptr(), base.into_ptr()) } < 0;
    if failed {
        return Err(PyErr::fetch(py));
    }
    Ok(array)
}

/// Creates an array of a dtype without objects, in C order. It is placed in `memory` or, if that is null, allocated by
/// NumPy.
///
/// # Safety
///
/// `memory` must be null, or aligned for the dtype and as large as the shape requires. It must stay valid as long as
/// the array lives or until the array has a base.
unsafe fn make<'py>(
    dtype: &Bound<'py, PyArrayDescr>,
    shape: &[usize],
    memory: *mut c_void,
) -> PyResult<Bound<'py, PyUntypedArray>> {
    let py = dtype.py();
    let dims = shape.iter().map(|&size| npy_intp::try_from(size));
    let mut dims: Vec<npy_intp> = dims.collect::<Result<_, _>>()?;
    let count = i32::try_from(dims.len())?;
    // For these dtypes, NumPy would allocate space for one character, or write null pointers.
    if dtype.itemsize() == 0 || dtype.has_object() || dtype.has_subarray() {
        return Err(PyValueError::new_err("elements of this dtype can't be copied"));
    }
    // SAFETY: this follows the documentation of NumPy's API. `dims` has `count` sizes. NumPy takes over the reference
    // to the dtype and computes the strides of C order. It allocates memory if the pointer is null; otherwise the
    // caller guarantees that the memory is valid. NumPy determines alignment and contiguity itself. It returns a new
    // reference to an ndarray, or null with an exception set.
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

/// A reference to an array that prevents NumPy from resizing it.
///
/// NumPy refuses to resize an array with other references, unless it is called with `refcheck=False`. It always refuses
/// if a weak reference exists, so this type keeps one. The documentation forbids other ways to take away an array's
/// memory: `__setstate__` on a live array, and C code.
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

/// The bytes of an array to which a reference is kept.
pub(crate) struct Kept {
    /// Keeps the memory alive and in place.
    _array: Pinned,
    start: *const Byte,
    len: usize,
}

// SAFETY: any thread may drop the reference, and the reference has no other use. The bytes are only read, in the same
// way as by `bytes`.
unsafe impl Send for Kept {}
// SAFETY: the bytes are only read, so threads may share them.
unsafe impl Sync for Kept {}

impl Kept {
    /// Keeps an array whose bytes [`bytes`] can return. Returns None for other arrays.
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
        // SAFETY: these were the bytes of the array when it was pinned, and they still are: see `Pinned`. Whether this
        // thread has the GIL doesn't matter.
        unsafe { slice::from_raw_parts(self.start, self.len) }
    }
}

/// Returns the address range of an array's bytes. None if the array has no elements or has negative strides.
pub(crate) fn extent(array: &Bound<'_, PyUntypedArray>) -> Option<Range<usize>> {
    let steps = array.shape().iter().zip(array.strides());
    let last = steps.map(|(&size, &stride)| Some(size.checked_sub(1)? * usize::try_from(stride).ok()?));
    let last: usize = last.sum::<Option<usize>>()?;
    // SAFETY: the array is alive because there is a reference to it. Only the address is read, not the memory at that
    // address.
    let start = unsafe { (*array.as_array_ptr()).fields.data }.addr();
    Some(start..start + last + array.dtype().itemsize())
}

/// Returns the bytes of an array's elements. None if they are not contiguous in C order, or are references to objects.
///
/// A caller that lets other threads run while it holds the bytes must have [pinned](Pinned) the array. As in NumPy
/// itself, a thread that writes to the array while it is read leaves the bytes unspecified.
pub(crate) fn bytes<'a>(array: &'a Bound<'_, PyUntypedArray>) -> Option<&'a [Byte]> {
    let dtype = array.dtype();
    if !array.is_c_contiguous() || dtype.has_object() {
        return None;
    }
    let len = array.len() * dtype.itemsize();
    if len == 0 {
        return Some(&[]);
    }
    // SAFETY: the elements are contiguous, with `itemsize` bytes each, and stay alive as long as the array isn't
    // resized. The caller has pinned the array, or lets no other thread run while it holds the bytes. The bytes may be
    // uninitialized.
    Some(unsafe { slice::from_raw_parts((*array.as_array_ptr()).fields.data.cast(), len) })
}
