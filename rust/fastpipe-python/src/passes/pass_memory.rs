//! Memory for passes that comes from Python or is shared with other processes.
//!
//! Decoding threads need the GIL to request such memory, and hold locks of their pass during the request. Therefore a
//! thread with the GIL must release it before it waits for a pass. Freeing memory never waits for the GIL: a reference
//! that is dropped on a thread without the GIL is released by the next thread that has it.
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

/// Memory for passes over a dataset. It is either shared memory or comes from a callable: `allocate(nbytes)` returns a
/// uint8 array.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct PassMemory {
    memory: Arc<Memory>,
    source: Arc<dyn Source>,
}

#[pymethods]
impl PassMemory {
    /// `held` is the number of batches that the consumer holds at once. Memory for this many batches is kept for reuse.
    #[new]
    fn new(data: &Bound<'_, Data>, allocate: Py<PyAny>, held: usize) -> Self {
        let allocator = Callable {
            allocate,
            in_use: Arc::default(),
        };
        PassMemory::with(data, Arc::new(allocator), held)
    }

    /// Creates memory that other processes map, so that batches can be lent to them.
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

    /// Returns the memory for a pass over this source.
    pub(crate) fn of(&self, py: Python<'_>, source: &Arc<dyn Source>) -> PyResult<Arc<Memory>> {
        if !Arc::ptr_eq(source, &self.source) {
            return Err(PyValueError::new_err("the memory was created for another dataset"));
        }
        if !self.memory.is_ours() {
            let reason = "the memory was created by another process, which has forked: create it in this process";
            return Err(Error::new(ErrorKind::Closed, reason)).py(py);
        }
        Ok(self.memory.clone())
    }
}

struct Callable {
    allocate: Py<PyAny>,
    in_use: Arc<InUse>,
}

/// The start and end addresses of regions in use. Each allocator has its own map, and a forked child creates a new
/// allocator: a thread that doesn't exist in the child may have held the lock of the old map.
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
        // This checks that the array is writable.
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
        // SAFETY: these are contiguous bytes of a writable array. The array lives until `owner` is dropped, and it is
        // pinned, so NumPy refuses to resize it. No other region contains any of the bytes (`Taken`). The callable
        // returned the array to be written to, so other code must not write to it. As in NumPy itself, code that writes
        // to it nonetheless changes the values of batches, but no code here depends on these values.
        Ok(unsafe { Region::new(start, len, owner) })
    }
}

fn lock(in_use: &InUse) -> MutexGuard<'_, BTreeMap<usize, usize>> {
    in_use.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A range of addresses that is in use until this is dropped.
struct Taken {
    start: usize,
    in_use: Arc<InUse>,
}

impl Taken {
    /// Returns `None` if part of the range is already in use.
    fn new(in_use: &Arc<InUse>, start: usize, len: usize) -> Option<Self> {
        // An empty region is rejected later. Until then it occupies its address.
        let end = start.checked_add(len.max(1))?;
        let mut regions = lock(in_use);
        // Regions don't overlap, so the last region that begins before `end` also ends last.
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

/// Keeps an array alive and its addresses reserved.
struct Owner {
    kept: Option<(Taken, Pinned)>,
    process: u32,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // A forked child has only a copy, which its parent's allocator doesn't know about. A driver's memory can't be
        // freed in the child.
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
        format!("could not allocate a batch: asked for {bytes} bytes, the allocator raised {kind}: {text}"),
    )
}
