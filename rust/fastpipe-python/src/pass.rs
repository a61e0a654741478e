//! A pass as a Python iterator.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use fastpipe_avro::AvroSource;
use fastpipe_batch::Source;
use fastpipe_engine::{Poll, Stream};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::to_dict;
use crate::errors::IntoPy;

/// How long a wait for a batch may keep Ctrl-C waiting.
const PATIENCE: Duration = Duration::from_millis(20);

/// How far a pass has come. Outlives it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Position {
    first_epoch: u64,
    batches: u64,
    delivered: Arc<AtomicU64>,
}

#[pymethods]
impl Position {
    /// The epoch of the next batch; behind the last, the epoch that a next pass would read.
    #[getter]
    fn epoch(&self) -> u64 {
        let delivered = self.delivered.load(Ordering::Relaxed);
        self.first_epoch + delivered.checked_div(self.batches).unwrap_or(0)
    }

    /// Batches that the consumer has got.
    #[getter]
    fn delivered(&self) -> u64 {
        self.delivered.load(Ordering::Relaxed)
    }
}

/// A pass over a data set: an iterator of batches. Its threads end with it.
#[pyclass(frozen, weakref, module = "fastpipe._fastpipe")]
pub(crate) struct Pass {
    /// Dropped with the GIL released where it waits for threads.
    stream: Option<Stream>,
    source: Arc<AvroSource>,
    first_epoch: u64,
    batches: u64,
    delivered: Arc<AtomicU64>,
}

impl Pass {
    pub(crate) fn new(stream: Stream, source: Arc<AvroSource>, first_epoch: u64, batches: u64) -> Self {
        Pass {
            stream: Some(stream),
            source,
            first_epoch,
            batches,
            delivered: Arc::default(),
        }
    }
}

#[pymethods]
impl Pass {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(stream) = &self.stream else { return Ok(None) };
        loop {
            match py.detach(|| stream.poll(PATIENCE)).py(py)? {
                Poll::Ready(batch) => {
                    let dict = to_dict(py, self.source.columns(), *batch)?;
                    self.delivered.fetch_add(1, Ordering::Relaxed);
                    return Ok(Some(dict));
                }
                Poll::End => return Ok(None),
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// Ends the pass and waits for its threads.
    fn close(&self, py: Python<'_>) {
        if let Some(stream) = &self.stream {
            py.detach(|| stream.close());
        }
    }

    /// Batches of the whole pass.
    #[getter]
    fn total(&self) -> u64 {
        self.stream.as_ref().map_or(0, Stream::total)
    }

    #[getter]
    fn position(&self) -> Position {
        Position {
            first_epoch: self.first_epoch,
            batches: self.batches,
            delivered: self.delivered.clone(),
        }
    }
}

impl Drop for Pass {
    fn drop(&mut self) {
        if let Some(stream) = self.stream.take() {
            // Threads of ours never need the GIL, but others may while this one waits. At the interpreter's end there is
            // none to release.
            let mut stream = Some(stream);
            if Python::try_attach(|py| py.detach(|| drop(stream.take()))).is_none() {
                drop(stream);
            }
        }
    }
}
