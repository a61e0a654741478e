//! Avro files as a data set: opened, indexed, and compiled for a set of features.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::Arc;

use fastpipe_avro::{AvroSource, Evidence, column_times};
use fastpipe_batch::{Buffer, BufferPool, Error, ErrorKind, Feature, Pass as Reading, Source, path_text, text_path};
use fastpipe_files::{Files, IndexCache};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::cached::{self, Schemas};
use crate::data::Data;
use crate::errors::{IntoPy, to_py};
use crate::features::{Described, Lowered, describe, feature};
use crate::inferred::{self, Inferring};
use crate::opening::open_all;

/// Data sets up to this many bytes are looked at as a whole when features are inferred; of larger ones a sample is.
const LOOKED_AT_WHOLE: u64 = 16 << 20;

/// Blocks in that sample, and records of each.
const SAMPLED_BLOCKS: u64 = 64;
const SAMPLED_RECORDS: u32 = 4096;

/// Blocks among which one is chosen to see what columns take.
const LOOKED_AT: u64 = 16;

/// Avro files, ready to be read. Their units are blocks.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct AvroDataset {
    source: Arc<AvroSource>,
    features: Vec<Feature>,
    inferring: Inferring,
    files: Vec<(Arc<str>, u64, [u8; 16])>,
}

#[pymethods]
impl AvroDataset {
    /// Opens files. `check` is called with the path and the schema of the first file, and of each that has another schema; what
    /// it raises is raised. `lenient` infers what can be read, as it is stored, and leaves out the rest. With a list `damaged`,
    /// exceptions of damaged files are appended to it, and of such a file the blocks in front of the damage are read; of one
    /// whose header is damaged none.
    #[new]
    #[pyo3(signature = (paths, features, columns, index_cache=None, check=None, lenient=false, damaged=None))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    fn new(
        py: Python<'_>,
        paths: Vec<OsString>,
        features: Option<Vec<(String, Lowered<'_>)>>,
        columns: Option<Vec<String>>,
        index_cache: Option<PathBuf>,
        check: Option<&Bound<'_, PyAny>>,
        lenient: bool,
        damaged: Option<&Bound<'_, PyList>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let cache = index_cache.map(|d| IndexCache::open(&d)).transpose().py(py)?;
        let paths: Vec<Arc<str>> = paths.iter().map(|path| path_text(path).into()).collect();
        let schemas = Schemas::default();
        let (found, failed) = open_all(py, &paths, &schemas, cache.as_ref(), damaged.is_some())?;
        let texts = schemas.texts();
        let mut files = Vec::with_capacity(found.len());
        let mut stamps = Vec::with_capacity(found.len());
        let mut checked = HashSet::new();
        for file in found {
            if let (Some(damage), Some(damaged)) = (&file.damage, damaged) {
                damaged.append(to_py(py, damage).value(py))?;
            }
            let Some(file) = file.opened else { continue };
            cached::log(py, &file.notes)?;
            let schema = Arc::as_ptr(&file.info.schema);
            if let Some(check) = check.filter(|_| checked.insert(schema)) {
                check.call1((text_path(&file.info.path), texts.get(&schema).map(|text| &**text)))?;
            }
            stamps.push(file.stamp);
            files.push((file.info, file.blocks));
        }
        if let Some(error) = failed {
            return Err(to_py(py, &error));
        }
        let mut inferring = Inferring::default();
        let features = match features {
            Some(features) => features
                .into_iter()
                .map(|(name, spec)| feature(name, spec))
                .collect::<PyResult<_>>()?,
            None => {
                if let Some((first, _)) = files.first() {
                    inferring = inferred::infer(first, columns.as_deref(), lenient).py(py)?;
                }
                let source = AvroSource::new(&inferring.features, &files).py(py)?;
                refined(py, &source.with_stamps(stamps.clone()))?
            }
        };
        let source = Arc::new(AvroSource::new(&features, &files).py(py)?.with_stamps(stamps));
        let files = files.iter().map(|(info, blocks)| {
            let size = blocks.last().map_or(info.header.size, |last| last.offset + last.len());
            (info.path.clone(), size, info.header.sync)
        });
        let dataset = AvroDataset {
            files: files.collect(),
            source: source.clone(),
            features,
            inferring,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Name, kind, shape, dtype and nulls of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// For each feature of a logical type that `lenient` let be read as what is stored: the logical type.
    fn stored(&self) -> Vec<(String, String)> {
        self.inferring.stored.clone()
    }

    /// For each column that `lenient` left out: why.
    fn left_out(&self) -> Vec<(String, String)> {
        self.inferring.left_out.clone()
    }

    /// The symbols of enums that are read as codes.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        let columns = self.source.avro_columns().iter();
        columns
            .filter_map(|c| Some((c.feature.name.clone(), c.symbols.as_ref()?.to_vec())))
            .collect()
    }

    /// Path, size in bytes and sync marker of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, [u8; 16])> {
        let files = self.files.iter();
        files
            .map(|(path, size, sync)| (text_path(path), *size, *sync))
            .collect()
    }

    /// A digest of where all blocks lie and of how many rows each has, in 16 bytes. SipHash has a specification, so it stays
    /// the same over versions.
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        let mut hasher = SipHasher24::new();
        py.detach(|| self.source.write_layout(|bytes| hasher.write(bytes)));
        PyBytes::new(py, &hasher.finish128().as_bytes())
    }

    /// For each file the number of its blocks.
    fn blocks(&self) -> Vec<u64> {
        self.source.units_by_file()
    }

    /// Nanoseconds that a record takes to decode: with all features, and for each feature without it.
    fn column_times(&self, py: Python<'_>) -> PyResult<(f64, Vec<(String, f64)>)> {
        let source = &self.source;
        // A block of many records, near the start.
        let units = 0..self.units().min(LOOKED_AT);
        let Some(unit) = units.max_by_key(|&unit| source.describe(unit).rows) else {
            return Ok((0.0, Vec::new()));
        };
        let times = py.detach(|| {
            let range = source.describe(unit).range;
            let bytes = range.map_or_else(
                || Ok(Buffer::default()),
                |range| Files::of(&**source).read(range, &BufferPool::default()),
            )?;
            column_times(source, unit, bytes).map_err(|e| source.locate(unit, e))
        });
        let times = times.py(py)?;
        let names = source.avro_columns().iter().map(|c| c.feature.name.clone());
        Ok((times.all, names.zip(times.without).collect()))
    }

    /// The file of a block, and its number there.
    fn place_of(&self, unit: u64) -> PyResult<(Cow<'_, OsStr>, u64)> {
        if unit >= self.units() {
            return Err(PyIndexError::new_err(format!("there is no block {unit}")));
        }
        let (path, block) = self.source.place_of(unit);
        Ok((text_path(path), block))
    }
}

impl AvroDataset {
    fn units(&self) -> u64 {
        self.source.units().unwrap_or(0)
    }
}

/// Features with the fixed shapes that a look at the data suggests. A damaged block says nothing here: reading it reports its
/// error where it stands. Where storage or memory fails, so does this: what is inferred follows from the data alone.
fn refined(py: Python<'_>, source: &AvroSource) -> PyResult<Vec<Feature>> {
    let mut evidence = Evidence::new(source);
    let units = source.units().unwrap_or(0);
    let info = |unit: u64| source.describe(unit);
    let stored: u64 = (0..units).filter_map(|unit| info(unit).range).map(|r| r.len).sum();
    let whole = stored <= LOOKED_AT_WHOLE;
    let samples = if whole { units } else { units.min(SAMPLED_BLOCKS) };
    let records = if whole { u32::MAX } else { SAMPLED_RECORDS };
    let files = Files::of(source);
    let pool = BufferPool::default();
    let mut damaged = Vec::new();
    for i in 0..samples {
        if !evidence.is_open() {
            break;
        }
        let unit = (u128::from(i) * u128::from(units) / u128::from(samples)) as u64;
        let looked = py.detach(|| -> Result<(), Error> {
            let Some(range) = info(unit).range else { return Ok(()) };
            let bytes = files.read(range, &pool)?;
            let mut open = source.open(unit, Reading::default(), bytes.into(), &pool)?;
            evidence.observe(&*open, records)?;
            open.recycle(&pool);
            Ok(())
        });
        if let Err(error) = looked {
            let error = source.locate(unit, error);
            let error = files.change_behind(&error).unwrap_or(error);
            if !says_nothing(error.kind()) {
                return Err(to_py(py, &error));
            }
            damaged.push(error);
        }
        py.check_signals()?;
    }
    files.check().py(py)?;
    cached::log(py, &passed_over(&damaged))?;
    Ok(evidence.refine())
}

/// Whether an error is about the data of a block, which is then as good as not there.
fn says_nothing(kind: ErrorKind) -> bool {
    use ErrorKind::{Malformed, Null, Shape, ValueRange};
    matches!(kind, Malformed | Shape | ValueRange | Null)
}

/// Warnings about blocks that inference passed over.
fn passed_over(damaged: &[Error]) -> Vec<(&'static str, String)> {
    const SHOWN: usize = 3;
    let warning = |error: &Error| {
        (
            "warning",
            format!("a block says nothing of the features, since it is damaged: {error}"),
        )
    };
    let mut notes: Vec<_> = damaged.iter().take(SHOWN).map(warning).collect();
    if damaged.len() > SHOWN {
        let more = damaged.len() - SHOWN;
        notes.push((
            "warning",
            format!("{more} more damaged blocks say nothing of the features"),
        ));
    }
    notes
}
