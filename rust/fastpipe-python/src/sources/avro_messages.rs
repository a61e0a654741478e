//! Decodes Avro messages to batches. Schemas are compiled once; each call decodes a list of messages to one batch.

use std::sync::Arc;

use fastpipe_avro::Framing;
use fastpipe_datasets::KnownSchemas;
use fastpipe_engine::default_threads;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;
use pyo3::types::PyDict;

use crate::arrays::batch_arrays::to_dict;
use crate::callbacks::signals;
use crate::errors::{IntoPy, guarded};
use crate::specs::features::{Described, describe};
use crate::specs::wanted::Wanted;

/// Messages, stored without a copy.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Messages(Bytes);

enum Bytes {
    Each(Vec<PyBackedBytes>),
    /// Contiguous messages, with the start of each message and the end of the last.
    Joined(PyBackedBytes, Vec<usize>),
}

#[pymethods]
impl Messages {
    /// Takes a list of bytes.
    #[new]
    fn new(messages: Vec<PyBackedBytes>) -> Self {
        Messages(Bytes::Each(messages))
    }

    /// Takes contiguous messages.
    #[staticmethod]
    fn joined(bytes: PyBackedBytes, offsets: Vec<usize>) -> PyResult<Self> {
        let within = offsets.is_sorted() && offsets.last().is_some_and(|&end| end <= bytes.len());
        if !within {
            let reason = format!(
                "offsets must ascend and be at most {}, the number of bytes",
                bytes.len()
            );
            return Err(PyValueError::new_err(reason));
        }
        Ok(Messages(Bytes::Joined(bytes, offsets)))
    }

    fn __len__(&self) -> usize {
        match &self.0 {
            Bytes::Each(messages) => messages.len(),
            Bytes::Joined(_, offsets) => offsets.len() - 1,
        }
    }
}

impl Messages {
    fn iter(&self) -> impl Iterator<Item = &[u8]> {
        let get = |i: usize| match &self.0 {
            Bytes::Each(messages) => &messages[i][..],
            Bytes::Joined(bytes, offsets) => &bytes[offsets[i]..offsets[i + 1]],
        };
        (0..self.__len__()).map(get)
    }
}

/// Decodes messages. The first schema that is added determines the columns.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct MessageDecoder(fastpipe_datasets::MessageDecoder);

#[pymethods]
impl MessageDecoder {
    #[new]
    fn new(framing: Option<&str>, wanted: Wanted) -> PyResult<Self> {
        let framing = match framing {
            None => Framing::Bare,
            Some("single-object") => Framing::SingleObject,
            Some("registry") => Framing::Registry,
            Some(other) => return Err(PyValueError::new_err(format!("unknown framing {other:?}"))),
        };
        let (features, columns) = match wanted {
            Wanted::Features(features) => (Some(features), None),
            Wanted::Columns(columns) => (None, columns),
        };
        let decoder = fastpipe_datasets::MessageDecoder::new(framing, features, columns);
        Ok(MessageDecoder(decoder))
    }

    /// Compiles a schema for messages that refer to it by `key`, or by its fingerprint. Returns the columns of the
    /// first schema that aren't read, each with the reason.
    fn add(&self, py: Python<'_>, schema: &str, key: Option<u64>) -> PyResult<Vec<(String, String)>> {
        py.detach(|| self.0.add(schema, key)).py(py)
    }

    /// Returns the schema IDs in messages for which no schema has been added, each with the index of the first message
    /// that contains it. They are in the order of the messages. Stops at a message without a header.
    fn unknown(&self, py: Python<'_>, messages: &Messages) -> Vec<(u64, u64)> {
        py.detach(|| self.0.unknown(messages.iter()))
    }

    /// Whether a schema has been added, which determines the columns.
    #[getter]
    fn is_ready(&self) -> bool {
        self.0.known().is_some()
    }

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature, once a schema has been added.
    fn features(&self) -> Vec<Described> {
        let known = self.0.known();
        let columns = known.iter().flat_map(|known| known.schemas().columns());
        columns.map(|column| describe(&column.feature)).collect()
    }

    /// Returns the symbols of enums that are read as codes.
    fn categories(&self) -> Vec<(String, Vec<String>)> {
        let known = self.0.known();
        let columns = known.iter().flat_map(|known| known.schemas().columns());
        let symbols = columns.filter_map(|c| Some((c.feature.name.clone(), c.symbols.as_ref()?.to_vec())));
        symbols.collect()
    }

    /// Decodes all messages to a batch, in their order. At least one schema must have been added.
    fn decode<'py>(
        &self,
        py: Python<'py>,
        messages: &Messages,
        num_threads: Option<usize>,
    ) -> PyResult<Bound<'py, PyDict>> {
        let Some(known) = self.0.known() else {
            return Err(PyValueError::new_err("no schema is known yet"));
        };
        let threads = num_threads.unwrap_or_else(default_threads);
        let decode = || known.decode(messages.__len__(), messages.iter(), threads, &mut signals());
        let batch = py.detach(decode).py(py)?;
        guarded(py, || to_dict(py, known.specs(), batch.into(), false))
    }
}

impl MessageDecoder {
    /// Returns the schemas that have been added so far, for code that decodes without Python.
    pub(crate) fn known(&self) -> Option<Arc<KnownSchemas>> {
        self.0.known()
    }
}
