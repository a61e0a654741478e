//! Slabs of batches in memory that other processes map, to which they are lent.

use std::sync::Arc;

use fastpipe_memory::{Arena, Lender, SharedMemory};
use pyo3::prelude::*;

/// Bytes of address space, at most: they take none of memory.
const SPACE: usize = 1 << 42;

/// Bytes below which address space is too small to be of use.
const LEAST_SPACE: usize = 16 << 20;

/// The largest memory in common that a file and half of a limited address space allow. The other half is for
/// everything else.
pub(crate) fn as_much_as_can_be(make: impl Fn(usize) -> std::io::Result<SharedMemory>) -> PyResult<SharedMemory> {
    let mut space = SPACE;
    loop {
        match make(space) {
            Ok(memory) if space == SPACE || space <= LEAST_SPACE || leaves_as_much(space) => return Ok(memory),
            Err(error) if space <= LEAST_SPACE => return Err(error.into()),
            _ => space /= 2,
        }
    }
}

/// Whether the process can map as much again.
fn leaves_as_much(space: usize) -> bool {
    SharedMemory::private(space).is_ok()
}

/// The memory of a process that makes batches for others.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct SharedSlabs {
    lender: Arc<Lender>,
}

#[pymethods]
impl SharedSlabs {
    /// At most so many bytes of batches.
    #[new]
    fn new(most: u64) -> PyResult<Self> {
        let memory = as_much_as_can_be(SharedMemory::create)?;
        let lender = Lender::new(Arc::new(Arena::create(memory, 0, most)?));
        Ok(SharedSlabs { lender })
    }

    /// The number of the memory's file.
    #[getter]
    fn file(&self) -> Option<i32> {
        number(self.lender.arena())
    }

    /// Keeps at least so many bytes of free pieces.
    fn keep(&self, bytes: usize) {
        self.lender.keep_at_least(bytes);
    }

    /// Pieces that others have, and this process has let go of.
    #[getter]
    fn away(&self) -> usize {
        self.lender.away()
    }

    /// Bytes that batches take or took.
    #[getter]
    fn held(&self) -> u64 {
        self.lender.arena().held()
    }
}

impl SharedSlabs {
    pub(crate) fn lender(&self) -> &Arc<Lender> {
        &self.lender
    }
}

#[cfg(target_os = "linux")]
fn number(arena: &Arena) -> Option<i32> {
    use std::os::fd::AsRawFd;
    arena.memory().file().map(|file| file.as_raw_fd())
}

#[cfg(not(target_os = "linux"))]
fn number(_arena: &Arena) -> Option<i32> {
    None
}
