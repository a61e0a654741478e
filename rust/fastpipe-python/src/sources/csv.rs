//! CSV files as a dataset.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::sync::Arc;

use fastpipe_batch::{Feature, Source, text_path};
use fastpipe_csv::{CsvSource, Dialect, Names, OnRagged};
use fastpipe_datasets::{CsvFiles, layout_digest};
use fastpipe_engine::{PassSource, default_threads};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::callbacks::{log, signals};
use crate::errors::IntoPy;
use crate::sources::data::Data;
use crate::sources::files::Files;
use crate::specs::features::{Described, describe};
use crate::specs::wanted::{Features, Wanted};

/// A lowered dialect: delimiter, quote, comment, decimal mark, column names (or whether they are in the first row),
/// words for null, whether ragged rows are skipped, and whether floats must represent numbers without loss.
pub(crate) type LoweredDialect = (u8, Option<u8>, Option<u8>, u8, GivenNames, Vec<Vec<u8>>, bool, bool);

/// The source of column names.
#[derive(FromPyObject)]
pub(crate) enum GivenNames {
    FirstRow(bool),
    Given(Vec<String>),
}

/// Returns the dialect. Raises `ValueError` if two of its special bytes are the same.
pub(crate) fn dialect(lowered: LoweredDialect) -> PyResult<Dialect> {
    let (delimiter, quote, comment, decimal, names, null_values, skip, lossless) = lowered;
    let dialect = Dialect {
        delimiter,
        quote,
        comment,
        decimal,
        names: match names {
            GivenNames::FirstRow(true) => Names::FirstRow,
            GivenNames::FirstRow(false) => Names::Numbered,
            GivenNames::Given(names) => Names::Given(names),
        },
        null_values,
        on_ragged: if skip { OnRagged::Skip } else { OnRagged::Error },
        lossless,
    };
    match dialect.check() {
        Ok(()) => Ok(dialect),
        Err(error) => Err(PyValueError::new_err(error.reason().to_owned())),
    }
}

/// CSV files that are ready to be read. Their units are chunks of rows.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct CsvDataset {
    source: Arc<CsvSource>,
    features: Vec<Feature>,
    files: Arc<CsvFiles>,
}

impl CsvDataset {
    fn of(py: Python<'_>, files: Arc<CsvFiles>, features: Vec<Feature>) -> PyResult<PyClassInitializer<Self>> {
        let source = Arc::new(files.source(&features).py(py)?);
        let data = match files.compressed(&source, default_threads()) {
            None => Data::new(source.clone()),
            Some(compressed) => {
                let compressed = Arc::new(compressed);
                let units = compressed.units();
                let begin = {
                    let compressed = compressed.clone();
                    move |_: Python<'_>| {
                        let source = Arc::new(compressed.again());
                        Ok(PassSource { source, lease: None })
                    }
                };
                Data::with_passes(compressed, Box::new(begin), units)
            }
        };
        let dataset = CsvDataset {
            source,
            features,
            files,
        };
        Ok(PyClassInitializer::from(data).add_subclass(dataset))
    }

    /// Returns a dataset of rows that were picked from files. It has no features yet.
    pub(crate) fn picked(py: Python<'_>, files: CsvFiles) -> PyResult<Py<Self>> {
        Py::new(py, CsvDataset::of(py, Arc::new(files), Vec::new())?)
    }
}

#[pymethods]
impl CsvDataset {
    /// Opens files and finds their rows. Infers the features of columns from some of the rows.
    #[new]
    fn new(
        py: Python<'_>,
        files: Files,
        dialect: LoweredDialect,
        wanted: Wanted,
    ) -> PyResult<PyClassInitializer<Self>> {
        let dialect = self::dialect(dialect)?;
        let how = files.opening(false);
        let seeks_nulls = matches!(wanted, Wanted::Columns(_));
        let opened = py.detach(|| CsvFiles::open(dialect, &files.paths, how, seeks_nulls, &mut signals()));
        let (files, notes) = opened.py(py)?;
        log(py, &notes)?;
        let files = Arc::new(files);
        let features = match wanted {
            Wanted::Features(features) => features,
            Wanted::Columns(columns) => inferred(py, &files, columns.as_deref())?,
        };
        CsvDataset::of(py, files, features)
    }

    /// Returns a dataset of the same files with other features. No file is opened again.
    fn with_features(&self, py: Python<'_>, features: Features) -> PyResult<Py<CsvDataset>> {
        Py::new(py, CsvDataset::of(py, self.files.clone(), features.0)?)
    }

    /// Returns a dataset of the same files, with features that are inferred from some of the rows.
    fn inferred(&self, py: Python<'_>) -> PyResult<Py<CsvDataset>> {
        let features = inferred(py, &self.files, None)?;
        Py::new(py, CsvDataset::of(py, self.files.clone(), features)?)
    }

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Returns the path, the size in bytes, and a digest of the first and last bytes of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, [u8; 8])> {
        let files = self.files.files().iter();
        files
            .map(|file| {
                let header = &file.header;
                (text_path(&file.path), header.size, header.digest.to_le_bytes())
            })
            .collect()
    }

    /// Returns the number of ragged rows that are skipped.
    fn skipped_rows(&self) -> u64 {
        self.files.skipped_rows()
    }

    /// Returns the columns that the first file lacks. Each comes with the first file that has it, and the number of
    /// these files.
    fn later_columns(&self, py: Python<'_>) -> Vec<(&str, Cow<'_, OsStr>, usize)> {
        let later = py.detach(|| self.files.later_columns());
        let later = later.into_iter();
        later
            .map(|(name, path, files)| (name, text_path(path), files))
            .collect()
    }

    /// Returns the size of all rows in bytes, after decompression.
    fn text_bytes(&self) -> u64 {
        let ranges = (0..self.source.units()).filter_map(|unit| self.source.describe(unit).range);
        ranges.map(|range| range.len).sum()
    }

    /// Returns a 16-byte digest of the positions of all chunks and their numbers of rows.
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| layout_digest(self.source.chunks())))
    }

    /// Returns the number of chunks of each file.
    fn units_by_file(&self) -> Vec<u64> {
        self.source.chunks().units_by_file()
    }

    /// Returns the file of a row, and the index of the row in the file.
    fn place_of(&self, unit: u64, record: u32) -> PyResult<(Cow<'_, OsStr>, u64)> {
        if unit >= self.source.units() {
            return Err(PyIndexError::new_err(format!("chunk {unit} does not exist")));
        }
        let (path, row) = self.source.place_of(unit, record);
        Ok((text_path(path), row))
    }
}

/// Infers the features of the first file's columns, or of some of these columns, from some of the rows.
fn inferred(py: Python<'_>, files: &CsvFiles, columns: Option<&[String]>) -> PyResult<Vec<Feature>> {
    let (features, notes) = py.detach(|| files.infer(columns, &mut signals())).py(py)?;
    log(py, &notes)?;
    Ok(features)
}
