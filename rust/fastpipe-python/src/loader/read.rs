//! Reads items from a slab, for the worker that joins them, and the parts of a batch, for the consumer.

use fastpipe_loader::SlabPlan;
use numpy::{PyArrayDescr, dtype};
use pyo3::exceptions::PyRuntimeError;
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyDict, PyFloat, PyInt, PyList, PyString, PyTuple, PyType};

use super::memory::{ItemMemory, outside, written};
use super::node::{Leaf, Node};

/// Rows of a slab that are read.
pub(super) struct Rows<'a, 'py> {
    pub(super) memory: &'a Bound<'py, ItemMemory>,
    /// The width of each part.
    pub(super) widths: &'a [usize],
    pub(super) plan: &'a SlabPlan,
    pub(super) slab: usize,
    /// Unpickles an object. Its arguments are the memory, an offset and a length.
    pub(super) load: Option<&'a Bound<'py, PyAny>>,
}

impl<'py> Rows<'_, 'py> {
    fn py(&self) -> Python<'py> {
        self.memory.py()
    }

    /// Returns the offset of a part's value.
    fn at(&self, part: usize, row: usize) -> usize {
        self.slab + self.plan.starts[part] + self.widths[part] * row
    }

    fn read(&self, offset: usize, len: usize) -> PyResult<&[u8]> {
        written(self.memory.get().block(), offset, len)
    }

    /// Returns the numbers in the cell of a part.
    fn cell(&self, part: usize, row: usize) -> PyResult<Vec<usize>> {
        let bytes = self.read(self.at(part, row), self.widths[part])?;
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

    /// Returns an item as it was when it was written.
    pub(super) fn item(&self, node: &Node, row: usize) -> PyResult<Bound<'py, PyAny>> {
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
                // This restores the object without calling its `__init__`.
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

    /// Returns the values of a part for this many rows, as an array or a list of text or bytes.
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
                Err(PyRuntimeError::new_err("the rows of these items do not form a batch"))
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

/// Returns the values of each part of a batch. See `ItemLayout.parts`.
pub(crate) fn parts<'py>(
    root: &Node,
    widths: &[usize],
    plan: &SlabPlan,
    memory: &Bound<'py, ItemMemory>,
    slab: usize,
    rows: usize,
) -> PyResult<Bound<'py, PyList>> {
    let all = Rows {
        memory,
        widths,
        plan,
        slab,
        load: None,
    };
    let found = PyList::empty(memory.py());
    all.parts(root, rows, &found)?;
    Ok(found)
}
