//! A batch as seen by the worker that makes it of its items.

use std::sync::{Mutex, PoisonError};

use fastpipe_loader::{Claim, ControlBlock, RowKind};
use numpy::PyUntypedArray;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;
use pyo3::types::{PyList, PyWeakrefMethods, PyWeakrefReference};

use super::layout::ItemLayout;
use super::memory::{ItemMemory, outside};
use super::read::Rows;
use super::room::ItemRoom;

/// A batch as seen by the worker that joins its items, or makes it as a whole.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemBatch {
    block: ControlBlock,
    claim: Claim,
    layout: Option<Py<ItemLayout>>,
    room: Py<ItemRoom>,
    /// Set until the items are released.
    memory: Mutex<Option<Py<ItemMemory>>>,
}

#[pymethods]
impl ItemBatch {
    /// The index of the batch in its pass.
    #[getter]
    fn number(&self) -> u64 {
        self.claim.number
    }

    /// The seed of the pass.
    #[getter]
    fn seed(&self) -> u64 {
        self.claim.seed
    }

    /// Returns the items in order. Their arrays and tensors are in the memory of the batch. `load` unpickles an object.
    fn items<'py>(&self, py: Python<'py>, load: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let memory = self.memory(py)?;
        let rows = self.claim.rows as usize;
        let found = PyList::empty(py);
        let layout = self.layout.as_ref().map(|layout| layout.get());
        let plan = layout.map(|layout| layout.plan(rows)).transpose()?;
        let slab = plan
            .as_ref()
            .and_then(|plan| self.block.slab(self.claim.slot, self.claim.rows, plan.end));
        for row in 0..self.claim.rows {
            let item = match (self.block.row(self.claim.slot, row), layout, &plan, slab) {
                ((RowKind::Odd, (offset, len)), ..) => load.call1((&memory, offset, len))?,
                ((RowKind::Placed, _), Some(layout), Some(plan), Some(slab)) => {
                    let all = Rows {
                        memory: &memory,
                        widths: &layout.widths,
                        plan,
                        slab,
                        load: Some(load),
                    };
                    all.item(&layout.root, row as usize)?
                }
                _ => return Err(outside()),
            };
            found.append(item)?;
        }
        Ok(found)
    }

    /// Waits for the memory of a batch that is made as a whole. Returns `len` bytes of it as a uint8 array, to which a
    /// part of the result can be written. None if they don't fit.
    fn array<'py>(&self, py: Python<'py>, len: usize) -> PyResult<Option<Bound<'py, PyUntypedArray>>> {
        let memory = self.memory(py)?;
        py.detach(|| self.block.wait_for_slab(self.claim.slot));
        let offset = self.block.room_in_slab(self.claim.slot, len);
        let view = |offset| ItemMemory::array(&memory, offset, len);
        offset.map(view).transpose()
    }

    /// The memory that contains the items, and what was written to arrays.
    #[pyo3(name = "memory")]
    fn get_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, ItemMemory>> {
        self.memory(py)
    }

    /// Releases the memory, unless `keep` is set because the result is stored in it. Returns whether an object
    /// in this process still refers to it. If so, that memory belongs to the object, and the batch must not use
    /// it.
    fn release(&self, py: Python<'_>, keep: bool) -> PyResult<bool> {
        let memory = self
            .memory
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .take()
            .ok_or_else(ended)?;
        let seen = PyWeakrefReference::new(memory.bind(py))?;
        drop(memory);
        if let Some(memory) = seen.upgrade() {
            let memory = memory.cast_into::<ItemMemory>()?;
            memory.get().keep(self.block.detach(self.claim.slot));
            self.room.get().forget();
            return Ok(true);
        }
        if !keep {
            self.block.clear(self.claim.slot);
        }
        Ok(false)
    }
}

impl ItemBatch {
    pub(crate) fn new(
        py: Python<'_>,
        block: ControlBlock,
        claim: Claim,
        layout: Option<Py<ItemLayout>>,
        room: Py<ItemRoom>,
    ) -> PyResult<Self> {
        let memory = Py::new(py, ItemMemory::new(block.clone(), None))?;
        Ok(ItemBatch {
            block,
            claim,
            layout,
            room,
            memory: Mutex::new(Some(memory)),
        })
    }

    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, ItemMemory>> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.as_ref().map(|memory| memory.bind(py).clone()).ok_or_else(ended)
    }
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the batch has already been joined")
}
