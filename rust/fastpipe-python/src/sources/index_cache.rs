//! Stores block indexes of files in a cache.

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_datasets::{AvroFormat, ChecksummedAvro, TfRecordFormat};
use fastpipe_files::{CacheOutcome, Format, Halt, open_all};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::callbacks::log;
use crate::errors::IntoPy;
use crate::sources::files::Files;

/// The blocks, rows and bytes of a file, the bytes of its index, and the outcome.
type Row = (usize, u64, u64, u64, &'static str);

/// Ensures that a directory contains the block index of a file. The format is `avro`, `avro with checksums` or
/// `tfrecord`. `files` has one file. `progress` is called every few milliseconds with the number of bytes processed so
/// far, or with 0 while a remote file is read.
#[pyfunction]
#[pyo3(signature = (files, progress, format="avro"))]
pub(crate) fn index_file(py: Python<'_>, files: Files, progress: &Bound<'_, PyAny>, format: &str) -> PyResult<Row> {
    match format {
        "avro" => index(py, &AvroFormat::new(true), &files, progress),
        "avro with checksums" => index(py, &ChecksummedAvro::default(), &files, progress),
        "tfrecord" => index(py, &TfRecordFormat, &files, progress),
        _ => Err(PyValueError::new_err(format!("format {format:?} has no block index"))),
    }
}

fn index<F: Format>(py: Python<'_>, format: &F, files: &Files, progress: &Bound<'_, PyAny>) -> PyResult<Row> {
    let progress = progress.clone().unbind();
    let opened = py.detach(|| {
        let mut tell = |behind: u64| {
            Python::attach(|py| {
                progress.call1(py, (behind,))?;
                py.check_signals()
            })
        };
        let (mut found, failed) = open_all(format, &files.paths, files.opening(false), &mut tell)?;
        match (failed, found.pop().and_then(|found| found.opened)) {
            (None, Some(opened)) => Ok(opened),
            (Some(error), _) => Err(Halt::from(error)),
            (None, None) => Err(Error::new(ErrorKind::Internal, "no file was indexed").into()),
        }
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
