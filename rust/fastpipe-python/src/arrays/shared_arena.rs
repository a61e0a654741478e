//! Slabs of batches that another process lends. They are borrowed without a copy.
#![allow(unsafe_code)]

use std::sync::Arc;

use fastpipe_memory::{Arena, Borrowed, SharedMemory};
use numpy::{PyUntypedArray, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::numpy_buffers::view;

/// The memory of another process, mapped into this process.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct SharedArena {
    arena: Arc<Arena>,
}

#[pymethods]
impl SharedArena {
    /// Maps the memory of a file, given as a file descriptor.
    #[new]
    fn new(file: i32) -> PyResult<Self> {
        Ok(SharedArena {
            arena: Arc::new(Arena::open(opened(file)?)?),
        })
    }

    /// Borrows blocks, given the offset and the content length of each. They are returned when the last array over them
    /// is freed.
    fn borrow(&self, pieces: Vec<(usize, usize)>) -> PyResult<BorrowedMemory> {
        let borrowed = pieces.into_iter().map(|(offset, len)| {
            Borrowed::new(&self.arena, offset, len).ok_or_else(|| {
                PyValueError::new_err("internal error: a batch is in memory that was not shared; please report it")
            })
        });
        Ok(BorrowedMemory {
            pieces: borrowed.collect::<PyResult<_>>()?,
        })
    }
}

impl SharedArena {
    /// Returns the arena.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

/// Maps the memory of a file, given as a file descriptor of this process.
#[cfg(target_os = "linux")]
pub(crate) fn opened(file: i32) -> PyResult<SharedMemory> {
    use std::os::fd::{BorrowedFd, RawFd};

    if file < 0 {
        return Err(PyValueError::new_err("not a file descriptor: it is negative"));
    }
    // SAFETY: the caller has a file with this descriptor, which isn't closed during the call because the caller holds
    // the GIL. An invalid descriptor is reported by the system as an error.
    let file = unsafe { BorrowedFd::borrow_raw(RawFd::from(file)) };
    Ok(SharedMemory::open(file.try_clone_to_owned()?)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn opened(_file: i32) -> PyResult<SharedMemory> {
    Ok(SharedMemory::create(0)?)
}

/// Borrowed blocks. They are the base of the arrays over them.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct BorrowedMemory {
    pieces: Vec<Borrowed>,
}

#[pymethods]
impl BorrowedMemory {
    /// Returns bytes of a block as a uint8 array.
    fn array<'py>(
        slf: &Bound<'py, Self>,
        piece: usize,
        start: usize,
        len: usize,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let outside = || {
            PyValueError::new_err("internal error: a batch is outside of the memory that was shared; please report it")
        };
        let piece = slf.get().pieces.get(piece).ok_or_else(outside)?;
        let fits = start.checked_add(len).is_some_and(|end| end <= piece.len());
        let first = piece.start().filter(|_| fits).ok_or_else(outside)?;
        // SAFETY: this many bytes are mapped, and the lender has written them. Until `slf`, the base of the array, is
        // freed, they stay mapped and no process writes to them.
        unsafe {
            let first = first.as_ptr().add(start);
            view(&dtype::<u8>(slf.py()), &[len], first, slf.clone().into_any())
        }
    }

    /// Size in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.pieces.iter().map(Borrowed::len).sum()
    }
}
