//! Inspects PyTorch tensors without calling Python, through the exchange API of DLPack.
//!
//! `torch.Tensor.__dlpack_c_exchange_api__` is a table of C functions (DLPack 1.2 and newer). One of them fills in a
//! `DLTensor` that borrows from the tensor. The call takes a few nanoseconds, while reading seven attributes takes half
//! a microsecond. For versions of PyTorch without the table, the attributes are read.
#![allow(unsafe_code)]

use std::ffi::{c_int, c_void};

use pyo3::intern;
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyCapsule, PyTuple};

/// `DLTensor` of DLPack 1.
#[repr(C)]
struct DlTensor {
    data: *mut c_void,
    device_type: i32,
    device_id: i32,
    ndim: i32,
    code: u8,
    bits: u8,
    lanes: u16,
    shape: *mut i64,
    strides: *mut i64,
    byte_offset: u64,
}

/// `DLPackExchangeAPI` of DLPack 1. Functions that aren't called have no signature here.
#[repr(C)]
struct ExchangeApi {
    major: u32,
    minor: u32,
    before: *mut c_void,
    others: [*mut c_void; 3],
    dltensor_from_py_object_no_sync: Option<FillIn>,
}

/// Fills in a `DLTensor` that borrows from an object. Returns 0, or sets an exception.
type FillIn = unsafe extern "C" fn(*mut c_void, *mut DlTensor) -> c_int;

/// DLPack's device type for CPU memory.
const CPU: i32 = 1;

/// The element type of a tensor: a DLPack type code and a number of bits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Element {
    pub(crate) code: u8,
    pub(crate) bits: u8,
}

/// Contiguous elements in memory that the tensor keeps alive.
#[derive(Debug)]
pub(crate) struct Elements {
    pub(crate) start: *const u8,
    pub(crate) len: usize,
}

/// The functions for inspecting tensors.
pub(crate) struct Tensors {
    exact: Py<PyAny>,
    fill_in: Option<FillIn>,
}

impl Tensors {
    /// Returns the functions for the module `torch`, which is imported on the first call.
    pub(crate) fn get(py: Python<'_>) -> PyResult<&'static Tensors> {
        static TENSORS: PyOnceLock<Tensors> = PyOnceLock::new();
        TENSORS.get_or_try_init(py, || {
            let exact = py.import("torch")?.getattr("Tensor")?;
            let api = exact.getattr_opt("__dlpack_c_exchange_api__")?;
            let api = api.and_then(|api| api.cast_into::<PyCapsule>().ok());
            let api = api.and_then(|api| api.pointer_checked(Some(c"dlpack_exchange_api")).ok());
            let fill_in = api.and_then(|api| {
                let table = api.cast::<ExchangeApi>().as_ptr();
                // SAFETY: a capsule of this name contains a pointer to a table that lives as long as the process. The
                // table begins with its version, which shows that it contains the function.
                unsafe { ((*table).major == 1).then(|| (*table).dltensor_from_py_object_no_sync)? }
            });
            Ok(Tensors {
                exact: exact.unbind(),
                fill_in,
            })
        })
    }

    /// Whether an object is a tensor, and not an instance of a derived class.
    #[inline]
    pub(crate) fn is(&self, item: &Bound<'_, PyAny>) -> bool {
        item.get_type_ptr().cast() == self.exact.as_ptr()
    }

    /// Returns the elements of a contiguous CPU tensor with this dtype and shape. `None` for any other tensor, and for
    /// a tensor with state besides its elements (gradients, lazy negation).
    #[inline]
    pub(crate) fn elements(
        &self,
        item: &Bound<'_, PyAny>,
        dtype: &Py<PyAny>,
        element: Element,
        shape: Option<&[i64]>,
    ) -> PyResult<Option<Elements>> {
        let py = item.py();
        if item.getattr(intern!(py, "requires_grad"))?.is_truthy()? {
            return Ok(None);
        }
        // PyTorch negates such a tensor when it is read, and DLPack doesn't report that.
        if element.code != 1 && item.call_method0(intern!(py, "is_neg"))?.is_truthy()? {
            return Ok(None);
        }
        match self.fill_in {
            Some(fill_in) => by_exchange(fill_in, item, element, shape),
            None => by_attributes(item, dtype, element, shape),
        }
    }
}

fn by_exchange(
    fill_in: FillIn,
    item: &Bound<'_, PyAny>,
    element: Element,
    shape: Option<&[i64]>,
) -> PyResult<Option<Elements>> {
    let mut found = std::mem::MaybeUninit::<DlTensor>::uninit();
    // SAFETY: the object is of the class to which the function belongs. The function fills in the struct if it returns
    // 0.
    let found = unsafe {
        if fill_in(item.as_ptr().cast(), found.as_mut_ptr()) != 0 {
            // This happens for sparse tensors, for example. They are pickled.
            drop(PyErr::take(item.py()));
            return Ok(None);
        }
        found.assume_init()
    };
    if (found.device_type, found.code, found.bits, found.lanes) != (CPU, element.code, element.bits, 1) {
        return Ok(None);
    }
    let count = usize::try_from(found.ndim)?;
    // SAFETY: the tensor has this many sizes and strides, and keeps them alive while it is borrowed.
    let list = |at: *mut i64| unsafe {
        if count == 0 {
            &[][..]
        } else {
            std::slice::from_raw_parts(at, count)
        }
    };
    let sizes = list(found.shape);
    if shape.is_some_and(|shape| shape != sizes) {
        return Ok(None);
    }
    let Some(len) = bytes(sizes, element) else {
        return Ok(None);
    };
    let strides = (!found.strides.is_null()).then(|| list(found.strides));
    if len > 0 && !strides.is_none_or(|strides| is_contiguous(sizes, strides)) {
        return Ok(None);
    }
    let start = found
        .data
        .cast::<u8>()
        .wrapping_add(usize::try_from(found.byte_offset)?);
    Ok(Some(Elements { start, len }))
}

fn bytes(sizes: &[i64], element: Element) -> Option<usize> {
    let each = usize::from(element.bits).div_ceil(8);
    sizes
        .iter()
        .try_fold(each, |len, &size| len.checked_mul(usize::try_from(size).ok()?))
}

fn is_contiguous(sizes: &[i64], strides: &[i64]) -> bool {
    let mut step = 1;
    sizes.iter().zip(strides).rev().all(|(&size, &stride)| {
        let fits = size == 1 || stride == step;
        step *= size;
        fits
    })
}

#[cold]
fn by_attributes(
    item: &Bound<'_, PyAny>,
    dtype: &Py<PyAny>,
    element: Element,
    shape: Option<&[i64]>,
) -> PyResult<Option<Elements>> {
    let py = item.py();
    let is = |name| item.getattr(name)?.is_truthy();
    if !item.getattr(intern!(py, "dtype"))?.is(dtype) || !is(intern!(py, "is_cpu"))? {
        return Ok(None);
    }
    let strided = item
        .getattr(intern!(py, "layout"))?
        .is(&py.import("torch")?.getattr(intern!(py, "strided"))?);
    if !strided || item.call_method0(intern!(py, "is_conj"))?.is_truthy()? {
        return Ok(None);
    }
    if !item.call_method0(intern!(py, "is_contiguous"))?.is_truthy()? {
        return Ok(None);
    }
    let sizes: Vec<i64> = item.getattr(intern!(py, "shape"))?.cast::<PyTuple>()?.extract()?;
    if shape.is_some_and(|shape| shape != sizes) {
        return Ok(None);
    }
    let start: usize = item.call_method0(intern!(py, "data_ptr"))?.extract()?;
    Ok(bytes(&sizes, element).map(|len| Elements {
        start: std::ptr::with_exposed_provenance(start),
        len,
    }))
}
