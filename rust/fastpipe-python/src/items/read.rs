//! Bytes to items, for whoever makes a batch of them, and to the parts of a batch.
#![allow(unsafe_code)]

use std::sync::{Mutex, PoisonError};

use fastpipe_items::{Board, Claim, RowKind, SlabPlan};
use numpy::{PyArrayDescr, dtype};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{
    PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType, PyWeakrefMethods, PyWeakrefReference,
};

use super::layout::{ItemLayout, Leaf, Node};
use super::memory::{ItemMemory, outside};

/// Reads rows of a slab.
struct Rows<'a, 'py> {
    memory: &'a Bound<'py, ItemMemory>,
    layout: &'a ItemLayout,
    plan: &'a SlabPlan,
    slab: usize,
    /// Unpickles: of the memory, an offset and a length.
    load: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Rows<'_, 'py> {
    fn py(&self) -> Python<'py> {
        self.memory.py()
    }

    /// Where the value of a part lies.
    fn at(&self, part: usize, row: usize) -> usize {
        self.slab + self.plan.starts[part] + self.layout.widths[part] * row
    }

    fn read(&self, offset: usize, len: usize) -> PyResult<&[u8]> {
        let start = self.memory.get().board().at(offset, len).ok_or_else(outside)?;
        // SAFETY: as in `ItemMemory::bytes`. Rows that are read are finished, and nobody writes them any more.
        Ok(unsafe { std::slice::from_raw_parts(start.as_ptr(), len) })
    }

    /// The numbers in the cell of a part.
    fn cell(&self, part: usize, row: usize) -> PyResult<Vec<usize>> {
        let bytes = self.read(self.at(part, row), self.layout.widths[part])?;
        Ok(bytes
            .as_chunks::<8>()
            .0
            .iter()
            .map(|&number| u64::from_ne_bytes(number) as usize)
            .collect())
    }

    fn elsewhere(&self, part: usize, row: usize) -> PyResult<&[u8]> {
        match self.cell(part, row)?[..] {
            [offset, len, ..] => self.read(offset, len),
            _ => Err(outside()),
        }
    }

    fn array(&self, dtype: &Py<PyArrayDescr>, shape: &[usize], offset: usize) -> PyResult<Bound<'py, PyAny>> {
        Ok(ItemMemory::view(self.memory, dtype.bind(self.py()), shape, offset)?.into_any())
    }

    fn tensor(
        &self,
        dtype: &Py<PyAny>,
        stored: &Py<PyArrayDescr>,
        shape: &[usize],
        offset: usize,
    ) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let array = self.array(stored, shape, offset)?;
        let found = py.import("torch")?.call_method1(intern!(py, "from_numpy"), (array,))?;
        let wanted = dtype.bind(py);
        match found.getattr(intern!(py, "dtype"))?.is(wanted) {
            true => Ok(found),
            false => found.call_method1(intern!(py, "view"), (wanted,)),
        }
    }

    /// An item, as it was when it was written.
    fn item(&self, node: &Node, row: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let all = |nodes: &[Node]| {
            nodes
                .iter()
                .map(|node| self.item(node, row))
                .collect::<PyResult<Vec<_>>>()
        };
        Ok(match node {
            Node::Leaf(leaf, part) => self.leaf(leaf, *part, row)?,
            Node::List(nodes) => PyList::new(py, all(nodes)?)?.into_any(),
            Node::Tuple(class, nodes) => {
                let values = PyTuple::new(py, all(nodes)?)?;
                let class = class.bind(py);
                if class.is(PyType::new::<PyTuple>(py)) {
                    values.into_any()
                } else {
                    class.call_method1(intern!(py, "_make"), (values,))?
                }
            }
            Node::Dict(pairs) => {
                let dict = PyDict::new(py);
                for (key, node) in pairs {
                    dict.set_item(key, self.item(node, row)?)?;
                }
                dict.into_any()
            }
            Node::Fields(class, pairs) => {
                // As it was, whatever its `__init__` would do.
                let object = PyType::new::<PyAny>(py);
                let found = object.call_method1(intern!(py, "__new__"), (class,))?;
                for (name, node) in pairs {
                    let value = self.item(node, row)?;
                    object.call_method1(intern!(py, "__setattr__"), (&found, name, value))?;
                }
                found
            }
        })
    }

    fn leaf(&self, leaf: &Leaf, part: usize, row: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let at = self.at(part, row);
        let number = || self.read(at, 8)?.try_into().map_err(|_| outside());
        Ok(match leaf {
            Leaf::Array { dtype, shape, .. } => self.array(dtype, shape, at)?,
            Leaf::AnyArray { dtype, .. } => {
                let cell = self.cell(part, row)?;
                self.array(dtype, &cell[2..], cell[0])?
            }
            Leaf::Scalar { dtype, .. } => self.array(dtype, &[], at)?.get_item(PyTuple::empty(py))?,
            Leaf::Tensor {
                dtype, shape, stored, ..
            } => {
                let shape: Vec<_> = shape.iter().map(|&size| size as usize).collect();
                self.tensor(dtype, stored, &shape, at)?
            }
            Leaf::AnyTensor { dtype, stored, .. } => {
                let cell = self.cell(part, row)?;
                self.tensor(dtype, stored, &cell[2..], cell[0])?
            }
            Leaf::Int => PyInt::new(py, i64::from_ne_bytes(number()?)).into_any(),
            Leaf::Float => PyFloat::new(py, f64::from_ne_bytes(number()?)).into_any(),
            Leaf::Bool => PyBool::new(py, self.read(at, 1)?[0] != 0).to_owned().into_any(),
            Leaf::Text => text(py, self.elsewhere(part, row)?)?,
            Leaf::Bytes => PyBytes::new(py, self.elsewhere(part, row)?).into_any(),
            Leaf::Object => {
                let cell = self.cell(part, row)?;
                let load = self.load.ok_or_else(outside)?;
                load.call1((self.memory, cell[0], cell[1]))?
            }
        })
    }

    /// The values of a part of so many rows: an array, or a list of text or bytes.
    fn part(&self, leaf: &Leaf, part: usize, rows: usize) -> PyResult<Bound<'py, PyAny>> {
        let py = self.py();
        let at = self.at(part, 0);
        let with = |shape: &[usize]| [&[rows][..], shape].concat();
        let of = |dtype: Bound<'py, PyArrayDescr>| {
            Ok::<_, PyErr>(ItemMemory::view(self.memory, &dtype, &[rows], at)?.into_any())
        };
        match leaf {
            Leaf::Array { dtype, shape, .. } => self.array(dtype, &with(shape), at),
            Leaf::Scalar { dtype, .. } => self.array(dtype, &[rows], at),
            Leaf::Tensor { stored, shape, .. } => {
                let shape: Vec<_> = shape.iter().map(|&size| size as usize).collect();
                self.array(stored, &with(&shape), at)
            }
            Leaf::Int => of(dtype::<i64>(py)),
            Leaf::Float => of(dtype::<f64>(py)),
            Leaf::Bool => of(dtype::<bool>(py)),
            Leaf::Text => {
                let all = (0..rows).map(|row| text(py, self.elsewhere(part, row)?));
                Ok(PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)?.into_any())
            }
            Leaf::Bytes => {
                let all = (0..rows).map(|row| Ok(PyBytes::new(py, self.elsewhere(part, row)?)));
                Ok(PyList::new(py, all.collect::<PyResult<Vec<_>>>()?)?.into_any())
            }
            Leaf::AnyArray { .. } | Leaf::AnyTensor { .. } | Leaf::Object => {
                Err(PyRuntimeError::new_err("these items are no batch as they lie"))
            }
        }
    }

    fn parts(&self, node: &Node, rows: usize, found: &Bound<'py, PyList>) -> PyResult<()> {
        match node {
            Node::Leaf(leaf, part) => found.append(self.part(leaf, *part, rows)?),
            Node::List(nodes) | Node::Tuple(_, nodes) => {
                nodes.iter().try_for_each(|node| self.parts(node, rows, found))
            }
            Node::Dict(pairs) => pairs.iter().try_for_each(|(_, node)| self.parts(node, rows, found)),
            Node::Fields(_, pairs) => pairs.iter().try_for_each(|(_, node)| self.parts(node, rows, found)),
        }
    }
}

fn text<'py>(py: Python<'py>, bytes: &[u8]) -> PyResult<Bound<'py, PyAny>> {
    Ok(PyString::from_bytes(py, bytes)?.into_any())
}

/// The values of each part of a batch: see [`ItemLayout::parts`].
pub(crate) fn parts<'py>(
    layout: &ItemLayout,
    memory: &Bound<'py, ItemMemory>,
    slab: usize,
    rows: usize,
) -> PyResult<Bound<'py, PyList>> {
    let plan = layout.plan(rows)?;
    let all = Rows {
        memory,
        layout,
        plan: &plan,
        slab,
        load: None,
    };
    let found = PyList::empty(memory.py());
    all.parts(&layout.root, rows, &found)?;
    Ok(found)
}

/// A batch whose items are made, for the worker that makes a batch of them.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemBatch {
    board: Board,
    claim: Claim,
    layout: Option<Py<ItemLayout>>,
    /// Until the batch was made.
    memory: Mutex<Option<Py<ItemMemory>>>,
}

#[pymethods]
impl ItemBatch {
    /// The batch's number in its pass.
    #[getter]
    fn number(&self) -> u64 {
        self.claim.number
    }

    /// The seed of the pass.
    #[getter]
    fn seed(&self) -> u64 {
        self.claim.seed
    }

    /// Its items, in their order; arrays and tensors lie in the memory of the batch. `load` unpickles.
    fn items<'py>(&self, py: Python<'py>, load: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyList>> {
        let memory = self.memory(py)?;
        let rows = self.claim.rows as usize;
        let found = PyList::empty(py);
        let layout = self.layout.as_ref().map(|layout| layout.get());
        let plan = layout.map(|layout| layout.plan(rows)).transpose()?;
        let slab = plan
            .as_ref()
            .and_then(|plan| self.board.slab(self.claim.slot, self.claim.rows, plan.end));
        for row in 0..self.claim.rows {
            let item = match (self.board.row(self.claim.slot, row), layout, &plan, slab) {
                ((RowKind::Odd, (offset, len)), ..) => load.call1((&memory, offset, len))?,
                ((RowKind::Placed, _), Some(layout), Some(plan), Some(slab)) => {
                    let all = Rows {
                        memory: &memory,
                        layout,
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

    /// The memory in which its items lie.
    #[pyo3(name = "memory")]
    fn get_memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, ItemMemory>> {
        self.memory(py)
    }

    /// Nobody needs its items any more, unless `keep`: then what was made of them lies among them. Returns whether
    /// somebody in this process still looks at them: what lies there is his from now on, and the batch must have none
    /// of it.
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
            memory.get().keep(self.board.detach(self.claim.slot));
            return Ok(true);
        }
        if !keep {
            self.board.clear(self.claim.slot);
        }
        Ok(false)
    }
}

impl ItemBatch {
    pub(crate) fn new(py: Python<'_>, board: Board, claim: Claim, layout: Option<Py<ItemLayout>>) -> PyResult<Self> {
        let memory = Py::new(py, ItemMemory::new(board.clone(), None))?;
        Ok(ItemBatch {
            board,
            claim,
            layout,
            memory: Mutex::new(Some(memory)),
        })
    }

    fn memory<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, ItemMemory>> {
        let memory = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        memory.as_ref().map(|memory| memory.bind(py).clone()).ok_or_else(ended)
    }
}

fn ended() -> PyErr {
    PyRuntimeError::new_err("the batch is made already")
}
