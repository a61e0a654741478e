//! Memory of a batch for values that don't fit into its slab.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use fastpipe_loader::{Claim, ControlBlock, Written};
use fastpipe_memory::Refused;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::memory::{outside, written};

/// The alignment of written bytes.
const ALIGNED: usize = 64;

/// Bytes of the memory that only this worker writes.
pub(crate) struct OwnBytes {
    start: NonNull<u8>,
    len: usize,
}

impl OwnBytes {
    /// Returns the bytes of a range. `None` if the range isn't within the memory.
    ///
    /// # Safety
    ///
    /// The range must be in a row that the worker has claimed, or in memory that it has allocated. No other `OwnBytes`
    /// may cover the range. The block must outlive the value.
    pub(super) unsafe fn new(block: &ControlBlock, offset: usize, len: usize) -> Option<Self> {
        let start = block.at(offset, len)?;
        Some(OwnBytes { start, len })
    }

    pub(super) fn as_ptr(&self) -> *mut u8 {
        self.start.as_ptr()
    }

    pub(super) fn len(&self) -> usize {
        self.len
    }

    pub(super) fn as_mut_slice(&mut self) -> &mut [u8] {
        // SAFETY: the bytes are within the memory, which stays mapped while the block lives. No other worker writes or
        // reads them before this worker has finished its row, and `self` is borrowed exclusively.
        unsafe { std::slice::from_raw_parts_mut(self.start.as_ptr(), self.len) }
    }
}

/// Memory to which a worker writes data of a batch, or errors before it has a batch.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemRoom {
    block: ControlBlock,
    state: Mutex<(Option<Place>, Written)>,
}

#[derive(Clone, Copy)]
struct Place {
    slot: usize,
    turn: u32,
}

#[pymethods]
impl ItemRoom {
    /// Writes the bytes of an object with a contiguous buffer. Returns their offset.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        if let Ok(bytes) = data.cast::<PyBytes>() {
            return self.put(py, bytes.as_bytes());
        }
        let buffer = PyBuffer::<u8>::get(data)?;
        let (offset, mut to) = self.take(py, buffer.len_bytes())?;
        buffer.copy_to_slice(py, to.as_mut_slice())?;
        Ok(offset)
    }

    /// Waits for the memory of a batch that is written as a whole. The consumer may hold other batches.
    fn wait(&self, py: Python<'_>) {
        if let Some(place) = self.place() {
            py.detach(|| self.block.wait_for_slab(place.slot));
        }
    }

    /// Allocates the memory of a batch that is written as a whole, unless the consumer allocates it. `sizes` are the
    /// numbers of bytes that will be written.
    fn reserve(&self, sizes: Vec<usize>) {
        let aligned = |len: usize| len.checked_next_multiple_of(ALIGNED);
        let whole = sizes
            .into_iter()
            .try_fold(0usize, |all, len| all.checked_add(aligned(len)?));
        if let (Some(place), Some(whole)) = (self.place(), whole) {
            self.block.reserve(place.slot, whole);
        }
    }

    /// Says that the size of this batch doesn't tell the size of other batches.
    fn ignore_size(&self) {
        if let Some(place) = self.place() {
            self.block.ignore_size(place.slot);
        }
    }

    /// Copies bytes from another offset of the memory. Returns the offset of the copy.
    fn copy(&self, py: Python<'_>, offset: usize, len: usize) -> PyResult<usize> {
        self.put(py, written(&self.block, offset, len)?)
    }
}

impl ItemRoom {
    pub(crate) fn new(block: ControlBlock) -> Self {
        ItemRoom {
            block,
            state: Mutex::default(),
        }
    }

    fn place(&self) -> Option<Place> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0
    }

    /// Forgets the memory to which this worker wrote last, because it no longer belongs to the batch.
    pub(crate) fn forget(&self) {
        self.state.lock().unwrap_or_else(PoisonError::into_inner).1 = Written::default();
    }

    /// Assigns later writes to this batch.
    pub(crate) fn turn_to(&self, claim: &Claim) {
        let place = Place {
            slot: claim.slot,
            turn: claim.turn,
        };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0 = Some(place);
    }

    /// Writes bytes. Returns their offset.
    pub(crate) fn put(&self, py: Python<'_>, bytes: &[u8]) -> PyResult<usize> {
        let (offset, mut to) = self.take(py, bytes.len())?;
        to.as_mut_slice().copy_from_slice(bytes);
        Ok(offset)
    }

    /// Allocates `len` bytes, and returns them with their offset.
    pub(crate) fn take(&self, py: Python<'_>, len: usize) -> PyResult<(usize, OwnBytes)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, written) = &mut *state;
        let offset = match *place {
            Some(Place { slot, turn }) => self.block.room(slot, turn, written, len),
            // The memory belongs to no batch, and is never freed.
            None => self.block.arena().take(len).map(|piece| piece.offset),
        };
        let offset = offset.map_err(|refused| no_memory(py, &refused))?;
        // SAFETY: the bytes were just allocated. Callers write to them while `self` lives, which keeps the block.
        let room = unsafe { OwnBytes::new(&self.block, offset, len) };
        Ok((offset, room.ok_or_else(outside)?))
    }
}

/// Returns the exception for memory that could not be allocated for a batch.
pub(crate) fn no_memory(py: Python<'_>, refused: &Refused) -> PyErr {
    let make = || {
        let class = py.import("fastpipe.errors")?.getattr("OutOfMemoryError")?;
        class.call1((format!("could not allocate shared memory for a batch: {refused}"),))
    };
    match make() {
        Ok(error) => PyErr::from_value(error),
        Err(_) => PyMemoryError::new_err("could not allocate shared memory for a batch"),
    }
}
