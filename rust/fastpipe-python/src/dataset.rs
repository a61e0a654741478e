//! Avro files as a data set: opened, indexed, and compiled for a set of features.

use std::borrow::Cow;
use std::collections::HashSet;
use std::ffi::{OsStr, OsString};
use std::hash::Hasher;
use std::path::PathBuf;
use std::sync::Arc;

use fastpipe_avro::{
    AvroSource, FileInfo, FolderColumn, FolderColumns, InferredColumns, LaterColumns, LengthSample, Schema,
    column_times, later_columns, merged_schema,
};
use fastpipe_batch::{Buffer, BufferPool, Error, Feature, Scalar, Source, Unit, path_text, text_path};
use fastpipe_engine::default_threads;
use fastpipe_files::{Files, IndexCache, Opening, Survey, open_all, survey};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};
use siphasher::sip128::{Hasher128, SipHasher24};

use crate::avro_format::AvroFormat;
use crate::contents::{InMemory, contents as in_memory};
use crate::data::Data;
use crate::errors::{IntoPy, to_py};
use crate::features::{Described, Lowered, describe};
use crate::index::{log, signals};
use crate::lookups::{self, Lookups};

/// Blocks among which one is chosen to see what columns take.
const LOOKED_AT: u64 = 16;

/// A column's name, the path of the first file that has it, and how many files have it.
type LaterColumn<'a> = (&'a str, Cow<'a, OsStr>, usize);

/// Avro files, ready to be read. Their units are blocks.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct AvroDataset {
    source: Arc<AvroSource>,
    features: Vec<Feature>,
    inferred: InferredColumns,
    later: LaterColumns,
    files: Vec<(Arc<str>, u64, [u8; 16])>,
}

#[pymethods]
impl AvroDataset {
    /// Opens files. `check` is called with the path and the schema of the first file, and of each that has another
    /// schema; what it raises is raised. With a list `damaged`, exceptions of damaged files are appended to it, and of
    /// such a file the blocks in front of the damage are read; of one whose header is damaged none. `reader_schema` is
    /// the text of the schema that files' schemas are resolved to, and with `merged` that is made of all of theirs.
    /// `lookups` has more of the features of kind `"lookup"`, `contents` the bytes of files that lie in memory, whose
    /// paths are then names, and `folders` the columns that folders stand for, with a value for each path.
    #[new]
    #[pyo3(signature = (
        paths, features, columns, index_cache=None, check=None, damaged=None, reader_schema=None, merged=false,
        logical_types=true, lookups=None, contents=Vec::new(), folders=None
    ))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    fn new(
        py: Python<'_>,
        paths: Vec<OsString>,
        features: Option<Vec<(String, Lowered<'_>)>>,
        columns: Option<Vec<String>>,
        index_cache: Option<PathBuf>,
        check: Option<&Bound<'_, PyAny>>,
        damaged: Option<&Bound<'_, PyList>>,
        reader_schema: Option<&str>,
        merged: bool,
        logical_types: bool,
        lookups: Option<Lookups<'_>>,
        contents: Vec<InMemory>,
        folders: Option<Vec<(String, Vec<Option<FolderValue>>)>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let cache = index_cache.map(|d| IndexCache::open(&d)).transpose().py(py)?;
        let paths: Vec<Arc<str>> = paths.iter().map(|path| path_text(path).into()).collect();
        let contents = contents.into_iter().map(in_memory).collect::<PyResult<Vec<_>>>()?;
        let format = AvroFormat::new(logical_types);
        let mut reader = reader_schema
            .map(|json| read_schema(json, logical_types))
            .transpose()
            .py(py)?;
        let how = Opening {
            contents: &contents,
            cache: cache.as_ref(),
            tolerant: damaged.is_some(),
            threads: default_threads(),
        };
        let opened = py.detach(|| open_all(&format, &paths, how, &mut signals()));
        let (found, failed) = opened.py(py)?;
        let texts = format.schema_texts();
        let mut files = Vec::with_capacity(found.len());
        let mut stamps = Vec::with_capacity(found.len());
        let mut opened_contents = Vec::with_capacity(contents.len());
        let mut checked = HashSet::new();
        let mut opened = Vec::with_capacity(found.len());
        for (number, file) in found.into_iter().enumerate() {
            if let (Some(damage), Some(damaged)) = (&file.damage, damaged) {
                damaged.append(to_py(py, damage).value(py))?;
            }
            let Some(file) = file.opened else { continue };
            log(py, &file.notes)?;
            let schema = Arc::as_ptr(&file.header.schema);
            if let Some(check) = check.filter(|_| checked.insert(schema)) {
                check.call1((text_path(&file.path), texts.get(&schema).map(|text| &**text)))?;
            }
            stamps.push(file.stamp);
            opened_contents.extend(contents.get(number).cloned());
            opened.push(number);
            files.push((file.header, file.blocks));
        }
        if let Some(error) = failed {
            return Err(to_py(py, &error));
        }
        if merged {
            reader = py.detach(|| merged_schema(&files)).py(py)?;
        }
        let schemas: Vec<&Schema> = match &reader {
            Some(reader) => vec![reader],
            None => files.iter().map(|(info, _)| &*info.schema).collect(),
        };
        let folders = folder_columns(folders.unwrap_or_default(), &opened);
        let folders = Arc::new(FolderColumns::new(folders, &schemas));
        let first = files.get(FileInfo::deciding(&files));
        let first = first.map(|(first, _)| (reader.as_ref().unwrap_or(&first.schema), &first.path));
        let (mut inferred, mut later) = (InferredColumns::default(), LaterColumns::default());
        let features = match features {
            Some(features) => lookups::in_form(py, lookups::lifted(features, lookups)?, first, &folders)?,
            None => {
                if let Some((schema, path)) = first {
                    let found = folders.infer(schema, columns.as_deref());
                    inferred = found.map_err(|e| e.at_path(path)).py(py)?;
                    if reader.is_none() {
                        later = py.detach(|| later_columns(&files, columns.as_deref())).py(py)?;
                    }
                }
                let source = AvroSource::resolved(&inferred.features, &files, reader.clone(), folders.clone());
                let source = source.py(py)?.with_stamps(stamps.clone());
                refined(py, &source.with_contents(opened_contents.clone()))?
            }
        };
        let source = AvroSource::resolved(&features, &files, reader.clone(), folders).py(py)?;
        let source = Arc::new(source.with_stamps(stamps).with_contents(opened_contents));
        let files = files.iter().map(|(info, blocks)| {
            let size = blocks.last().map_or(info.header.size, |last| last.offset + last.len());
            (info.path.clone(), size, info.header.sync)
        });
        let dataset = AvroDataset {
            files: files.collect(),
            source: source.clone(),
            features,
            inferred,
            later,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Name, kind, shape, dtype and nulls of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// For each column that was left out: why.
    fn left_out(&self) -> Vec<(String, String)> {
        self.inferred.left_out.clone()
    }

    /// Name of each column that the file which decides on the features lacks, with the first file that has it and how
    /// many have it; and whether the files' schemas can be merged.
    fn later_columns(&self) -> (Vec<LaterColumn<'_>>, bool) {
        let columns = self.later.columns.iter();
        let columns = columns.map(|(name, path, files)| (name.as_str(), text_path(path), *files));
        (columns.collect(), self.later.mergeable)
    }

    /// The symbols of enums that are read as codes.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        let columns = self.source.avro_columns().iter();
        columns
            .filter_map(|c| Some((c.feature.name.clone(), c.symbols.as_ref()?.to_vec())))
            .collect()
    }

    /// The columns that are read of the folders of files.
    fn folders(&self) -> Vec<&str> {
        self.source.folders_read()
    }

    /// Path, size in bytes and sync marker of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, [u8; 16])> {
        let files = self.files.iter();
        files
            .map(|(path, size, sync)| (text_path(path), *size, *sync))
            .collect()
    }

    /// A digest of where all blocks lie and of how many rows each has, in 16 bytes. SipHash has a specification, so it
    /// stays the same over versions.
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
                |range| Files::of(source.facts()).read(range, &BufferPool::default()),
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
        self.source.units()
    }
}

/// The schema that a user gives.
fn read_schema(json: &str, logical_types: bool) -> Result<Arc<Schema>, Error> {
    let parsed = Schema::parse(json);
    let parsed = parsed.map_err(|e| Error::new(e.kind(), format!("reader_schema: {}", e.reason())))?;
    Ok(Arc::new(if logical_types {
        parsed
    } else {
        parsed.without_logical_types()
    }))
}

/// What a folder says of its files.
#[derive(FromPyObject)]
enum FolderValue {
    Int(i64),
    Text(String),
}

/// The columns that folders stand for, of the files that were opened.
fn folder_columns(folders: Vec<(String, Vec<Option<FolderValue>>)>, opened: &[usize]) -> Vec<FolderColumn> {
    let scalar = |value: &FolderValue| match value {
        FolderValue::Int(value) => Scalar::Int(i128::from(*value)),
        FolderValue::Text(text) => Scalar::Bytes(text.clone().into_bytes()),
    };
    let of = |values: &[Option<FolderValue>], file: usize| values.get(file)?.as_ref().map(scalar);
    let column = |(name, values): (String, Vec<Option<FolderValue>>)| FolderColumn {
        name,
        values: opened.iter().map(|&file| of(&values, file)).collect(),
    };
    folders.into_iter().map(column).collect()
}

/// Features with the fixed shapes that a look at the data suggests.
fn refined(py: Python<'_>, source: &AvroSource) -> PyResult<Vec<Feature>> {
    let mut lengths = Lengths(LengthSample::new(source));
    let notes = py
        .detach(|| survey(source, None, &mut lengths, &mut signals()))
        .py(py)?;
    log(py, &notes)?;
    Ok(lengths.0.refine())
}

/// A survey of the lengths of arrays.
struct Lengths<'a>(LengthSample<'a>);

impl Survey for Lengths<'_> {
    fn is_open(&self) -> bool {
        self.0.is_open()
    }

    fn observe(&mut self, unit: &dyn Unit, records: u32) -> Result<(), Error> {
        self.0.observe(unit, records)
    }
}
