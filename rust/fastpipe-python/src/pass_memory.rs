//! Memory for passes that comes from Python.
//!
//! Decoding threads need the GIL to ask for it, and hold locks of their pass meanwhile. So whoever has the GIL never waits for
//! a pass without letting go of it; and nothing is given back by waiting for the GIL: a reference that dies on a thread
//! without it is dropped by the next one that has it.
#![allow(unsafe_code)]

use std::mem::ManuallyDrop;
use std::ptr::NonNull;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Region, SlabAllocator, Source};
use fastpipe_engine::Memory;
use numpy::{PyArray1, PyArrayMethods, PyUntypedArrayMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::data::Data;
use crate::errors::IntoPy;

/// Memory for passes over a data set, all of it from a callable: `allocate(nbytes)` returns a uint8 array.
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
        let source = data.get().source().clone();
        let allocator = Arc::new(Callable(allocate));
        PassMemory {
            memory: Memory::with_allocator(source.columns(), Some(allocator), held),
            source,
        }
    }
}

impl PassMemory {
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

struct Callable(Py<PyAny>);

impl SlabAllocator for Callable {
    fn allocate(&self, bytes: usize) -> Result<Region, Error> {
        let asked = Python::try_attach(|py| self.ask(py, bytes).map_err(|e| failed(py, bytes, &e)));
        asked.unwrap_or_else(|| Err(Error::new(ErrorKind::Closed, "the interpreter is ending")))
    }
}

impl Callable {
    fn ask(&self, py: Python<'_>, bytes: usize) -> PyResult<Region> {
        let array = self.0.bind(py).call1((bytes,))?.cast_into::<PyArray1<u8>>()?;
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
        let owner = Owner {
            array: ManuallyDrop::new(array.unbind()),
            process: std::process::id(),
        };
        // SAFETY: contiguous bytes of an array that can be written to. It lives until `owner` is dropped, and NumPy refuses
        // to resize an array that others refer to. The callable has handed it out to be written to: as with NumPy itself, who
        // keeps it and writes to it makes the values of batches whatever he writes.
        Ok(unsafe { Region::new(start, len, owner) })
    }
}

/// Keeps an array alive.
struct Owner {
    array: ManuallyDrop<Py<PyArray1<u8>>>,
    process: u32,
}

impl Drop for Owner {
    fn drop(&mut self) {
        // What a forked child has is a copy, which its parent's allocator knows nothing of; a driver's memory can't be given
        // back there.
        if self.process == std::process::id() {
            // SAFETY: nobody uses it any more.
            unsafe { ManuallyDrop::drop(&mut self.array) };
        }
    }
}

fn failed(py: Python<'_>, bytes: usize, error: &PyErr) -> Error {
    let kind = error
        .get_type(py)
        .name()
        .map_or_else(|_| "an error".into(), |name| name.to_string());
    let text = error.value(py).to_string();
    Error::new(
        ErrorKind::Limit,
        format!("there is no memory for a batch: asked for {bytes} bytes, the allocator raised {kind}: {text}"),
    )
}
