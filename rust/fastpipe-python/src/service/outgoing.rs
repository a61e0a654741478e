//! Batches for whoever sends them: to other machines, or to a process that has memory in common with this one.

use std::ptr::NonNull;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, Slab, SlabPool};
use fastpipe_engine::Batch;
use fastpipe_memory::Lender;
use fastpipe_wire::{Header, write_group};
use numpy::PyUntypedArray;
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PySlice};

use crate::arrays::numpy_buffers::Memory;
use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::IntoPy;

/// Free slabs that are kept for batches that are sent together.
const KEPT: usize = 8;

/// Batches that are sent together, most often one message: a large one by itself, in its slabs; small ones one behind
/// the other in memory of their own.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Sent {
    headers: Vec<Vec<u8>>,
    /// Where the bytes of each end.
    ends: Vec<usize>,
    memory: Py<Memory>,
}

impl Sent {
    /// Batches to be sent, with checksums.
    pub(crate) fn new(py: Python<'_>, mut batches: Vec<Batch>, pool: &Arc<SlabPool>) -> PyResult<Sent> {
        let made: Result<_, Error> = py.detach(|| {
            let headers = batches.iter().map(|batch| Header::of(batch, true).write()).collect();
            let ends = batches.iter().scan(0, |end, batch| {
                *end += nbytes(batch);
                Some(*end)
            });
            let ends: Vec<usize> = ends.collect();
            let slabs = match &mut batches[..] {
                [batch] => std::mem::take(&mut batch.slabs),
                _ => vec![together(&batches, pool)?],
            };
            Ok((headers, ends, slabs))
        });
        let (headers, ends, slabs) = made.py(py)?;
        let memory = Py::new(py, Memory::of_all(slabs))?;
        Ok(Sent { headers, ends, memory })
    }
}

/// The bytes of batches, one behind the other.
fn together(batches: &[Batch], pool: &Arc<SlabPool>) -> Result<Slab, Error> {
    let mut together = pool.take(batches.iter().map(nbytes).sum())?;
    let mut room = together.bytes_mut();
    for slab in batches.iter().flat_map(|batch| &batch.slabs) {
        let (now, later) = room.split_at_mut(slab.len());
        now.copy_from_slice(slab.bytes());
        room = later;
    }
    Ok(together)
}

/// Bytes of a batch.
pub(crate) fn nbytes(batch: &Batch) -> usize {
    batch.slabs.iter().map(Slab::len).sum()
}

#[pymethods]
impl Sent {
    /// How many batches there are.
    #[getter]
    fn count(&self) -> usize {
        self.headers.len()
    }

    /// Their bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.ends.last().copied().unwrap_or_default()
    }

    /// Some of the batches: what is said of them, and their memory, uint8.
    fn part<'py>(
        &self,
        py: Python<'py>,
        first: usize,
        end: usize,
    ) -> PyResult<(Bound<'py, PyBytes>, Vec<Bound<'py, PyAny>>)> {
        let outside = || PyIndexError::new_err(format!("there are {} batches here", self.headers.len()));
        let headers = self.headers.get(first..end).ok_or_else(outside)?;
        let said = PyBytes::new(py, &write_group(headers.iter().map(Vec::as_slice)));
        let pieces = Memory::pieces(self.memory.bind(py))?.into_iter();
        let arrays = pieces.map(|(array, _): (Bound<'py, PyUntypedArray>, _)| array.into_any());
        if self.headers.len() == 1 || headers.is_empty() {
            let arrays = if headers.is_empty() {
                Vec::new()
            } else {
                arrays.collect()
            };
            return Ok((said, arrays));
        }
        let from = first.checked_sub(1).map_or(0, |before| self.ends[before]);
        let slice = PySlice::new(py, from.cast_signed(), self.ends[end - 1].cast_signed(), 1);
        Ok((
            said,
            arrays.map(|array| array.get_item(&slice)).collect::<PyResult<_>>()?,
        ))
    }
}

/// A pool for batches that are sent together.
pub(crate) fn pool() -> Arc<SlabPool> {
    SlabPool::new(KEPT)
}

/// What is lent of batches: what is said of them, and the offset and the length of each piece, as [`read_pieces`] reads
/// them.
pub(crate) type Lent<'py> = (Bound<'py, PyBytes>, Bound<'py, PyBytes>);

/// Bytes of a number.
const NUMBER: usize = size_of::<u64>();

/// Offsets and lengths of pieces, from their bytes.
pub(crate) fn read_pieces(bytes: &[u8]) -> Result<Vec<(usize, usize)>, Error> {
    let number = |bytes: [u8; NUMBER]| usize::try_from(u64::from_ne_bytes(bytes)).ok();
    let (numbers, rest) = bytes.as_chunks::<NUMBER>();
    let (pairs, odd) = numbers.as_chunks::<2>();
    let pieces = pairs
        .iter()
        .map(|[offset, len]| Some((number(*offset)?, number(*len)?)));
    let pieces = pieces
        .collect::<Option<_>>()
        .filter(|_| rest.is_empty() && odd.is_empty());
    pieces.ok_or_else(|| Error::new(ErrorKind::Malformed, "what is said of lent memory can't be read"))
}

/// Lends batches to another process.
pub(crate) fn lend<'py>(py: Python<'py>, batches: Vec<Batch>, slabs: &SharedSlabs) -> PyResult<Lent<'py>> {
    let lent = || {
        let headers: Vec<_> = batches.iter().map(|batch| Header::of(batch, false).write()).collect();
        let slabs_of = batches.iter().flat_map(|batch| &batch.slabs);
        let mut pieces = Vec::new();
        for slab in slabs_of.filter(|slab| !slab.is_empty()) {
            let offset = lend_slab(slabs.lender(), slab)?;
            pieces.extend([offset, slab.len()].map(|number| (number as u64).to_ne_bytes()));
        }
        drop(batches);
        Ok((write_group(headers.iter().map(Vec::as_slice)), pieces.concat()))
    };
    let lent: Result<(Vec<u8>, Vec<u8>), Error> = py.detach(lent);
    let (said, pieces) = lent.py(py)?;
    Ok((PyBytes::new(py, &said), PyBytes::new(py, &pieces)))
}

/// Lends a slab, or a copy if it lies elsewhere: a source may have memory of its own. Returns its offset.
fn lend_slab(lender: &Arc<Lender>, slab: &Slab) -> Result<usize, Error> {
    let memory = lender.arena().memory();
    let all = memory.start().addr().get()..memory.start().addr().get() + memory.len();
    let nothing = || Error::new(ErrorKind::Internal, "a piece of memory can't be lent");
    if all.contains(&slab.as_ptr().addr()) {
        let offset = NonNull::new(slab.as_ptr()).and_then(|start| lender.lend(start));
        slab.detach();
        return offset.ok_or_else(nothing);
    }
    let mut copy =
        SlabPool::with_allocator(0, Some(Arc::new(fastpipe_batch::SharedSlabs(lender.clone())))).take(slab.len())?;
    copy.bytes_mut().copy_from_slice(slab.bytes());
    NonNull::new(copy.as_ptr())
        .and_then(|start| lender.lend(start))
        .ok_or_else(nothing)
}
