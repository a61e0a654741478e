//! TFRecord files as a dataset.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::sync::Arc;

use fastpipe_batch::{Feature, Leaf, Request, Source, text_path};
use fastpipe_datasets::{TfRecordFiles, layout_digest};
use fastpipe_tfrecord::{TfRecordSource, masked_crc};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::callbacks::{log, signals};
use crate::errors::IntoPy;
use crate::sources::data::Data;
use crate::sources::files::Files;
use crate::specs::features::{Described, describe};
use crate::specs::wanted::{Features, Wanted};

/// TFRecord files that are ready to be read. Their units are chunks of records.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct TfRecordDataset {
    source: Arc<TfRecordSource>,
    features: Vec<Feature>,
    /// The names of all features of the records, if a record with another feature is an error.
    all: Option<Vec<String>>,
    files: Arc<TfRecordFiles>,
}

impl TfRecordDataset {
    fn of(
        py: Python<'_>,
        files: Arc<TfRecordFiles>,
        features: Vec<Feature>,
        all: Option<Vec<String>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let source = Arc::new(files.source(&features, all.as_deref()).py(py)?);
        let dataset = TfRecordDataset {
            source: source.clone(),
            features,
            all,
            files,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }
}

#[pymethods]
impl TfRecordDataset {
    /// Opens files and finds their records. Infers features from some of the records.
    ///
    /// `lists` names the lookups that read any number of keys per record. If it is omitted, features are compared with
    /// some of the records, which determine the forms of lookups.
    ///
    /// `all` names all features of the records, to raise an error for a record with another feature. If all features
    /// are inferred, it is their names.
    #[new]
    #[pyo3(signature = (files, wanted, lists=None, all=None))]
    fn new(
        py: Python<'_>,
        files: Files,
        wanted: Wanted,
        lists: Option<Vec<String>>,
        all: Option<Vec<String>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let how = files.opening(false);
        let opened = py.detach(|| TfRecordFiles::open(&files.paths, how, &mut signals()));
        let (files, notes) = opened.py(py)?;
        log(py, &notes)?;
        let infers_all = matches!(wanted, Wanted::Columns(None));
        let (features, notes) = match (wanted, lists) {
            (Wanted::Columns(columns), _) => py.detach(|| files.infer(columns.as_deref(), &mut signals())).py(py)?,
            (Wanted::Features(features), None) => py.detach(|| files.with_forms(features, &mut signals())).py(py)?,
            (Wanted::Features(features), Some(lists)) => (in_lists(features, &lists), Vec::new()),
        };
        log(py, &notes)?;
        let all = match infers_all {
            true => Some(features.iter().map(|feature| feature.name.clone()).collect()),
            false => all,
        };
        TfRecordDataset::of(py, Arc::new(files), features, all)
    }

    /// Returns a dataset of the same files with other features. No file is opened again.
    fn with_features(&self, py: Python<'_>, features: Features) -> PyResult<Py<TfRecordDataset>> {
        let formed = py.detach(|| self.files.with_forms(features.0, &mut signals()));
        let (features, notes) = formed.py(py)?;
        log(py, &notes)?;
        Py::new(
            py,
            TfRecordDataset::of(py, self.files.clone(), features, self.all.clone())?,
        )
    }

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Returns the names of all features of the records, if a record with another feature is an error.
    fn all(&self) -> Option<Vec<String>> {
        self.all.clone()
    }

    /// Returns the path, the size in bytes, and a digest of the first and last bytes of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, [u8; 8])> {
        let files = self.files.files();
        files
            .map(|(path, size, digest)| (text_path(path), size, digest.to_le_bytes()))
            .collect()
    }

    /// Returns a 16-byte digest of the positions of all chunks and their numbers of records.
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| layout_digest(self.source.chunks())))
    }

    /// Returns the number of chunks of each file.
    fn units_by_file(&self) -> Vec<u64> {
        self.source.chunks().units_by_file()
    }

    /// Returns the file of a record, and the index of the record in the file.
    fn place_of(&self, unit: u64, record: u32) -> PyResult<(Cow<'_, OsStr>, u64)> {
        if unit >= self.source.units() {
            return Err(PyIndexError::new_err(format!("chunk {unit} does not exist")));
        }
        let (path, row) = self.source.chunks().row_in_file(unit, record.into());
        Ok((text_path(path), row))
    }
}

/// Whether bytes begin with the length of a record and its checksum. Other files pass with a probability of 2^-32.
#[pyfunction]
pub(crate) fn begins_with_record(start: &[u8]) -> bool {
    let parts = start.first_chunk::<12>().and_then(|head| head.split_last_chunk::<4>());
    parts.is_some_and(|(length, crc)| masked_crc(length) == u32::from_le_bytes(*crc))
}

/// Returns features of which some lookups read any number of keys per record.
fn in_lists(mut features: Vec<Feature>, lists: &[String]) -> Vec<Feature> {
    for feature in features.iter_mut().filter(|feature| lists.contains(&feature.name)) {
        let leaf: Leaf = feature.request.leaf();
        feature.request = Request::Ragged {
            shape: vec![None],
            leaf,
        };
    }
    features
}
