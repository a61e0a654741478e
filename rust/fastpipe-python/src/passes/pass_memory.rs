//! Memory for passes that comes from Python, or that processes have in common.
//!
//! Decoding threads need the GIL to ask for it, and hold locks of their pass meanwhile. So whoever has the GIL never
//! waits for a pass without letting go of it; and nothing is given back by waiting for the GIL: a reference that dies
//! on a thread without it is dropped by the next one that has it.
#![allow(unsafe_code)]

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Region, SlabAllocator, Source};
use fastpipe_engine::Memory;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::{PyMemoryError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::numpy_buffers::Pinned;
use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::IntoPy;
use crate::sources::data::Data;

/// Memory for passes over a data set, all of it from a callable: `allocate(nbytes)` returns a uint8 array; or from
/// memory in common.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct PassMemory {
    memory: Arc<Memory>,
    source: Arc<dyn Source>,
}

#[pymethods]
impl PassMemory {
    /// `held` is how many batches the consumer holds at once: as many are kept to be used again.
    #[new]
    fn new(data: &Bound<'_, Data>, allocate: Py<PyAny>, held: usize) -> Self {
        let allocator = Callable {
            allocate,
            in_use: Arc::default(),
        };
        PassMemory::with(data, Arc::new(allocator), held)
    }

    /// Memory that other processes map, to which batches are lent.
    #[staticmethod]
    fn shared(data: &Bound<'_, Data>, slabs: &Bound<'_, SharedSlabs>, held: usize) -> Self {
        let allocator = fastpipe_batch::SharedSlabs(slabs.get().lender().clone());
        PassMemory::with(data, Arc::new(allocator), held)
    }
}

impl PassMemory {
    fn with(data: &Bound<'_, Data>, allocator: Arc<dyn SlabAllocator>, held: usize) -> Self {
        let source = data.get().source().clone();
        PassMemory {
            memory: Memory::with_allocator(&source.facts().columns, Some(allocator), held),
            source,
        }
    }

    /// The memory, for a pass over this source.
    pub(crate) fn of(&self, py: Python<'_>, source: &Arc<dyn Source>) -> PyResult<Arc<Memory>> {
        if !Arc::ptr_eq(source, &self.source) {
            return Err(PyValueError::new_err("the memory was made for another data set"));
        }
        if !self.memory.is_ours() {
            let reason = "the memory for the pass is another process's, which has forked; make it in this one";
            return Err(Error::new(ErrorKind::Closed, reason)).py(py);
        }
        Ok(self.memory.clone())
    }
}

struct Callable {
    allocate: Py<PyAny>,
    in_use: Arc<InUse>,
}

/// Addresses that are in use: where a region begins, and where it ends. One for each allocator, since a forked child
/// makes its own: a thread that doesn't exist there may have held the lock.
type InUse = Mutex<BTreeMap<usize, usize>>;

impl SlabAllocator for Callable {
    fn allocate(&self, bytes: usize) -> Result<Region, Error> {
        let asked = Python::try_attach(|py| self.ask(py, bytes).map_err(|e| failed(py, bytes, &e)));
        asked.unwrap_or_else(|| Err(Error::new(ErrorKind::Closed, "the interpreter is ending")))
    }
}

impl Callable {
    fn ask(&self, py: Python<'_>, bytes: usize) -> PyResult<Region> {
        let array = self.allocate.bind(py).call1((bytes,))?.cast_into::<PyArray1<u8>>()?;
        if !array.is_c_contiguous() {
            return Err(PyValueError::new_err("the array is not contiguous"));
        }
        // Whether it can be written to.
        drop(
            array
                .try_readwrite()
                .map_err(|e| PyValueError::new_err(e.to_string()))?,
        );
        let (start, len) = (array.data(), array.len());
        let start = NonNull::new(start).ok_or_else(|| PyValueError::new_err("the array has no memory"))?;
        let array = Pinned::new(array.as_untyped())?;
        let Some(taken) = Taken::new(&self.in_use, start.addr().get(), len) else {
            let reason = "the array overlaps one that was returned before and is still in use";
            return Err(PyValueError::new_err(reason));
        };
        let owner = Owner {
            kept: Some((taken, array)),
            process: std::process::id(),
        };
        // SAFETY: contiguous bytes of an array that can be written to. It lives until `owner` is dropped, and is
        // pinned: NumPy refuses to resize it. No other region has any of them (`Taken`). The callable has handed it out
        // to be written to, so nobody else does: as with NumPy itself, who keeps it and writes to it all the same makes
        // the values of batches whatever he writes, though nothing here depends on what they are.
        Ok(unsafe { Region::new(start, len, owner) })
    }
}

fn lock(in_use: &InUse) -> MutexGuard<'_, BTreeMap<usize, usize>> {
    in_use.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Bytes that are in use, until it is dropped.
struct Taken {
    start: usize,
    in_use: Arc<InUse>,
}

impl Taken {
    /// `None` if some of them are already.
    fn new(in_use: &Arc<InUse>, start: usize, len: usize) -> Option<Self> {
        // One without bytes is refused later; until then it has its address to itself.
        let end = start.checked_add(len.max(1))?;
        let mut regions = lock(in_use);
        // Regions don't overlap, so the last that begins in front of the end is the last to end.
        if regions
            .range(..end)
            .next_back()
            .is_some_and(|(_, &other)| other > start)
        {
            return None;
        }
        regions.insert(start, end);
        drop(regions);
        Some(Taken {
            start,
            in_use: in_use.clone(),
        })
    }
}

impl Drop for Taken {
    fn drop(&mut self) {
        lock(&self.in_use).remove(&self.start);
    }
}

/// Keeps an array alive.
struct Owner {
    kept: Option<(Taken, Pinned)>,
    process: u32,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // What a forked child has is a copy, which its parent's allocator knows nothing of; a driver's memory can't be
        // given back there.
        if self.process != std::process::id() {
            std::mem::forget(self.kept.take());
        }
    }
}

fn failed(py: Python<'_>, bytes: usize, error: &PyErr) -> Error {
    let kind = error
        .get_type(py)
        .name()
        .map_or_else(|_| "an error".into(), |name| name.to_string());
    let text = error.value(py).to_string();
    let class = match error.is_instance_of::<PyMemoryError>(py) {
        true => ErrorKind::OutOfMemory,
        false => ErrorKind::Limit,
    };
    Error::new(
        class,
        format!("there is no memory for a batch: asked for {bytes} bytes, the allocator raised {kind}: {text}"),
    )
}
