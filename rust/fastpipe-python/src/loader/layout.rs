//! Layouts: where in a slab each part of an item goes.

use fastpipe_loader::SlabPlan;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::memory::ItemMemory;
use super::node::{Node, compile};
use super::read;

/// How items are laid out.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemLayout {
    pub(crate) root: Node,
    pub(crate) widths: Vec<usize>,
    /// Whether rows side by side are the batch.
    #[pyo3(get)]
    pub(crate) in_place: bool,
}

#[pymethods]
impl ItemLayout {
    /// `node` describes an item: ("dict", [(key, node)]), ("list", [node]), ("tuple", class, [node]), ("fields", class,
    /// [(name, node)]), ("array", class, dtype, shape), ("arrays", class, dtype, dims), ("scalar", class, dtype),
    /// ("tensor", dtype, (code, bits), shape, stored dtype), ("tensors", dtype, (code, bits), dims, stored dtype),
    /// ("int",), ("float",), ("bool",), ("text",), ("bytes",) or ("object",).
    #[new]
    fn new(node: &Bound<'_, PyAny>, in_place: bool) -> PyResult<Self> {
        let mut widths = Vec::new();
        let root = compile(node, &mut widths, 0)?;
        Ok(ItemLayout { root, widths, in_place })
    }

    /// Bytes of a slab for so many rows.
    fn size(&self, rows: usize) -> PyResult<usize> {
        Ok(self.plan(rows)?.end)
    }

    /// The values of each part of a batch, in the order of the description: arrays `[rows, *shape]`, and lists of text
    /// and bytes.
    fn parts<'py>(&self, memory: &Bound<'py, ItemMemory>, slab: usize, rows: usize) -> PyResult<Bound<'py, PyList>> {
        read::parts(&self.root, &self.widths, &self.plan(rows)?, memory, slab, rows)
    }
}

impl ItemLayout {
    /// Where the parts of so many rows lie.
    pub(crate) fn plan(&self, rows: usize) -> PyResult<SlabPlan> {
        SlabPlan::new(&self.widths, rows)
            .ok_or_else(|| PyValueError::new_err(format!("a batch of {rows} rows has more bytes than there can be")))
    }
}
