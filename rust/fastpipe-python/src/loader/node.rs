//! The structure of an item as a tree of its parts.
//!
//! Python describes an item (`fastpipe.torch.loader._structure`). The description is compiled to a tree, which is
//! traversed for each item.

use fastpipe_loader::CELL;
use numpy::{PyArrayDescr, PyArrayDescrMethods};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyString, PyType};

use super::tensors::Element;

/// A part of an item.
pub(crate) enum Node {
    /// A dict with these keys.
    Dict(Vec<(Py<PyAny>, Node)>),
    /// A list of these parts.
    List(Vec<Node>),
    /// A tuple of this class.
    Tuple(Py<PyType>, Vec<Node>),
    /// An instance of a dataclass, with these fields.
    Fields(Py<PyType>, Vec<(Py<PyString>, Node)>),
    /// A value, and the index of its part in the layout.
    Leaf(Leaf, usize),
}

/// A value of an item.
pub(crate) enum Leaf {
    /// A NumPy array of this class, dtype and shape.
    Array {
        class: Py<PyType>,
        dtype: Py<PyArrayDescr>,
        shape: Vec<usize>,
        bytes: usize,
    },
    /// A NumPy array of this dtype and number of dimensions.
    AnyArray {
        class: Py<PyType>,
        dtype: Py<PyArrayDescr>,
        dims: usize,
        item: usize,
    },
    /// A NumPy scalar.
    Scalar {
        class: Py<PyType>,
        dtype: Py<PyArrayDescr>,
        bytes: usize,
    },
    Int,
    Float,
    Bool,
    /// A tensor of this dtype and shape. `stored` is the dtype of an array over its bytes.
    Tensor {
        dtype: Py<PyAny>,
        element: Element,
        shape: Vec<i64>,
        bytes: usize,
        stored: Py<PyArrayDescr>,
    },
    /// A tensor of this dtype and number of dimensions.
    AnyTensor {
        dtype: Py<PyAny>,
        element: Element,
        dims: usize,
        stored: Py<PyArrayDescr>,
    },
    Text,
    Bytes,
    /// Any other object. It is pickled.
    Object,
}

/// The size in bytes of one array dimension, which is stored after the cell with the array's offset and length.
const SIZE: usize = 8;

impl Leaf {
    /// Returns the number of bytes that a row occupies in the slab.
    pub(crate) fn width(&self) -> usize {
        match self {
            Leaf::Array { bytes, .. } | Leaf::Scalar { bytes, .. } | Leaf::Tensor { bytes, .. } => *bytes,
            Leaf::Int | Leaf::Float => 8,
            Leaf::Bool => 1,
            Leaf::AnyArray { dims, .. } | Leaf::AnyTensor { dims, .. } => CELL + SIZE * dims,
            Leaf::Text | Leaf::Bytes | Leaf::Object => CELL,
        }
    }
}

/// The maximum nesting depth of an item. Python's own descriptions are not deeper.
const LEVELS: usize = 64;

/// Compiles a description, and appends the widths of its parts to `widths`.
pub(super) fn compile(node: &Bound<'_, PyAny>, widths: &mut Vec<usize>, level: usize) -> PyResult<Node> {
    if level > LEVELS {
        return Err(PyValueError::new_err("items are nested too deeply"));
    }
    let kind: String = node.get_item(0)?.extract()?;
    let list = |at: usize, widths: &mut Vec<usize>| -> PyResult<Vec<Node>> {
        let nodes = node.get_item(at)?.try_iter()?;
        nodes.map(|node| compile(&node?, widths, level + 1)).collect()
    };
    let class = |at: usize| Ok::<_, PyErr>(node.get_item(at)?.cast_into::<PyType>()?.unbind());
    Ok(match kind.as_str() {
        "dict" => {
            let pairs = node.get_item(1)?.try_iter()?.map(|pair| {
                let pair = pair?;
                Ok((
                    pair.get_item(0)?.unbind(),
                    compile(&pair.get_item(1)?, widths, level + 1)?,
                ))
            });
            Node::Dict(pairs.collect::<PyResult<_>>()?)
        }
        "list" => Node::List(list(1, widths)?),
        "tuple" => Node::Tuple(class(1)?, list(2, widths)?),
        "fields" => {
            let pairs = node.get_item(2)?.try_iter()?.map(|pair| {
                let pair = pair?;
                let name = pair.get_item(0)?.cast_into::<PyString>()?.unbind();
                Ok((name, compile(&pair.get_item(1)?, widths, level + 1)?))
            });
            Node::Fields(class(1)?, pairs.collect::<PyResult<_>>()?)
        }
        _ => {
            let leaf = leaf(&kind, node)?;
            widths.push(leaf.width());
            Node::Leaf(leaf, widths.len() - 1)
        }
    })
}

fn leaf(kind: &str, node: &Bound<'_, PyAny>) -> PyResult<Leaf> {
    let py = node.py();
    let class = |at: usize| Ok::<_, PyErr>(node.get_item(at)?.cast_into::<PyType>()?.unbind());
    let dtype = |at: usize| PyArrayDescr::new(py, node.get_item(at)?);
    let element = |at: usize| {
        let (code, bits) = node.get_item(at)?.extract()?;
        Ok::<_, PyErr>(Element { code, bits })
    };
    let size = |bytes: usize, shape: &[usize]| {
        let all = shape.iter().try_fold(bytes, |all, &size| all.checked_mul(size));
        all.ok_or_else(|| PyValueError::new_err("an item is too large: its size overflows"))
    };
    Ok(match kind {
        "array" => {
            let (dtype, shape): (_, Vec<usize>) = (dtype(2)?, node.get_item(3)?.extract()?);
            Leaf::Array {
                class: class(1)?,
                bytes: size(dtype.itemsize(), &shape)?,
                dtype: dtype.unbind(),
                shape,
            }
        }
        "arrays" => {
            let dtype = dtype(2)?;
            Leaf::AnyArray {
                class: class(1)?,
                item: dtype.itemsize(),
                dtype: dtype.unbind(),
                dims: node.get_item(3)?.extract()?,
            }
        }
        "scalar" => {
            let dtype = dtype(2)?;
            Leaf::Scalar {
                class: class(1)?,
                bytes: dtype.itemsize(),
                dtype: dtype.unbind(),
            }
        }
        "tensor" => {
            let (element, shape): (_, Vec<usize>) = (element(2)?, node.get_item(3)?.extract()?);
            Leaf::Tensor {
                dtype: node.get_item(1)?.unbind(),
                element,
                bytes: size(usize::from(element.bits).div_ceil(8), &shape)?,
                shape: shape.into_iter().map(i64::try_from).collect::<Result<_, _>>()?,
                stored: dtype(4)?.unbind(),
            }
        }
        "tensors" => Leaf::AnyTensor {
            dtype: node.get_item(1)?.unbind(),
            element: element(2)?,
            dims: node.get_item(3)?.extract()?,
            stored: dtype(4)?.unbind(),
        },
        "int" => Leaf::Int,
        "float" => Leaf::Float,
        "bool" => Leaf::Bool,
        "text" => Leaf::Text,
        "bytes" => Leaf::Bytes,
        "object" => Leaf::Object,
        other => return Err(PyValueError::new_err(format!("unknown kind of part {other:?}"))),
    })
}
