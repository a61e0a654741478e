//! Slabs of batches that another process lends: they are borrowed without a copy.
#![allow(unsafe_code)]

use std::sync::Arc;

use fastpipe_memory::{Arena, Borrowed, SharedMemory};
use numpy::{PyUntypedArray, dtype};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::numpy_buffers::view;

/// The memory of another process, mapped here.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct SharedArena {
    arena: Arc<Arena>,
}

#[pymethods]
impl SharedArena {
    /// Opens the memory of a file.
    #[new]
    fn new(file: i32) -> PyResult<Self> {
        Ok(SharedArena {
            arena: Arc::new(Arena::open(opened(file)?)?),
        })
    }

    /// Borrows pieces: the offset and the length of the contents of each. They are given back when the last array over
    /// them dies.
    fn borrow(&self, pieces: Vec<(usize, usize)>) -> PyResult<BorrowedMemory> {
        let borrowed = pieces.into_iter().map(|(offset, len)| {
            Borrowed::new(&self.arena, offset, len)
                .ok_or_else(|| PyValueError::new_err("a batch lies in memory that wasn't lent"))
        });
        Ok(BorrowedMemory {
            pieces: borrowed.collect::<PyResult<_>>()?,
        })
    }
}

impl SharedArena {
    /// The memory.
    pub(crate) fn arena(&self) -> &Arc<Arena> {
        &self.arena
    }
}

/// Maps the memory of a file of this process's.
#[cfg(target_os = "linux")]
pub(crate) fn opened(file: i32) -> PyResult<SharedMemory> {
    use std::os::fd::{BorrowedFd, RawFd};

    if file < 0 {
        return Err(PyValueError::new_err("there is no such file"));
    }
    // SAFETY: the caller has a file of this number, which isn't closed meanwhile: it has the GIL. A number that is no
    // file's is an error of the system's.
    let file = unsafe { BorrowedFd::borrow_raw(RawFd::from(file)) };
    Ok(SharedMemory::open(file.try_clone_to_owned()?)?)
}

#[cfg(not(target_os = "linux"))]
pub(crate) fn opened(_file: i32) -> PyResult<SharedMemory> {
    Ok(SharedMemory::create(0)?)
}

/// Pieces that were borrowed: the base of arrays over them.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct BorrowedMemory {
    pieces: Vec<Borrowed>,
}

#[pymethods]
impl BorrowedMemory {
    /// Bytes of a piece, uint8.
    fn array<'py>(
        slf: &Bound<'py, Self>,
        piece: usize,
        start: usize,
        len: usize,
    ) -> PyResult<Bound<'py, PyUntypedArray>> {
        let outside = || PyValueError::new_err("a batch lies outside of the memory that was lent");
        let piece = slf.get().pieces.get(piece).ok_or_else(outside)?;
        let fits = start.checked_add(len).is_some_and(|end| end <= piece.len());
        let first = piece.start().filter(|_| fits).ok_or_else(outside)?;
        // SAFETY: so many bytes are mapped, and were written by whoever lent them; they stay, and nobody else writes to
        // them, until `slf`, the base of the array, dies.
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
