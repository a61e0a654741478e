//! Slabs of batches in shared memory, which are lent to other processes that map it.

use std::sync::Arc;

use fastpipe_memory::{Arena, Lender, SharedMemory};
use pyo3::prelude::*;

/// Maximum address space in bytes. Address space itself uses no memory.
const SPACE: usize = 1 << 42;

/// Minimum address space in bytes. A smaller one is of no use.
const LEAST_SPACE: usize = 16 << 20;

/// Creates the largest shared memory that the file system and half of a limited address space allow. The other half
/// remains for everything else.
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

/// Whether the process can map this much memory a second time.
fn leaves_as_much(space: usize) -> bool {
    SharedMemory::private(space).is_ok()
}

/// The memory of a process that produces batches for other processes.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct SharedSlabs {
    lender: Arc<Lender>,
}

#[pymethods]
impl SharedSlabs {
    /// Creates memory for at most `most` bytes of batches.
    #[new]
    fn new(most: u64) -> PyResult<Self> {
        let memory = as_much_as_can_be(SharedMemory::create)?;
        let lender = Lender::new(Arc::new(Arena::create(memory, 0, most)?));
        Ok(SharedSlabs { lender })
    }

    /// The file descriptor of the memory.
    #[getter]
    fn file(&self) -> Option<i32> {
        number(self.lender.arena())
    }

    /// Keeps at least this many bytes of free blocks.
    fn keep(&self, bytes: usize) {
        self.lender.keep_at_least(bytes);
    }

    /// The number of blocks that other processes still borrow and this process has released.
    #[getter]
    fn away(&self) -> usize {
        self.lender.away()
    }

    /// Bytes of blocks that are in use or kept for reuse.
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
