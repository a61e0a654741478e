//! Layouts: the positions of an item's parts in a slab.

use fastpipe_loader::SlabPlan;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::memory::ItemMemory;
use super::node::{Node, compile};
use super::read;

/// The layout of items in a slab.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemLayout {
    pub(crate) root: Node,
    pub(crate) widths: Vec<usize>,
    /// Whether the rows in the slab already form the batch.
    #[pyo3(get)]
    pub(crate) in_place: bool,
}

#[pymethods]
impl ItemLayout {
    /// `node` describes an item. It is one of ("dict", [(key, node)]), ("list", [node]), ("tuple", class, [node]),
    /// ("fields", class, [(name, node)]), ("array", class, dtype, shape), ("arrays", class, dtype, dims), ("scalar",
    /// class, dtype), ("tensor", dtype, (code, bits), shape, stored dtype), ("tensors", dtype, (code, bits), dims,
    /// stored dtype), ("int",), ("float",), ("bool",), ("text",), ("bytes",) and ("object",).
    #[new]
    fn new(node: &Bound<'_, PyAny>, in_place: bool) -> PyResult<Self> {
        let mut widths = Vec::new();
        let root = compile(node, &mut widths, 0)?;
        Ok(ItemLayout { root, widths, in_place })
    }

    /// Returns the size of a slab with this many rows, in bytes.
    fn size(&self, rows: usize) -> PyResult<usize> {
        Ok(self.plan(rows)?.end)
    }

    /// Returns the values of each part of a batch, in the order of the description. Parts are arrays `[rows, *shape]`,
    /// or lists of text or bytes.
    fn parts<'py>(&self, memory: &Bound<'py, ItemMemory>, slab: usize, rows: usize) -> PyResult<Bound<'py, PyList>> {
        read::parts(&self.root, &self.widths, &self.plan(rows)?, memory, slab, rows)
    }
}

impl ItemLayout {
    /// Computes the positions of the parts of this many rows.
    pub(crate) fn plan(&self, rows: usize) -> PyResult<SlabPlan> {
        SlabPlan::new(&self.widths, rows)
            .ok_or_else(|| PyValueError::new_err(format!("a batch of {rows} rows is too large: its size overflows")))
    }
}
