//! Avro files as a dataset: opened, indexed, and compiled for a set of features.

use std::borrow::Cow;
use std::ffi::OsStr;
use std::sync::Arc;

use fastpipe_avro::{AvroSource, FolderColumn, LaterColumns};
use fastpipe_batch::{Feature, Scalar, Source, text_path};
use fastpipe_datasets::{AvroFiles, column_times, layout_digest};
use pyo3::exceptions::PyIndexError;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList};

use crate::callbacks::{log, signals};
use crate::errors::{IntoPy, to_py};
use crate::sources::data::Data;
use crate::sources::files::Files;
use crate::specs::features::{Described, describe};
use crate::specs::wanted::Wanted;

/// A column's name, the path of the first file that contains it, and the number of files that contain it.
type LaterColumn<'a> = (&'a str, Cow<'a, OsStr>, usize);

/// Avro files that are ready to be read. Their units are blocks.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct AvroDataset {
    source: Arc<AvroSource>,
    features: Vec<Feature>,
    left_out: Vec<(String, String)>,
    later: LaterColumns,
    files: Vec<(Arc<str>, u64, [u8; 16])>,
}

#[pymethods]
impl AvroDataset {
    /// Opens files.
    ///
    /// `check` is called with the path and the schema of the first file, and of each file with a different schema. Its
    /// exceptions are passed on. If `damaged` is a list, exceptions about damaged files are appended to it, and the
    /// blocks before the damage are read. If a file's header is damaged, none of its blocks are read.
    ///
    /// `resolution` contains the text of the schema to which files' schemas are resolved, whether that schema is merged
    /// from the schemas of all files, and whether logical types are read. `folders` contains the columns from folder
    /// names, with a value for each path.
    #[new]
    #[pyo3(signature = (
        files, wanted, *, check=None, damaged=None, resolution=(None, false, true), folders=Vec::new()
    ))]
    fn new(
        py: Python<'_>,
        files: Files,
        wanted: Wanted,
        check: Option<&Bound<'_, PyAny>>,
        damaged: Option<&Bound<'_, PyList>>,
        resolution: (Option<&str>, bool, bool),
        folders: Vec<(String, Vec<Option<FolderValue>>)>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let (reader_schema, merged, logical_types) = resolution;
        let how = files.opening(damaged.is_some());
        let open = || AvroFiles::open(&files.paths, how, reader_schema, logical_types, &mut signals());
        let (mut files, report) = py.detach(open).py(py)?;
        if let Some(damaged) = damaged {
            for damage in &report.damage {
                damaged.append(to_py(py, damage).value(py))?;
            }
        }
        log(py, &report.notes)?;
        if let Some(check) = check {
            for (path, schema) in &report.schemas {
                check.call1((text_path(path), &**schema))?;
            }
        }
        if let Some(error) = report.failed {
            return Err(error).py(py);
        }
        if merged {
            py.detach(|| files.merge()).py(py)?;
        }
        files.add_folders(folders.into_iter().map(folder_column).collect());
        let (mut left_out, mut later) = (Vec::new(), LaterColumns::default());
        let features = match wanted {
            Wanted::Features(features) => files.with_forms(features).py(py)?,
            Wanted::Columns(columns) => {
                let inferred = py.detach(|| files.infer(columns.as_deref(), &mut signals())).py(py)?;
                log(py, &inferred.notes)?;
                (left_out, later) = (inferred.left_out, inferred.later);
                inferred.features
            }
        };
        let source = Arc::new(files.source(&features).py(py)?);
        let files = files.files().iter().map(|(info, blocks)| {
            let size = blocks.last().map_or(info.header.size, |last| last.offset + last.len());
            (info.path.clone(), size, info.header.sync)
        });
        let dataset = AvroDataset {
            files: files.collect(),
            source: source.clone(),
            features,
            left_out,
            later,
        };
        Ok(PyClassInitializer::from(Data::new(source)).add_subclass(dataset))
    }

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Returns the columns that were left out, each with the reason.
    fn left_out(&self) -> Vec<(String, String)> {
        self.left_out.clone()
    }

    /// Returns the columns that are missing in the file that determines the features. Each comes with the first file
    /// that contains it, and the number of such files. Also returns whether the files' schemas can be merged.
    fn later_columns(&self) -> (Vec<LaterColumn<'_>>, bool) {
        let columns = self.later.columns.iter();
        let columns = columns.map(|(name, path, files)| (name.as_str(), text_path(path), *files));
        (columns.collect(), self.later.mergeable)
    }

    /// Returns the symbols of enums that are read as codes.
    fn categories(&self) -> Vec<(String, Vec<String>)> {
        let columns = self.source.avro_columns().iter();
        columns
            .filter_map(|c| Some((c.feature.name.clone(), c.symbols.as_ref()?.to_vec())))
            .collect()
    }

    /// Returns the names of the columns that are read from folder names.
    fn folders(&self) -> Vec<&str> {
        self.source.folders_read()
    }

    /// Returns the same blocks as a dataset that reads only some of the columns, given by their indices.
    fn with_columns(&self, py: Python<'_>, columns: Vec<usize>) -> PyResult<Data> {
        let source = py.detach(|| self.source.with_columns(&columns)).py(py)?;
        Ok(Data::new(Arc::new(source)))
    }

    /// Returns the path, size in bytes and sync marker of each file.
    fn files(&self) -> Vec<(Cow<'_, OsStr>, u64, [u8; 16])> {
        let files = self.files.iter();
        files
            .map(|(path, size, sync)| (text_path(path), *size, *sync))
            .collect()
    }

    /// Returns a 16-byte digest of the positions of all blocks and their numbers of rows.
    fn layout<'py>(&self, py: Python<'py>) -> Bound<'py, PyBytes> {
        PyBytes::new(py, &py.detach(|| layout_digest(self.source.blocks())))
    }

    /// Returns whether each block is checked against a checksum in an index.
    fn has_checksums(&self) -> bool {
        self.source.has_checksums()
    }

    /// Returns the number of blocks of each file.
    fn units_by_file(&self) -> Vec<u64> {
        self.source.blocks().units_by_file()
    }

    /// Returns the time to decode a record in nanoseconds: with all features, and for each feature, the time without
    /// it.
    fn column_times(&self, py: Python<'_>) -> PyResult<(f64, Vec<(String, f64)>)> {
        let times = py.detach(|| column_times(&self.source)).py(py)?;
        let Some(times) = times else {
            return Ok((0.0, Vec::new()));
        };
        let names = self.source.avro_columns().iter().map(|c| c.feature.name.clone());
        Ok((times.all, names.zip(times.without).collect()))
    }

    /// Returns the file of a block, and the index of the block in the file.
    fn place_of(&self, unit: u64) -> PyResult<(Cow<'_, OsStr>, u64)> {
        if unit >= self.source.units() {
            return Err(PyIndexError::new_err(format!("block {unit} does not exist")));
        }
        let (path, block) = self.source.blocks().unit_in_file(unit);
        Ok((text_path(path), block))
    }
}

/// A value that a folder name gives to the files in the folder.
#[derive(FromPyObject)]
enum FolderValue {
    Int(i64),
    Text(String),
}

/// A column from folder names, with a value for each path.
fn folder_column((name, values): (String, Vec<Option<FolderValue>>)) -> FolderColumn {
    let scalar = |value| match value {
        FolderValue::Int(value) => Scalar::Int(value.into()),
        FolderValue::Text(text) => Scalar::Bytes(text.into_bytes()),
    };
    let values = values.into_iter().map(|value| value.map(scalar)).collect();
    FolderColumn { name, values }
}
