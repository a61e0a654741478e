//! Options of a pass that Python sets: how it runs, and where its batches are stored.

use fastpipe_engine::Options;
use pyo3::prelude::*;

use crate::passes::pass_memory::PassMemory;
use crate::passes::reader_totals::ReaderTotals;

/// Options from Python's `PassOptions`. Its attributes are read only here.
pub(crate) struct PassOptions {
    pub(crate) engine: Options,
    /// Memory that batches are stored in, instead of the dataset's own memory.
    pub(crate) memory: Option<Py<PassMemory>>,
    /// Whether sparse columns are in the CSR layout.
    pub(crate) csr: bool,
    /// Whether another program has chosen the order. In that case the memory limit, by default half of the machine's
    /// memory, also applies to a single batch.
    pub(crate) bounded: bool,
    /// Totals to which the pass adds its batches and work.
    pub(crate) totals: Option<Py<ReaderTotals>>,
    /// The `LostUnits` of Python to which the pass adds damaged units. None if damage ends the pass.
    pub(crate) lost: Option<Py<PyAny>>,
}

impl<'py> FromPyObject<'_, 'py> for PassOptions {
    type Error = PyErr;

    fn extract(options: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let engine = Options {
            num_threads: options.getattr("num_threads")?.extract()?,
            sharers: options.getattr("sharers")?.extract()?,
            prefetch: options.getattr("prefetch")?.extract()?,
            memory_limit: options.getattr("memory_limit")?.extract()?,
            end_epoch: None,
            limit: None,
        };
        Ok(PassOptions {
            engine,
            memory: options.getattr("memory")?.extract()?,
            csr: options.getattr("csr")?.extract()?,
            bounded: options.getattr("bounded")?.extract()?,
            totals: options.getattr("totals")?.extract()?,
            lost: options.getattr("lost")?.extract()?,
        })
    }
}
