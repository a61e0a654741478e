//! Writes items to a slab: each value of an item is copied to its position.
#![allow(unsafe_code)]

use fastpipe_loader::ControlBlock;
use numpy::npyffi::PY_ARRAY_API;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, PyUntypedArrayMethods};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple};

use super::node::{Leaf, Node};
use super::room::{ItemRoom, OwnBytes};
use super::tensors::Tensors;
use crate::arrays::numpy_buffers;

/// Copies of at least this many bytes release the GIL, so that other threads can run.
const LONG: usize = 256 << 10;

/// A row of a slab, and the room for values that don't fit into the slab.
pub(crate) struct Row<'a, 'py> {
    pub(crate) block: &'a ControlBlock,
    /// The offsets of the parts' arrays in the slab.
    pub(crate) starts: &'a [usize],
    pub(crate) widths: &'a [usize],
    pub(crate) slab: usize,
    pub(crate) row: usize,
    pub(crate) room: &'a Bound<'py, ItemRoom>,
    /// Pickles an object: returns the offset and length of the bytes that it has written to the room.
    pub(crate) pack: &'a Bound<'py, PyAny>,
    /// Whether other threads of this process may wait for the GIL.
    pub(crate) threaded: bool,
}

impl<'py> Row<'_, 'py> {
    /// Returns the position of a part's value.
    fn at(&self, part: usize) -> Option<OwnBytes> {
        let width = *self.widths.get(part)?;
        let offset = self.slab + self.starts.get(part)? + width * self.row;
        // SAFETY: the worker has claimed the row, and writes to one part at a time, while `self` borrows the block.
        unsafe { OwnBytes::new(self.block, offset, width) }
    }

    /// Writes numbers to the cell of a part.
    fn cell(&self, part: usize, numbers: &[u64]) -> bool {
        let Some(mut at) = self.at(part) else { return false };
        let (places, _) = at.as_mut_slice().as_chunks_mut::<8>();
        if numbers.len() > places.len() {
            return false;
        }
        for (place, number) in places.iter_mut().zip(numbers) {
            *place = number.to_ne_bytes();
        }
        true
    }

    /// Writes bytes to the position of a part.
    fn value(&self, part: usize, bytes: &[u8]) -> bool {
        match self.at(part) {
            Some(mut at) if bytes.len() == at.len() => {
                at.as_mut_slice().copy_from_slice(bytes);
                true
            }
            _ => false,
        }
    }

    /// Writes an item. Returns false if the item doesn't match the layout. The bytes written until then must be
    /// ignored.
    pub(crate) fn place(&self, node: &Node, item: &Bound<'py, PyAny>) -> PyResult<bool> {
        match node {
            Node::Leaf(leaf, part) => self.leaf(leaf, *part, item),
            Node::Dict(pairs) => {
                let Ok(dict) = item.cast_exact::<PyDict>() else {
                    return Ok(false);
                };
                if dict.len() != pairs.len() || !in_order(dict, pairs)? {
                    return Ok(false);
                }
                for (key, node) in pairs {
                    match dict.get_item(key)? {
                        Some(value) if self.place(node, &value)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
            Node::List(nodes) => match item.cast_exact::<PyList>() {
                Ok(list) if list.len() == nodes.len() => self.all(nodes, list.iter()),
                _ => Ok(false),
            },
            Node::Tuple(class, nodes) => {
                if item.get_type_ptr().cast() != class.as_ptr() {
                    return Ok(false);
                }
                let tuple = item.cast::<PyTuple>()?;
                if tuple.len() != nodes.len() {
                    return Ok(false);
                }
                self.all(nodes, tuple.iter())
            }
            Node::Fields(class, pairs) => {
                if item.get_type_ptr().cast() != class.as_ptr() {
                    return Ok(false);
                }
                for (name, node) in pairs {
                    match item.getattr_opt(name)? {
                        Some(value) if self.place(node, &value)? => {}
                        _ => return Ok(false),
                    }
                }
                Ok(true)
            }
        }
    }

    fn all(&self, nodes: &[Node], items: impl Iterator<Item = Bound<'py, PyAny>>) -> PyResult<bool> {
        for (node, item) in nodes.iter().zip(items) {
            if !self.place(node, &item)? {
                return Ok(false);
            }
        }
        Ok(true)
    }

    #[inline]
    fn leaf(&self, leaf: &Leaf, part: usize, item: &Bound<'py, PyAny>) -> PyResult<bool> {
        let py = item.py();
        let is = |class: *mut pyo3::ffi::PyObject| item.get_type_ptr().cast() == class;
        match leaf {
            Leaf::Array {
                class, dtype, shape, ..
            } if is(class.as_ptr()) => {
                let array = item.cast::<PyUntypedArray>()?;
                if array.shape() != shape.as_slice() || !same(dtype.bind(py), &array.dtype()) {
                    return Ok(false);
                }
                self.at(part).map_or(Ok(false), |at| self.copy_array(array, &at))
            }
            Leaf::AnyArray {
                class,
                dtype,
                dims,
                item: size,
            } if is(class.as_ptr()) => {
                let array = item.cast::<PyUntypedArray>()?;
                if array.ndim() != *dims || !same(dtype.bind(py), &array.dtype()) {
                    return Ok(false);
                }
                let len = array.len() * size;
                let (offset, at) = self.room.get().take(self.room.py(), len)?;
                let sizes = array.shape().iter().map(|&size| size as u64);
                Ok(self.copy_array(array, &at)? && self.cell(part, &cell(offset, len, sizes)))
            }
            Leaf::Tensor {
                dtype, element, shape, ..
            } => {
                let tensors = Tensors::get(py)?;
                if !tensors.is(item) {
                    return Ok(false);
                }
                if let Some(found) = tensors.elements(item, dtype, *element, Some(shape))? {
                    return Ok(self.copy_elements(py, part, found.start, found.len));
                }
                let Some(item) = made_plain(item, dtype)? else {
                    return Ok(false);
                };
                match tensors.elements(&item, dtype, *element, Some(shape))? {
                    Some(found) => Ok(self.copy_elements(py, part, found.start, found.len)),
                    None => Ok(false),
                }
            }
            Leaf::AnyTensor {
                dtype, element, dims, ..
            } => {
                let tensors = Tensors::get(py)?;
                if !tensors.is(item) {
                    return Ok(false);
                }
                let Some(item) = made_plain(item, dtype)? else {
                    return Ok(false);
                };
                let shape: Vec<i64> = item.getattr("shape")?.cast::<PyTuple>()?.extract()?;
                if shape.len() != *dims {
                    return Ok(false);
                }
                let Some(found) = tensors.elements(&item, dtype, *element, None)? else {
                    return Ok(false);
                };
                let (offset, at) = self.room.get().take(self.room.py(), found.len)?;
                self.copy(py, found.start, &at);
                Ok(self.cell(part, &cell(offset, found.len, shape.iter().map(|&size| size as u64))))
            }
            Leaf::Scalar { class, bytes, .. } if is(class.as_ptr()) => {
                let mut value = [0u8; 32];
                if *bytes > value.len() {
                    return Ok(false);
                }
                // SAFETY: this follows the documentation of NumPy's API. The function writes the scalar's value. The
                // value is of a number type of at most 32 bytes, because layouts contain no other types.
                unsafe { PY_ARRAY_API.PyArray_ScalarAsCtype(py, item.as_ptr(), value.as_mut_ptr().cast()) };
                Ok(self.value(part, &value[..*bytes]))
            }
            Leaf::Bool => match item.cast_exact::<PyBool>() {
                Ok(found) => Ok(self.value(part, &[u8::from(found.is_true())])),
                Err(_) => Ok(false),
            },
            Leaf::Int => match item.cast_exact::<PyInt>().map(|found| found.extract::<i64>()) {
                Ok(Ok(found)) => Ok(self.value(part, &found.to_ne_bytes())),
                _ => Ok(false),
            },
            Leaf::Float => match item.cast_exact::<PyFloat>() {
                Ok(found) => Ok(self.value(part, &found.value().to_ne_bytes())),
                Err(_) => Ok(false),
            },
            Leaf::Text => match item.cast_exact::<PyString>().map(|found| found.to_cow()) {
                Ok(Ok(text)) => self.elsewhere(part, text.as_bytes()),
                // The text contains half of a surrogate pair.
                _ => Ok(false),
            },
            Leaf::Bytes => match item.cast_exact::<PyBytes>() {
                Ok(found) => self.elsewhere(part, found.as_bytes()),
                Err(_) => Ok(false),
            },
            Leaf::Object => {
                let (offset, len): (usize, usize) = self.pack.call1((item, self.room))?.extract()?;
                Ok(self.cell(part, &[offset as u64, len as u64]))
            }
            Leaf::Array { .. } | Leaf::AnyArray { .. } | Leaf::Scalar { .. } => Ok(false),
        }
    }

    /// Writes bytes to the room, and their offset and length to the cell of a part.
    fn elsewhere(&self, part: usize, bytes: &[u8]) -> PyResult<bool> {
        let offset = self.room.get().put(self.room.py(), bytes)?;
        Ok(self.cell(part, &[offset as u64, bytes.len() as u64]))
    }

    /// Copies an array's elements in C order.
    fn copy_array(&self, array: &Bound<'py, PyUntypedArray>, at: &OwnBytes) -> PyResult<bool> {
        let py = array.py();
        if let Some(bytes) = numpy_buffers::bytes(array) {
            if bytes.len() != at.len() {
                return Ok(false);
            }
            self.copy(py, bytes.as_ptr().cast(), at);
            return Ok(true);
        }
        let shape = array.shape().to_vec();
        // SAFETY: `at` has space for all elements of the shape, and only this worker uses it. The array doesn't outlive
        // this function.
        let to = unsafe { numpy_buffers::view(&array.dtype(), &shape, at.as_ptr(), py.None().into_bound(py))? };
        // SAFETY: this follows the documentation of NumPy's API: the arrays have the same shape.
        let failed = unsafe { PY_ARRAY_API.PyArray_CopyInto(py, to.as_array_ptr(), array.as_array_ptr()) } < 0;
        if failed { Err(PyErr::fetch(py)) } else { Ok(true) }
    }

    fn copy_elements(&self, py: Python<'_>, part: usize, from: *const u8, len: usize) -> bool {
        match self.at(part) {
            Some(at) if len == at.len() => {
                self.copy(py, from, &at);
                true
            }
            _ => false,
        }
    }

    /// Fills `to` with bytes from a Python object. The caller holds a reference to the object.
    fn copy(&self, py: Python<'_>, from: *const u8, to: &OwnBytes) {
        let len = to.len();
        if len == 0 {
            return;
        }
        let (from, to) = (from.expose_provenance(), to.as_ptr().expose_provenance());
        let copy = move || {
            // SAFETY: the object has at least this many bytes, and the caller keeps it alive. NumPy and PyTorch forbid
            // resizing it in another thread during the copy. The destination has this many bytes, and only this worker
            // uses it.
            unsafe {
                let from = std::ptr::with_exposed_provenance::<u8>(from);
                from.copy_to_nonoverlapping(std::ptr::with_exposed_provenance_mut::<u8>(to), len);
            }
        };
        if self.threaded && len >= LONG {
            py.detach(copy);
        } else {
            copy();
        }
    }
}

/// Whether the keys of a dict are in the layout's order. A batch has the key order of its first item.
fn in_order(dict: &Bound<'_, PyDict>, pairs: &[(Py<PyAny>, Node)]) -> PyResult<bool> {
    for (found, (key, _)) in dict.keys().iter().zip(pairs) {
        if !found.is(key) && (found.get_type_ptr() != key.bind(dict.py()).get_type_ptr() || !found.eq(key)?) {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Returns a contiguous tensor with the elements of a tensor of this dtype. `None` if the tensor has another dtype, or
/// state besides its elements. Such a tensor is pickled.
fn made_plain<'py>(item: &Bound<'py, PyAny>, dtype: &Py<PyAny>) -> PyResult<Option<Bound<'py, PyAny>>> {
    let py = item.py();
    let is = |name: &str| item.getattr(name)?.is_truthy();
    let strided = py.import("torch")?.getattr("strided")?;
    if is("requires_grad")? || !is("is_cpu")? || is("is_nested")? {
        return Ok(None);
    }
    if !item.getattr("dtype")?.is(dtype) || !item.getattr("layout")?.is(&strided) {
        return Ok(None);
    }
    let found = item.call_method0("resolve_conj")?.call_method0("resolve_neg")?;
    Ok(Some(found.call_method0("contiguous")?))
}

/// Whether two dtypes are the same.
#[inline]
fn same(one: &Bound<'_, PyArrayDescr>, other: &Bound<'_, PyArrayDescr>) -> bool {
    one.is(other) || one.is_equiv_to(other)
}

/// Returns the contents of an array's cell: its offset, its length and its shape.
fn cell(offset: usize, len: usize, sizes: impl Iterator<Item = u64>) -> Vec<u64> {
    [offset as u64, len as u64].into_iter().chain(sizes).collect()
}
