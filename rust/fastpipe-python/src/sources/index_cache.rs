//! Stores block indexes of files in a cache.

use std::ffi::{OsStr, OsString};
use std::path::{Path, PathBuf};
use std::sync::Arc;

use fastpipe_batch::path_text;
use fastpipe_datasets::{AvroFormat, TfRecordFormat};
use fastpipe_files::{CacheOutcome, Format, IndexCache, open};
use pyo3::prelude::*;

use crate::callbacks::log;
use crate::errors::IntoPy;

/// The blocks, rows and bytes of a file, the bytes of its index, and the outcome.
type Row = (usize, u64, u64, u64, &'static str);

/// Ensures that a directory contains the block index of an Avro file or, with `tfrecord`, of a TFRecord file.
/// `progress` is called every few milliseconds with the number of bytes processed so far.
#[pyfunction]
#[pyo3(signature = (path, index_cache, progress, tfrecord=false))]
pub(crate) fn index_file(
    py: Python<'_>,
    path: OsString,
    index_cache: PathBuf,
    progress: &Bound<'_, PyAny>,
    tfrecord: bool,
) -> PyResult<Row> {
    match tfrecord {
        false => index(py, &AvroFormat::new(true), &path, &index_cache, progress),
        true => index(py, &TfRecordFormat, &path, &index_cache, progress),
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
