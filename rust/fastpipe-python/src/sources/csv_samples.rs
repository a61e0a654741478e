//! Samples of CSV files without a scan: rows at random byte offsets, and rows of a stream.

use std::ffi::OsString;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Result, path_text};
use fastpipe_datasets::{DrawnLines, UnscannedCsv};
use fastpipe_files::Halt;
use numpy::PyArray1;
use pyo3::exceptions::{PyKeyboardInterrupt, PyValueError};
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::arrays::batch_arrays::array;
use crate::callbacks::{log, signals};
use crate::errors::IntoPy;
use crate::sources::csv::{CsvDataset, LoweredDialect, dialect};
use crate::sources::files::Files;
use crate::specs::wanted::Features;

/// The result of an estimate: the drawn rows as a dataset, the file and byte offset of each row, and the estimated
/// number of rows with its 95 % confidence interval.
type Estimated<'py> = (
    Py<CsvDataset>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    (f64, f64, f64),
);

/// Draws rows at random byte offsets.
#[pyfunction]
#[pyo3(signature = (files, dialect, rows, seed, *, replace, num_threads))]
pub(crate) fn estimate_csv<'py>(
    py: Python<'py>,
    files: Files,
    dialect: LoweredDialect,
    rows: u64,
    seed: u64,
    replace: bool,
    num_threads: Option<usize>,
) -> PyResult<Estimated<'py>> {
    let dialect = self::dialect(dialect)?;
    let mut how = files.opening(false);
    how.threads = num_threads.unwrap_or(how.threads);
    let drawn = py.detach(|| {
        let (files, notes) = UnscannedCsv::open(dialect, &files.paths, how, &mut signals())?;
        Ok::<_, Halt<PyErr>>((files.sample(rows, replace, seed, &mut signals())?, notes))
    });
    let (drawn, notes) = drawn.py(py)?;
    let drawn = drawn.map_err(PyValueError::new_err)?;
    log(py, &notes)?;
    let (files, offsets) = (array(py, drawn.files)?, array(py, drawn.offsets)?);
    Ok((CsvDataset::picked(py, drawn.rows)?, files, offsets, drawn.estimate))
}

/// Rows that were drawn: a dataset, and the file, the byte offset, the cell and the place of each row.
type Lines<'py> = (
    Py<CsvDataset>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
    Bound<'py, PyArray1<i64>>,
);

/// Draws rows of cells of files, again and again.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct CsvLineBuffer {
    buffer: Mutex<fastpipe_datasets::CsvLineBuffer>,
    /// Whether the current call of `next` should end.
    stopped: AtomicBool,
}

impl CsvLineBuffer {
    fn with<T>(&self, part: impl FnOnce(&mut fastpipe_datasets::CsvLineBuffer) -> T) -> T {
        part(&mut self.buffer.lock().unwrap_or_else(PoisonError::into_inner))
    }
}

#[pymethods]
impl CsvLineBuffer {
    #[new]
    #[pyo3(signature = (files, dialect, share, seed, circle, *, num_threads))]
    fn new(
        py: Python<'_>,
        files: Files,
        dialect: LoweredDialect,
        share: f64,
        seed: u64,
        circle: u64,
        num_threads: Option<usize>,
    ) -> PyResult<Self> {
        let dialect = self::dialect(dialect)?;
        let mut how = files.opening(false);
        how.threads = num_threads.unwrap_or(how.threads);
        let opened = py.detach(|| {
            let (files, notes) = UnscannedCsv::open(dialect, &files.paths, how, &mut signals())?;
            Ok::<_, Halt<PyErr>>((
                fastpipe_datasets::CsvLineBuffer::new(files, share, seed, circle)?,
                notes,
            ))
        });
        let (buffer, notes) = opened.py(py)?;
        log(py, &notes)?;
        Ok(CsvLineBuffer {
            buffer: Mutex::new(buffer),
            stopped: AtomicBool::new(false),
        })
    }

    /// Ends a call of `next` in another thread, which raises KeyboardInterrupt.
    fn stop(&self) {
        self.stopped.store(true, Ordering::Relaxed);
    }

    /// Begins another circle with a share of the rows of each cell.
    fn restart(&self, py: Python<'_>, circle: u64, share: f64) {
        py.detach(|| self.with(|buffer| buffer.restart(circle, share)));
    }

    /// Returns the mean number of rows in a few random cells.
    fn rows_per_cell(&self, py: Python<'_>, bytes: u64) -> PyResult<f64> {
        py.detach(|| self.with(|buffer| buffer.rows_per_cell(bytes, &mut signals())))
            .py(py)
    }

    /// Returns an upper bound on the number of rows in all files.
    fn most_rows(&self, py: Python<'_>) -> u64 {
        py.detach(|| self.with(|buffer| buffer.most_rows()))
    }

    /// Draws the next rows: `rows` of them, or as many as fit into about `bytes` of memory.
    fn next<'py>(&self, py: Python<'py>, rows: u64, bytes: u64) -> PyResult<Lines<'py>> {
        self.stopped.store(false, Ordering::Relaxed);
        let mut signals = signals();
        let mut look = |behind| match self.stopped.load(Ordering::Relaxed) {
            true => Err(PyKeyboardInterrupt::new_err(())),
            false => signals(behind),
        };
        let drawn = py.detach(|| self.with(|buffer| buffer.next(rows, bytes, &mut look)));
        let DrawnLines {
            rows,
            files,
            offsets,
            cells,
            places,
        } = drawn.py(py)?;
        Ok((
            CsvDataset::picked(py, rows)?,
            array(py, files)?,
            array(py, offsets)?,
            array(py, cells)?,
            array(py, places)?,
        ))
    }

    /// Returns the estimated number of rows with its 95 % confidence interval.
    fn estimate(&self, py: Python<'_>) -> (f64, f64, f64) {
        py.detach(|| self.with(|buffer| buffer.estimate()))
    }
}

/// Draws rows from a stream whose bytes are pushed.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct CsvReservoir(Mutex<Option<fastpipe_datasets::CsvReservoir>>);

impl CsvReservoir {
    /// Runs a function on the reservoir. If the function fails, the reservoir is dropped.
    fn with<T: Send>(
        &self,
        py: Python<'_>,
        part: impl FnOnce(&mut fastpipe_datasets::CsvReservoir) -> Result<T> + Send,
    ) -> PyResult<T> {
        let done = py.detach(|| {
            let mut locked = self.0.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mut reservoir) = locked.take() else {
                return Err(Error::new(ErrorKind::Closed, "the stream has ended"));
            };
            let result = part(&mut reservoir)?;
            *locked = Some(reservoir);
            Ok(result)
        });
        done.py(py)
    }
}

#[pymethods]
impl CsvReservoir {
    /// `features` are the features to read later. It is empty if they are to be inferred.
    #[new]
    fn new(
        name: OsString,
        dialect: LoweredDialect,
        features: Features,
        rows: u64,
        seed: u64,
        memory_limit: Option<u64>,
    ) -> PyResult<Self> {
        let (name, dialect) = (path_text(&name).into(), self::dialect(dialect)?);
        let reservoir = fastpipe_datasets::CsvReservoir::new(name, dialect, features.0, rows, seed, memory_limit);
        Ok(CsvReservoir(Mutex::new(Some(reservoir))))
    }

    /// Processes more bytes of the stream.
    fn push(&self, py: Python<'_>, bytes: PyBackedBytes) -> PyResult<()> {
        self.with(py, |reservoir| reservoir.push(&bytes))
    }

    /// Ends the stream. Returns its number of rows, and the number of ragged rows that were skipped.
    fn end(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        self.with(py, |reservoir| reservoir.end())
    }

    /// Returns the sampled rows as a dataset, and their row indices. This can be called only once.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<(Py<CsvDataset>, Bound<'py, PyArray1<i64>>)> {
        let (files, numbers) = self.with(py, |reservoir| reservoir.take())?;
        Ok((CsvDataset::picked(py, files)?, array(py, numbers)?))
    }
}
