//! Batches for those who are sent them.

use std::sync::Arc;

use fastpipe_batch::SlabPool;
use fastpipe_engine::Batch;
use fastpipe_wire::Outgoing;
use numpy::PyUntypedArray;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice};

use crate::arrays::numpy_buffers::Memory;
use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::IntoPy;

/// Batches that are sent together.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Sent {
    outgoing: Outgoing,
    memory: Py<Memory>,
}

impl Sent {
    pub(crate) fn new(py: Python<'_>, batches: Vec<Batch>, pool: &Arc<SlabPool>) -> PyResult<Sent> {
        let (outgoing, slabs) = py.detach(|| Outgoing::new(batches, pool)).py(py)?;
        let memory = Py::new(py, Memory::of_all(slabs))?;
        Ok(Sent { outgoing, memory })
    }
}

#[pymethods]
impl Sent {
    /// How many batches there are.
    #[getter]
    fn count(&self) -> usize {
        self.outgoing.count()
    }

    /// Their bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.outgoing.nbytes()
    }

    /// Some of the batches: what is said of them, and their memory, uint8.
    fn part<'py>(
        &self,
        py: Python<'py>,
        first: usize,
        end: usize,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<Bound<'py, PyAny>>)> {
        let outside = || PyIndexError::new_err(format!("there are {} batches here", self.outgoing.count()));
        let (said, bytes) = self.outgoing.part(first..end).ok_or_else(outside)?;
        let said = PyBytes::new(py, &said);
        if first == end {
            return Ok((said, Vec::new()));
        }
        let pieces = Memory::pieces(self.memory.bind(py))?.into_iter();
        let arrays = pieces.map(|(array, _): (Bound<'py, PyUntypedArray>, _)| array.into_any());
        if self.outgoing.count() == 1 {
            return Ok((said, arrays.collect()));
        }
        let slice = PySlice::new(py, bytes.start.cast_signed(), bytes.end.cast_signed(), 1);
        let some = arrays.map(|array| array.get_item(&slice));
        Ok((said, some.collect::<PyResult<_>>()?))
    }
}

/// What is lent of batches: what is said of them, and the offset and the length of each piece.
pub(crate) type Lent<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Lends batches to another process.
pub(crate) fn lend<'py>(py: Python<'py>, batches: Vec<Batch>, slabs: &SharedSlabs) -> PyResult<Lent<'py>> {
    let (said, pieces) = py.detach(|| fastpipe_wire::lend(batches, slabs.lender())).py(py)?;
    Ok((PyBytes::new(py, &said), PyBytes::new(py, &pieces)))
}
