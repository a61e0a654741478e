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

/// Memory that arrays of a batch lie in: the base of these arrays. When the last of them dies, it is used again.
#[pyclass(frozen, weakref, module = "fastpipe._fastpipe")]
pub(crate) struct ItemMemory {
    block: ControlBlock,
    /// What the consumer has.
    _lent: Option<Lent>,
    /// What a worker has kept, since somebody looks at it.
    kept: Mutex<Vec<Extent>>,
    process: u32,
}

#[pymethods]
impl ItemMemory {
    /// The bytes from an offset on, uint8.
    fn array<'py>(slf: &Bound<'py, Self>, offset: usize, len: usize) -> PyResult<Bound<'py, PyUntypedArray>> {
        ItemMemory::view(slf, &dtype::<u8>(slf.py()), &[len], offset)
    }

    /// A copy of them.
    fn bytes<'py>(&self, py: Python<'py>, offset: usize, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        self.copied(py, offset, len)
    }

    /// Bytes of it.
    #[getter]
    fn nbytes(&self) -> usize {
        self._lent
            .as_ref()
            .map_or(0, |lent| lent.pieces().iter().map(|piece| piece.len).sum())
    }

    /// Where its pieces begin, and bytes of each.
    fn pieces(&self) -> Vec<(usize, usize)> {
        let pieces = self._lent.iter().flat_map(Lent::pieces);
        let address = |piece: &Extent| {
            self.block
                .at(piece.offset, piece.len)
                .map(|at| (at.addr().get(), piece.len))
        };
        pieces.filter_map(address).collect()
    }

    /// The offset of bytes of this process's that lie in the memory; None if not all of them do.
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

    /// A copy of bytes.
    pub(crate) fn copied<'py>(&self, py: Python<'py>, offset: usize, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, written(&self.block, offset, len)?))
    }

    /// Gives pieces back to the system when the last array dies.
    pub(crate) fn keep(&self, pieces: Vec<Extent>) {
        self.kept.lock().unwrap_or_else(PoisonError::into_inner).extend(pieces);
    }

    /// An array over the memory from an offset on.
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
        // SAFETY: so many bytes are mapped, and committed, since whoever wrote the offset has taken them; the kinds of
        // numbers that layouts have are valid whatever the bytes. They stay while `slf`, the base, lives.
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

/// Bytes of the memory that were written before this process learned of their offset: of rows that are finished, or of
/// descriptions.
pub(crate) fn written(block: &ControlBlock, offset: usize, len: usize) -> PyResult<&[u8]> {
    let start = block.at(offset, len).ok_or_else(outside)?;
    // SAFETY: the bytes are within the memory, which stays mapped while the block lives. Processes learn of offsets
    // after the bytes there were written, and no process writes them again before the batch is released.
    Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
}

/// What others write may be anything.
pub(crate) fn outside() -> PyErr {
    PyValueError::new_err("a batch lies outside of the memory: a worker has written where it shouldn't")
}
