//! Stores block indexes of files in a cache.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fastpipe_batch::path_text;
use fastpipe_datasets::{AvroFormat, ChecksummedAvro, TfRecordFormat};
use fastpipe_files::{CacheOutcome, Format, IndexCache, open};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::callbacks::log;
use crate::errors::IntoPy;

/// The blocks, rows and bytes of a file, the bytes of its index, and the outcome.
type Row = (usize, u64, u64, u64, &'static str);

/// Ensures that a directory contains the block index of a file. The format is `avro`, `avro with checksums` or
/// `tfrecord`. `progress` is called every few milliseconds with the number of bytes processed so far.
#[pyfunction]
#[pyo3(signature = (path, index_cache, progress, format="avro"))]
pub(crate) fn index_file(
    py: Python<'_>,
    path: OsString,
    index_cache: PathBuf,
    progress: &Bound<'_, PyAny>,
    format: &str,
) -> PyResult<Row> {
    match format {
        "avro" => index(py, &AvroFormat::new(true), &path, &index_cache, progress),
        "avro with checksums" => index(py, &ChecksummedAvro::default(), &path, &index_cache, progress),
        "tfrecord" => index(py, &TfRecordFormat, &path, &index_cache, progress),
        _ => Err(PyValueError::new_err(format!("format {format:?} has no block index"))),
    }
}

fn index<F: Format>(
    py: Python<'_>,
    format: &F,
    path: &OsStr,
    index_cache: &Path,
    progress: &Bound<'_, PyAny>,
) -> PyResult<Row> {
    let cache = IndexCache::open(index_cache).py(py)?;
    let (path, progress) = (Arc::from(path_text(path)), progress.clone().unbind());
    let opened = py.detach(|| {
        let mut tell = |behind: u64| {
            Python::attach(|py| {
                progress.call1(py, (behind,))?;
                py.check_signals()
            })
        };
        open(format, &path, Some(&cache), &mut tell)
    });
    let opened = opened.py(py)?;
    log(py, &opened.notes)?;
    let rows = opened
        .blocks
        .iter()
        .map(|block| u64::from(format.extent(block).rows))
        .sum();
    let kept = match opened.kept {
        CacheOutcome::Disabled => "nowhere",
        CacheOutcome::TooSmall => "small",
        CacheOutcome::Hit => "before",
        CacheOutcome::Stored => "now",
        CacheOutcome::TooRecent => "unsettled",
        CacheOutcome::FileChanged => "changed",
    };
    Ok((opened.blocks.len(), rows, opened.stamp.size, opened.entry, kept))
}
