//! Room in a batch's memory for what has no place in its slab.
#![allow(unsafe_code)]

use std::ptr::NonNull;
use std::sync::{Mutex, PoisonError};

use fastpipe_loader::{Claim, ControlBlock, Written};
use fastpipe_memory::Refused;
use pyo3::buffer::PyBuffer;
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::memory::outside;

/// Where a worker writes what belongs to a batch, or what it says before it has one.
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
    /// Writes bytes, of anything that has a contiguous buffer. Returns their offset.
    fn write(&self, py: Python<'_>, data: &Bound<'_, PyAny>) -> PyResult<usize> {
        if let Ok(bytes) = data.cast::<PyBytes>() {
            let bytes = bytes.as_bytes();
            let (offset, at) = self.take(py, bytes.len())?;
            // SAFETY: the room was just taken, with as many bytes.
            unsafe { at.as_ptr().copy_from_nonoverlapping(bytes.as_ptr(), bytes.len()) };
            return Ok(offset);
        }
        let buffer = PyBuffer::<u8>::get(data)?;
        let (offset, at) = self.take(py, buffer.len_bytes())?;
        // SAFETY: as above; only this worker has the room.
        let to = unsafe { std::slice::from_raw_parts_mut(at.as_ptr(), buffer.len_bytes()) };
        buffer.copy_to_slice(py, to)?;
        Ok(offset)
    }

    /// Writes bytes that lie elsewhere in the memory once more. Returns their offset.
    fn copy(&self, py: Python<'_>, offset: usize, len: usize) -> PyResult<usize> {
        let from = self.block.at(offset, len).ok_or_else(outside)?;
        let (offset, to) = self.take(py, len)?;
        // SAFETY: both are within the memory; the room was just taken, and is another place.
        unsafe { to.as_ptr().copy_from(from.as_ptr(), len) };
        Ok(offset)
    }
}

impl ItemRoom {
    pub(crate) fn new(block: ControlBlock) -> Self {
        ItemRoom {
            block,
            state: Mutex::default(),
        }
    }

    /// What is written from now on belongs to this batch.
    pub(crate) fn turn_to(&self, claim: &Claim) {
        let place = Place {
            slot: claim.slot,
            turn: claim.turn,
        };
        self.state.lock().unwrap_or_else(PoisonError::into_inner).0 = Some(place);
    }

    /// Room for so many bytes.
    pub(crate) fn take(&self, py: Python<'_>, len: usize) -> PyResult<(usize, NonNull<u8>)> {
        let mut state = self.state.lock().unwrap_or_else(PoisonError::into_inner);
        let (place, written) = &mut *state;
        let offset = match *place {
            Some(Place { slot, turn }) => self.block.room(slot, turn, written, len),
            // It is of no batch, and stays.
            None => self.block.arena().take(len).map(|piece| piece.offset),
        };
        let offset = offset.map_err(|refused| no_memory(py, &refused))?;
        Ok((offset, self.block.at(offset, len).ok_or_else(outside)?))
    }
}

/// There is no memory for a batch.
pub(crate) fn no_memory(py: Python<'_>, refused: &Refused) -> PyErr {
    let make = || {
        let class = py.import("fastpipe.errors")?.getattr("OutOfMemoryError")?;
        class.call1((format!("there is no shared memory for a batch: {refused}"),))
    };
    match make() {
        Ok(error) => PyErr::from_value(error),
        Err(_) => PyMemoryError::new_err("there is no shared memory for a batch"),
    }
}
