//! A pass as a Python iterator.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastpipe_batch::Source;
use fastpipe_engine::{Poll, Stream, Watch};
use fastpipe_order::State;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::to_dict;
use crate::errors::IntoPy;
use crate::order::Progress;
use crate::stats;

/// How long a wait for a batch may keep Ctrl-C waiting.
const PATIENCE: Duration = Duration::from_millis(20);

/// How far a pass has come. Outlives it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Position {
    /// Only locked for a moment, and with the GIL: no other thread can hold it when a process forks.
    seen: Mutex<Seen>,
    watch: Watch,
}

/// What the consumer has got.
struct Seen {
    batches: u64,
    /// The number of the last batch, counted from 1, and what is left behind it.
    last: u64,
    state: State,
    /// Whether the consumer has seen that there is no more.
    ended: bool,
}

impl Position {
    fn seen(&self) -> MutexGuard<'_, Seen> {
        self.seen.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn deliver(&self, number: u64, after: State) {
        let mut seen = self.seen();
        seen.batches += 1;
        // Several threads may draw, and one overtake another between the two steps.
        if number >= seen.last {
            (seen.last, seen.state) = (number + 1, after);
        }
    }
}

#[pymethods]
impl Position {
    /// The epoch of the next batch; behind the last, the epoch that a next pass would read.
    #[getter]
    fn epoch(&self) -> u64 {
        self.seen().state.epoch
    }

    /// Batches that the consumer has got.
    #[getter]
    fn delivered(&self) -> u64 {
        self.seen().batches
    }

    /// Whether the consumer has seen the end.
    #[getter]
    fn ended(&self) -> bool {
        self.seen().ended
    }

    /// What the pass has done, and where its time went; None in a process that was forked from the pass's.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let stats = py.detach(|| self.watch.stats());
        stats.map(|stats| stats::to_dict(py, &stats)).transpose()
    }

    /// Every task that was done, if they were recorded: what, for which batch, by which thread, and when it started, when it
    /// ended, and how long it was expected to take, in nanoseconds.
    fn tasks(&self) -> Vec<(&'static str, u64, u32, u64, u64, u64)> {
        let spans = self.watch.spans().into_iter();
        spans
            .map(|s| (s.activity.name(), s.batch, s.thread, s.start, s.end, s.expected))
            .collect()
    }

    /// What is left behind the last batch that the consumer has got.
    fn progress(&self) -> Progress {
        Progress::from(&self.seen().state)
    }
}

/// A pass over a data set: an iterator of batches. Its threads end with it.
#[pyclass(frozen, weakref, module = "fastpipe._fastpipe")]
pub(crate) struct Pass {
    /// Dropped with the GIL released where it waits for threads.
    stream: Option<Stream>,
    source: Arc<dyn Source>,
    /// Whether batches say which of their rows are valid.
    padded: bool,
    total: Option<u64>,
    end_epoch: Option<u64>,
    position: Py<Position>,
}

impl Pass {
    /// Makes an iterator of a pass that starts with `state` and has `total` batches.
    pub(crate) fn new(
        py: Python<'_>,
        stream: Stream,
        source: Arc<dyn Source>,
        padded: bool,
        total: Option<u64>,
        end_epoch: Option<u64>,
        state: State,
    ) -> PyResult<Self> {
        let seen = Mutex::new(Seen {
            batches: 0,
            last: 0,
            state,
            ended: false,
        });
        let watch = stream.watch();
        Ok(Pass {
            stream: Some(stream),
            source,
            padded,
            total,
            end_epoch,
            position: Py::new(py, Position { seen, watch })?,
        })
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
                Poll::Ready(number, mut batch) => {
                    let after = std::mem::take(&mut batch.about.after);
                    let dict = to_dict(py, self.source.columns(), *batch, self.padded)?;
                    self.position.get().deliver(number, after);
                    return Ok(Some(dict));
                }
                Poll::End => {
                    let mut seen = self.position.get().seen();
                    // Others may still have batches of this epoch; for this rank it is over.
                    seen.state = State::start(self.end_epoch.unwrap_or(0).max(seen.state.epoch), seen.state.ranks);
                    seen.ended = true;
                    return Ok(None);
                }
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

    /// Batches of the whole pass; None if it has no end.
    #[getter]
    fn total(&self) -> Option<u64> {
        self.total
    }

    #[getter]
    fn position(&self, py: Python<'_>) -> Py<Position> {
        self.position.clone_ref(py)
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
