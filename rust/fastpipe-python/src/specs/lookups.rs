//! Vocabularies, and features whose text is converted to indices.

use std::borrow::Cow;
use std::ffi::OsString;
use std::sync::Arc;

use fastpipe_batch::{
    Buckets, DType, Edge, Feature, Indices, Lookup, SparseLayout, Unknown, Vocabulary as Table, path_text,
};
use fastpipe_datasets::{LOOK_AFTER_KEYS, read_vocabulary};
use pyo3::exceptions::{PyTypeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyList, PyString};

use crate::callbacks::signals;
use crate::errors::IntoPy;
use crate::specs::features::{self, Lowered};

/// The keys of a vocabulary with their indices. Specs and readers share one instance.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Vocabulary(Arc<Table>);

/// Returns the bytes of a key. `place` is the position of the key, for error messages.
fn bytes_of<'a>(key: &'a Bound<'_, PyAny>, place: usize) -> PyResult<Cow<'a, [u8]>> {
    if let Ok(text) = key.cast::<PyString>() {
        return match text.to_str() {
            Ok(text) => Ok(Cow::Borrowed(text.as_bytes())),
            Err(_) => Err(PyValueError::new_err(format!(
                "key {place} of the vocabulary can't be written as UTF-8: pass it as bytes"
            ))),
        };
    }
    if let Ok(bytes) = key.cast::<PyBytes>() {
        return Ok(Cow::Borrowed(bytes.as_bytes()));
    }
    let kind = key.get_type();
    let reason = format!("keys of a vocabulary must be str or bytes; key {place} is {kind}");
    Err(PyTypeError::new_err(reason))
}

/// Returns the index that the user gave for a key.
fn index_of(index: &Bound<'_, PyAny>, key: &Bound<'_, PyAny>) -> PyResult<u32> {
    let found = if index.is_instance_of::<PyBool>() {
        None
    } else {
        index.extract().ok()
    };
    found.ok_or_else(|| {
        let reason = format!(
            "indices of a vocabulary must be integers from 0 to {}; got {index:?} for {key:?}",
            u32::MAX
        );
        PyValueError::new_err(reason)
    })
}

#[pymethods]
impl Vocabulary {
    /// Creates a vocabulary from keys. The index of a key is the one given in `indices`, or its position if `indices`
    /// is omitted.
    #[staticmethod]
    #[pyo3(signature = (keys, indices=None))]
    fn of(py: Python<'_>, keys: &Bound<'_, PyList>, indices: Option<&Bound<'_, PyList>>) -> PyResult<Self> {
        let mut table = Table::with_capacity(keys.len(), 0).py(py)?;
        for (place, key) in keys.iter().enumerate() {
            if place % LOOK_AFTER_KEYS == 0 {
                py.check_signals()?;
            }
            let index = match indices {
                Some(indices) => index_of(&indices.get_item(place)?, &key)?,
                None => {
                    u32::try_from(place).map_err(|_| PyValueError::new_err("a vocabulary has more than 2^32 keys"))?
                }
            };
            if let Some(before) = table.push(&bytes_of(&key, place)?, index).py(py)? {
                let reason = format!("the key {key:?} occurs twice, with the indices {before} and {index}");
                return Err(PyValueError::new_err(reason));
            }
        }
        Ok(Vocabulary(Arc::new(table.settled().py(py)?)))
    }

    /// Reads a text file with one key per line. The index of a key is the number of lines before it.
    #[staticmethod]
    fn read(py: Python<'_>, path: OsString) -> PyResult<Self> {
        let path = path_text(&path);
        let table = py.detach(|| read_vocabulary(&path, &mut signals())).py(py)?;
        Ok(Vocabulary(Arc::new(table)))
    }

    /// Restores a vocabulary from the bytes that [`Vocabulary::dump`] returned.
    #[staticmethod]
    fn load(py: Python<'_>, dumped: &[u8]) -> PyResult<Self> {
        let table = py.detach(|| Table::from_bytes(dumped)).py(py)?;
        Ok(Vocabulary(Arc::new(table)))
    }

    /// Returns the keys and indices as bytes, for pickling.
    fn dump<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, self.0.as_bytes())
    }

    fn __len__(&self) -> usize {
        self.0.len()
    }

    /// One more than the largest index.
    #[getter]
    fn size(&self) -> u64 {
        self.0.size()
    }

    /// A digest of the keys with their indices. It does not depend on their order.
    #[getter]
    fn digest(&self) -> String {
        format!("{:032x}", self.0.digest())
    }

    /// The memory of the vocabulary in bytes.
    #[getter]
    fn nbytes(&self) -> usize {
        self.0.bytes()
    }

    /// Returns up to `most` keys with their indices, in the order in which they were given.
    #[pyo3(signature = (most=None))]
    fn items<'py>(&self, py: Python<'py>, most: Option<usize>) -> Vec<(Bound<'py, PyBytes>, u32)> {
        let items = self.0.iter().take(most.unwrap_or(usize::MAX));
        items.map(|(key, index)| (PyBytes::new(py, key), index)).collect()
    }
}

/// The lookup of a feature whose text is converted to indices. Its elements are a vocabulary (`None` for a hash), the
/// treatment of unknown keys (or `"hash"`), the number of buckets, the seed, the separator, the dtype of a bag's values
/// and the layout.
pub(crate) type LoweredKeys<'py> = (
    Option<Bound<'py, Vocabulary>>,
    String,
    u64,
    u64,
    Vec<u8>,
    Option<String>,
    String,
);

/// An edge between two buckets.
#[derive(FromPyObject)]
pub(crate) enum LoweredEdge {
    Int(i128),
    Float(f64),
}

/// The lookup of a feature with indices: of keys, or of the buckets of numbers. The latter consists of the edges, and
/// whether NaN has a bucket.
#[derive(FromPyObject)]
pub(crate) enum LoweredLookup<'py> {
    Keys(LoweredKeys<'py>),
    Buckets((Vec<LoweredEdge>, bool)),
}

/// Builds a feature from its name, its lowered spec and its lookup. The schema later determines its array type.
pub(crate) fn feature(
    py: Python<'_>,
    name: String,
    mut lowered: Lowered<'_>,
    lookup: LoweredLookup<'_>,
) -> PyResult<Feature> {
    let dtype = number(&lowered.2)?;
    let lookup = match lookup {
        LoweredLookup::Keys(keys) => of_keys(keys, dtype)?,
        LoweredLookup::Buckets((edges, nan)) => {
            let edges: Vec<Edge> = edges.into_iter().map(edge).collect();
            Lookup {
                indices: Indices::Buckets(Arc::new(Buckets::new(&edges, nan).py(py)?)),
                separator: Box::default(),
                dtype,
                values: None,
                layout: SparseLayout::Coo,
            }
        }
    };
    lowered.0 = "dense".into();
    let feature = features::feature(name, lowered)?;
    Ok(Feature {
        lookup: Some(Arc::new(lookup)),
        ..feature
    })
}

fn edge(edge: LoweredEdge) -> Edge {
    match edge {
        LoweredEdge::Int(edge) => Edge::Int(edge),
        LoweredEdge::Float(edge) => Edge::Float(edge),
    }
}

fn number(name: &str) -> PyResult<DType> {
    let reason = || PyValueError::new_err(format!("unknown dtype {name:?} of indices or values"));
    DType::from_name(name).ok_or_else(reason)
}

fn of_keys(lookup: LoweredKeys<'_>, dtype: DType) -> PyResult<Lookup> {
    let (vocabulary, unknown, buckets, seed, separator, values, layout) = lookup;
    let unknown = match unknown.as_str() {
        "drop" => Unknown::Drop,
        "bucket" => Unknown::Buckets(buckets),
        _ => Unknown::Error,
    };
    Ok(Lookup {
        indices: match vocabulary {
            Some(vocabulary) => Indices::Vocabulary(vocabulary.get().0.clone(), unknown),
            None => Indices::Hash { buckets, seed },
        },
        separator: separator.into(),
        dtype,
        values: values.as_deref().map(number).transpose()?,
        layout: if layout == "csr" {
            SparseLayout::Csr
        } else {
            SparseLayout::Coo
        },
    })
}
