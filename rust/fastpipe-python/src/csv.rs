//! CSV files as a data set.

use std::borrow::Cow;
use std::ffi::{OsStr, OsString};
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{Error, Feature, FileStamp, Source, Unit, path_text, text_path};
use fastpipe_csv::{
    CsvFile, CsvSource, Dialect, Evidence, FirstNulls, Header, KeptRows, Names, OnRagged, Origins, inferring,
};
use fastpipe_engine::default_threads;
use fastpipe_files::{IndexCache, LOOKED_AT_WHOLE, Opening, Packed, Survey, open_all, survey};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::contents::{InMemory, contents as in_memory};
use crate::csv_format::CsvFormat;
use crate::csv_packed::{PackedCsv, joined};
use crate::data::{Begun, Data};
use crate::errors::{IntoPy, to_py};
use crate::features::{Described, Lowered, describe};
use crate::index::{log, signals};
use crate::lookups::{Lookups, lifted};

/// Delimiter, quote, comment, decimal mark, names of columns (or whether they are in the first row), words for no
/// value, and whether ragged rows are passed over.
pub(crate) type LoweredDialect = (u8, Option<u8>, Option<u8>, u8, GivenNames, Vec<Vec<u8>>, bool, bool);

/// Where the names of columns come from.
#[derive(FromPyObject)]
pub(crate) enum GivenNames {
    FirstRow(bool),
    Given(Vec<String>),
}

/// The dialect, if its bytes can be told apart.
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

/// CSV files, ready to be read. Their units are stretches of rows.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct CsvDataset {
    source: Arc<CsvSource>,
    features: Vec<Feature>,
    files: Arc<Files>,
}

/// Files whose rows were found.
struct Files {
    dialect: Dialect,
    files: Vec<CsvFile>,
    stamps: Vec<FileStamp>,
    contents: Vec<Option<Bytes>>,
    /// Where the rows of each were, if they are rows that were picked out of others.
    origins: Vec<Arc<Origins>>,
    /// For each file where its columns have nulls; none if these weren't searched for.
    nulls: Vec<FirstNulls>,
    /// For each file how it is compressed; none if no file is.
    packed: Option<Arc<[Option<Packed>]>>,
}

impl Files {
    fn source(&self, features: &[Feature]) -> Result<CsvSource, Error> {
        let source = CsvSource::new(features, &self.dialect, &self.files)?;
        Ok(source
            .with_stamps(self.stamps.clone())
            .with_contents(self.contents.clone())
            .with_origins(&self.origins))
    }
}

impl CsvDataset {
    fn of(py: Python<'_>, files: Arc<Files>, features: Vec<Feature>) -> PyResult<PyClassInitializer<Self>> {
        let source = Arc::new(files.source(&features).py(py)?);
        let dataset = CsvDataset {
            source: source.clone(),
            features,
            files,
        };
        let data = match &dataset.files.packed {
            None => Data::new(source),
            Some(packed) => {
                let packed = Arc::new(PackedCsv::new(source, packed.clone()));
                let units = packed.units();
                let begin = {
                    let packed = packed.clone();
                    move |_: Python<'_>| {
                        let source = Arc::new(packed.again());
                        Ok(Begun { source, lease: None })
                    }
                };
                Data::with_passes(packed, Box::new(begin), units)
            }
        };
        Ok(PyClassInitializer::from(data).add_subclass(dataset))
    }

    /// Rows that were picked out of files, with no features yet.
    pub(crate) fn kept(
        py: Python<'_>,
        dialect: Dialect,
        kept: Vec<(Arc<str>, Header, KeptRows)>,
    ) -> PyResult<Py<Self>> {
        let mut files = Files {
            dialect,
            files: Vec::with_capacity(kept.len()),
            stamps: Vec::with_capacity(kept.len()),
            contents: Vec::with_capacity(kept.len()),
            origins: Vec::with_capacity(kept.len()),
            nulls: Vec::new(),
            packed: None,
        };
        for (path, header, rows) in kept {
            let (file, bytes, origins) = rows.file(&path, &header);
            // As that of any file in memory.
            files.stamps.push(FileStamp {
                size: bytes.len() as u64,
                modified: 0,
            });
            files.files.push(file);
            files.contents.push(Some(bytes));
            files.origins.push(origins);
        }
        Py::new(py, CsvDataset::of(py, Arc::new(files), Vec::new())?)
    }
}

#[pymethods]
impl CsvDataset {
    /// Opens files and finds their rows; `columns` are of those that are found out by a look at rows, if there are no
    /// `features`.
    #[new]
    #[pyo3(signature = (paths, dialect, features, columns, index_cache=None, contents=Vec::new(), lookups=None))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    fn new(
        py: Python<'_>,
        paths: Vec<OsString>,
        dialect: LoweredDialect,
        features: Option<Vec<(String, Lowered<'_>)>>,
        columns: Option<Vec<String>>,
        index_cache: Option<PathBuf>,
        contents: Vec<InMemory>,
        lookups: Option<Lookups<'_>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let dialect = self::dialect(dialect)?;
        let cache = index_cache.map(|d| IndexCache::open(&d)).transpose().py(py)?;
        let paths: Vec<Arc<str>> = paths.iter().map(|path| path_text(path).into()).collect();
        let contents = contents.into_iter().map(in_memory).collect::<PyResult<Vec<_>>>()?;
        // Several files are scanned at once, or several regions of one.
        let threads = default_threads();
        let format = CsvFormat::new(
            dialect.clone(),
            if paths.len() == 1 { threads } else { 1 },
            features.is_none(),
        );
        let how = Opening {
            contents: &contents,
            cache: cache.as_ref(),
            tolerant: false,
            threads,
        };
        let (found, failed) = py.detach(|| open_all(&format, &paths, how, &mut signals())).py(py)?;
        if let Some(error) = failed {
            return Err(to_py(py, &error));
        }
        let (mut files, mut stamps) = (Vec::with_capacity(found.len()), Vec::with_capacity(found.len()));
        let (mut nulls, mut packed) = (Vec::with_capacity(found.len()), Vec::with_capacity(found.len()));
        for file in found.into_iter().filter_map(|file| file.opened) {
            log(py, &file.notes)?;
            stamps.push(file.stamp);
            let how = file.header.packed();
            nulls.extend(file.header.nulls().take());
            files.push(CsvFile {
                path: file.path,
                header: file.header.header,
                stretches: match &how {
                    Some(how) => joined(file.blocks, &how.layout),
                    None => file.blocks,
                },
            });
            packed.push(how);
        }
        let files = Arc::new(Files {
            dialect,
            files,
            stamps,
            contents,
            origins: Vec::new(),
            nulls,
            packed: packed.iter().any(Option::is_some).then(|| packed.into()),
        });
        let features = match features {
            Some(features) => lifted(features, lookups)?,
            None => inferred(py, &files, columns.as_deref())?,
        };
        CsvDataset::of(py, files, features)
    }

    /// The same files, read for other features. Nothing is opened.
    #[pyo3(signature = (features, lookups=None))]
    fn with_features(
        &self,
        py: Python<'_>,
        features: Vec<(String, Lowered<'_>)>,
        lookups: Option<Lookups<'_>>,
    ) -> PyResult<Py<CsvDataset>> {
        Py::new(py, CsvDataset::of(py, self.files.clone(), lifted(features, lookups)?)?)
    }

    /// The same files, read for features that are found out by a look at rows.
    fn inferred(&self, py: Python<'_>) -> PyResult<Py<CsvDataset>> {
        let features = inferred(py, &self.files, None)?;
        Py::new(py, CsvDataset::of(py, self.files.clone(), features)?)
    }

    /// Name, kind, shape, dtype and nulls of each feature, and what nulls are filled with if it isn't 0 or empty.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Path, size in bytes, and a digest of the first and the last bytes of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, u64)> {
        let files = self.files.files.iter();
        files
            .map(|file| (text_path(&file.path), file.header.size, file.header.digest))
            .collect()
    }

    /// Bytes of all rows, decompressed if their file is compressed.
    fn text_bytes(&self) -> u64 {
        let ranges = (0..self.source.units()).filter_map(|unit| self.source.describe(unit).range);
        ranges.map(|range| range.len).sum()
    }

    /// A digest of where all stretches lie and of how many rows each has, in 16 bytes.
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut hasher = SipHasher24::new();
        py.detach(|| self.source.write_layout(|bytes| hasher.write(bytes)));
        PyBytes::new(py, &hasher.finish128().as_bytes())
    }

    /// The file of a row, and its number there.
    fn place_of(&self, unit: u64, record: u32) -> PyResult<(Cow<'_, OsStr>, u64)> {
        if unit >= self.source.units() {
            return Err(PyIndexError::new_err(format!("there is no stretch {unit}")));
        }
        let (path, row) = self.source.place_of(unit, record);
        Ok((text_path(path), row))
    }
}

/// Features of the columns of the first file, or of some of them, by a look at rows.
fn inferred(py: Python<'_>, files: &Files, columns: Option<&[String]>) -> PyResult<Vec<Feature>> {
    let Some(first) = files.files.first() else {
        return Ok(Vec::new());
    };
    let evidence = inferring(&files.dialect, &first.header, columns).map_err(|e| e.at_path(&first.path));
    let mut columns = Columns(evidence.py(py)?);
    let source = files.source(&[]).py(py)?;
    let notes = match &files.packed {
        None => py.detach(|| survey(&source, None, &mut columns, &mut signals())),
        Some(packed) => py.detach(|| {
            let source = PackedCsv::new(Arc::new(source), packed.clone());
            let at_hand = source.at_hand(LOOKED_AT_WHOLE);
            survey(&source, Some(&at_hand), &mut columns, &mut signals())
        }),
    };
    let notes = notes.py(py)?;
    log(py, &notes)?;
    for (file, nulls) in files.files.iter().zip(&files.nulls) {
        columns.0.add_nulls(&file.header, nulls);
    }
    Ok(columns.0.features())
}

/// A survey of the types of columns.
struct Columns<'d>(Evidence<'d>);

impl Survey for Columns<'_> {
    fn is_open(&self) -> bool {
        true
    }

    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<(), Error> {
        self.0.observe(unit, records)
    }
}
