//! How a pass runs and what its batches are stored in, as Python has it.

use fastpipe_engine::Options;
use pyo3::prelude::*;

use crate::passes::pass_memory::PassMemory;
use crate::passes::reader_totals::ReaderTotals;

/// Python's `PassOptions`, whose attributes are read here only.
pub(crate) struct PassOptions {
    pub(crate) engine: Options,
    /// What batches are stored in, instead of the dataset's own memory.
    pub(crate) memory: Option<Py<PassMemory>>,
    /// Whether sparse columns are in the CSR layout.
    pub(crate) csr: bool,
    /// Whether another program has chosen the order: then the memory limit, by default half of the machine's memory,
    /// holds for a single batch too.
    pub(crate) bounded: bool,
    /// Where batches and work are counted.
    pub(crate) totals: Option<Py<ReaderTotals>>,
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
        })
    }
}
