//! A reader's totals over its passes, for Python.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_batch::Work;
use fastpipe_engine::Activity;
use pyo3::prelude::*;
use pyo3::types::PyDict;

/// Names of activities that all sources share.
const WORK: Work = Work {
    open: "opening",
    place: "decoding",
};

/// The totals over a reader's passes in this process, and the reader's rank.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ReaderTotals {
    /// The totals to which passes add.
    pub(crate) counted: Arc<fastpipe_engine::ReaderTotals>,
    rank: AtomicU64,
}

fn seconds(nanos: u64) -> f64 {
    nanos as f64 * 1e-9
}

#[pymethods]
impl ReaderTotals {
    #[new]
    fn new(rank: u64) -> Self {
        ReaderTotals {
            counted: Arc::default(),
            rank: AtomicU64::new(rank),
        }
    }

    #[getter]
    fn rank(&self) -> u64 {
        self.rank.load(Ordering::Relaxed)
    }

    #[setter]
    fn set_rank(&self, rank: u64) {
        self.rank.store(rank, Ordering::Relaxed);
    }

    /// Returns the upper bound of each bucket of `waits` except the last, in seconds. A bucket does not include its
    /// bound.
    #[staticmethod]
    fn wait_bounds() -> Vec<f64> {
        fastpipe_engine::ReaderTotals::wait_bounds().map(seconds).collect()
    }

    /// Returns the current totals.
    fn read<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        // The lock of the totals must be taken with the GIL.
        let totals = self.counted.totals();
        let work = PyDict::new(py);
        for (activity, nanos) in Activity::ALL.into_iter().zip(totals.work) {
            work.set_item(activity.name(WORK), seconds(nanos))?;
        }
        let dict = PyDict::new(py);
        dict.set_item("batches", totals.batches)?;
        dict.set_item("rows", totals.rows)?;
        dict.set_item("bytes", totals.bytes)?;
        dict.set_item("epoch", totals.epoch)?;
        dict.set_item("rows_left_out", totals.left_out)?;
        dict.set_item("read_bytes", totals.bytes_read)?;
        dict.set_item("fetch_seconds", seconds(totals.fetching))?;
        dict.set_item("work_seconds", work)?;
        dict.set_item("wait_seconds", seconds(totals.waited))?;
        dict.set_item("waits", totals.waits)?;
        Ok(dict)
    }
}
