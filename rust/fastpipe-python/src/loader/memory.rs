//! Memory of batches, and arrays over it.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use fastpipe_loader::{ControlBlock, Lent};
use fastpipe_memory::Extent;
use numpy::{PyArrayDescr, PyArrayDescrMethods, PyUntypedArray, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::numpy_buffers::view;

/// The memory of a batch's arrays. It is the base of these arrays, and is reused when the last of them is freed.
#[pyclass(frozen, weakref, module = "fastpipe._fastpipe")]
pub(crate) struct ItemMemory {
    block: ControlBlock,
    /// The memory that the consumer holds.
    _lent: Option<Lent>,
    /// Memory that a worker keeps because objects in its process refer to it.
    kept: Mutex<Vec<Extent>>,
    process: u32,
}

#[pymethods]
impl ItemMemory {
    /// Returns the bytes from `offset` as a uint8 array.
    pub(crate) fn array<'py>(
        slf: &Bound<'py, Self>,
        offset: usize,
        len: usize,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        ItemMemory::view(slf, &dtype::<u8>(slf.py()), &[len], offset)
    }

    /// Returns a copy of the bytes from `offset`.
    fn bytes<'py>(&self, py: Python<'py>, offset: usize, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        self.copied(py, offset, len)
    }

    /// The size of the memory in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self._lent
            .as_ref()
            .map_or(0, |lent| lent.pieces().iter().map(|piece| piece.len).sum())
    }

    /// Returns the address and the size in bytes of each block.
    fn pieces(&self) -> Vec<(usize, usize)> {
        let pieces = self._lent.iter().flat_map(Lent::pieces);
        let address = |piece: &Extent| {
            self.block
                .at(piece.offset, piece.len)
                .map(|at| (at.addr().get(), piece.len))
        };
        pieces.filter_map(address).collect()
    }

    /// Returns the offset of bytes at an address of this process. None if the bytes are not entirely in the memory.
    fn offset(&self, address: usize, len: usize) -> Option<usize> {
        let memory = self.block.arena().memory();
        let offset = address.checked_sub(memory.start().addr().get())?;
        self.block.at(offset, len).map(|_| offset)
    }
}

impl ItemMemory {
    pub(crate) fn new(block: ControlBlock, lent: Option<Lent>) -> Self {
        ItemMemory {
            block,
            _lent: lent,
            kept: Mutex::default(),
            process: std::process::id(),
        }
    }

    pub(crate) fn block(&self) -> &ControlBlock {
        &self.block
    }

    /// Returns a copy of bytes.
    pub(crate) fn copied<'py>(&self, py: Python<'py>, offset: usize, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, written(&self.block, offset, len)?))
    }

    /// Keeps blocks of memory until the last array is freed, and then returns them to the operating system.
    pub(crate) fn keep(&self, pieces: Vec<Extent>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).extend(pieces);
    }

    /// Returns an array over the memory from `offset`.
    pub(crate) fn view<'py>(
        slf: &Bound<'py, Self>,
        dtype: &Bound<'py, PyArrayDescr>,
        shape: &[usize],
        offset: usize,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let len = shape
            .iter()
            .try_fold(dtype.itemsize(), |len, &size| len.checked_mul(size));
        let start = len
            .and_then(|len| slf.get().block.at(offset, len))
            .ok_or_else(outside)?;
        if !start.addr().get().is_multiple_of(dtype.alignment()) {
            return Err(outside());
        }
        // SAFETY: this many bytes are mapped, and they are committed because the code that wrote the offset has
        // allocated them. The number types that layouts support are valid for any bytes. The bytes stay in place while
        // `slf`, the base, lives.
        unsafe { view(dtype, shape, start.as_ptr(), slf.clone().into_any()) }
    }
}

impl Drop for ItemMemory {
    fn drop(&mut self) {
        let kept = std::mem::take(&mut *self.kept.lock().unwrap_or_else(PoisonError::into_inner));
        if self.process == std::process::id() {
            for piece in kept {
                self.block.arena().forget(piece);
            }
        }
    }
}

/// Returns bytes that were written before this process received their offset. They belong to finished rows or to
/// descriptions.
pub(crate) fn written(block: &ControlBlock, offset: usize, len: usize) -> PyResult<&[u8]> {
    let start = block.at(offset, len).ok_or_else(outside)?;
    // SAFETY: the bytes are within the memory, which stays mapped while the block lives. Processes receive offsets
    // after the bytes there were written, and no process writes the bytes again before the batch is released.
    Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
}

/// The error for an invalid offset. Other processes write offsets, so they may be invalid.
pub(crate) fn outside() -> PyErr {
    PyValueError::new_err("a batch is outside of its memory: a worker has written to a wrong address")
}
