//! A pass as a Python iterator.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::time::{Duration, Instant};

use fastpipe_batch::{ColumnSpec, Error};
use fastpipe_engine::{
    Batch, BatchSource, Delivered, ObservePass, Origin, PassSource, Poll, RunningPass, Seen, Yielded,
};
use fastpipe_order::State;
use fastpipe_wire::nbytes;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::batch_arrays::to_dict;
use crate::errors::{guarded, lost, raised_of, to_py};
use crate::passes::progress::Progress;
use crate::passes::stats;
use crate::service::local_request::LocalRequest;

/// Bytes of batches that a local server sends together, and the seconds for which the first of them may wait.
const LENT_TOGETHER: usize = 1 << 20;
const PATIENCE: f64 = 0.002;

/// How far a pass has come. Outlives it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Position {
    seen: Arc<Seen>,
    look: Box<dyn ObservePass>,
    running: Weak<RunningPass>,
}

impl Position {
    fn seen(&self) -> MutexGuard<'_, Delivered> {
        self.seen.lock()
    }
}

#[pymethods]
impl Position {
    /// The epoch of the last batch that the consumer has got, or of the first one before that. After the consumer has
    /// seen the end, the epoch that a next pass would read.
    #[getter]
    fn epoch(&self) -> u64 {
        self.seen().epoch
    }

    /// Batches that the consumer has got.
    #[getter]
    fn delivered(&self) -> u64 {
        self.seen().batches
    }

    /// Whether there still is the pass.
    #[getter]
    fn active(&self) -> bool {
        self.running.strong_count() > 0
    }

    /// Ends the pass, if there still is one, and waits for its threads. `by` is what `next` says of it from then on.
    #[pyo3(signature = (by=None))]
    fn close(&self, py: Python<'_>, by: Option<String>) {
        if let Some(running) = self.running.upgrade() {
            // It may be the last to drop it by now, and waits either way.
            py.detach(|| {
                running.close(by);
                drop(running);
            });
        }
    }

    /// Whether the consumer has seen the end.
    #[getter]
    fn ended(&self) -> bool {
        self.seen().ended
    }

    /// What the pass has done, and where its time went; None in a process that was forked from the pass's.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let stats = py.detach(|| self.look.stats());
        stats.map(|stats| stats::to_dict(py, &stats)).transpose()
    }

    /// What is left behind the last batch that the consumer has got.
    fn progress(&self) -> Progress {
        Progress::from(&self.seen().state)
    }
}

/// A pass over a data set: an iterator of batches. Its threads end with it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Pass {
    /// Dropped with the GIL released, since it waits for threads.
    running: Option<Arc<RunningPass>>,
    /// Whether batches say which of their rows are valid.
    padded: bool,
    total: Option<u64>,
    position: Py<Position>,
    /// What a user's code raised and ended the pass with. It is here, where Python's garbage collector sees it: its
    /// traceback may have frames that have the pass.
    raised: Mutex<Option<Py<PyAny>>>,
}

impl Pass {
    /// Makes an iterator of a pass that starts with `state` and has `total` batches.
    pub(crate) fn new(
        py: Python<'_>,
        batches: Box<dyn BatchSource>,
        begun: PassSource,
        padded: bool,
        total: Option<u64>,
        origin: Origin,
        state: State,
    ) -> PyResult<Self> {
        let running = RunningPass::new(batches, begun, origin, state);
        let position = Position {
            seen: running.seen().clone(),
            look: running.observe(),
            running: Arc::downgrade(&running),
        };
        Ok(Pass {
            running: Some(running),
            padded,
            total,
            position: Py::new(py, position)?,
            raised: Mutex::new(None),
        })
    }

    /// The exception for what ended the pass.
    fn failed(&self, py: Python<'_>, running: &RunningPass, error: &Error) -> PyErr {
        py.detach(|| running.release());
        let Some(raised) = raised_of(error) else {
            return to_py(py, error);
        };
        let mut kept = self.raised.lock().unwrap_or_else(PoisonError::into_inner);
        if kept.is_none() {
            *kept = raised.take();
        }
        let exception = kept.as_ref().map(|exception| exception.clone_ref(py));
        drop(kept);
        exception.map_or_else(
            || to_py(py, error),
            |exception| raised.again(py, exception.bind(py), error),
        )
    }

    /// The next batch, as what `make` makes of it; None if there is none.
    pub(crate) fn draw<T>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        self.drawn(py, |batch| std::mem::take(&mut batch.info.after), make)
    }

    /// The next batch with what is left behind it, for whoever hands it over elsewhere.
    pub(crate) fn draw_whole<T>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        self.drawn(py, |batch| batch.info.after.clone(), make)
    }

    fn drawn<T>(
        &self,
        py: Python<'_>,
        after: impl FnOnce(&mut Batch) -> State,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let Some(running) = &self.running else { return Ok(None) };
        let asked = Instant::now();
        loop {
            let polled = py.detach(|| running.poll());
            match polled.map_err(|error| self.failed(py, running, &error))? {
                Poll::Ready(number, mut batch) => {
                    let (yielded, after) = (Yielded::new(number, &batch, asked), after(&mut batch));
                    let made = guarded(py, || make(running.columns(), *batch));
                    // The batch is lost, so those behind it aren't handed out.
                    let made = made.inspect_err(|error| {
                        let error = lost(py, error);
                        py.detach(|| running.fail(error));
                    })?;
                    running.delivered(yielded, after);
                    return Ok(Some(made));
                }
                Poll::End => {
                    running.ended();
                    py.detach(|| running.release());
                    return Ok(None);
                }
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// The next batches, the first of which is awaited: as many as have `most` bytes together, and are there within
    /// `patience` seconds. None if there are no more. What fails is told with the next ones.
    fn draw_several(&self, py: Python<'_>, most: usize, patience: f64) -> PyResult<Option<Vec<Batch>>> {
        let Some(running) = &self.running else { return Ok(None) };
        let patience = Duration::try_from_secs_f64(patience).unwrap_or_default();
        let Some(first) = self.draw_whole(py, |_, batch| Ok(batch))? else {
            return Ok(None);
        };
        Ok(Some(py.detach(|| more(running, first, most, patience))))
    }

    /// The columns of its batches.
    pub(crate) fn columns(&self) -> &[ColumnSpec] {
        self.running.as_ref().map_or(&[], |running| running.columns())
    }

    /// Whether batches say which of their rows are valid.
    pub(crate) fn is_padded(&self) -> bool {
        self.padded
    }

    /// The pass itself, for whoever draws from it without Python.
    pub(crate) fn running(&self) -> Option<Arc<RunningPass>> {
        self.running.clone()
    }

    /// Its batches; `None` if it has no end.
    pub(crate) fn batches(&self) -> Option<u64> {
        self.total
    }
}

/// A batch and those after it: as many as have `most` bytes together, and are there within `patience`. What fails is
/// told with the next ones.
pub(crate) fn more(running: &RunningPass, first: Batch, most: usize, patience: Duration) -> Vec<Batch> {
    let until = Instant::now() + patience;
    let mut held = nbytes(&first);
    let mut batches = vec![first];
    // A large one is sent as it lies.
    while held <= most / 2 {
        let asked = Instant::now();
        match running.poll_for(until.saturating_duration_since(asked)) {
            Ok(Poll::Ready(number, batch)) => {
                running.delivered(Yielded::new(number, &batch, asked), batch.info.after.clone());
                held += nbytes(&batch);
                batches.push(*batch);
            }
            _ => return batches,
        }
    }
    batches
}

#[pymethods]
impl Pass {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.draw(py, |columns, batch| to_dict(py, columns, batch, self.padded))
    }

    /// Sends batches over a request of a local server, until the last one was sent or the program needs no more.
    fn lend(&self, py: Python<'_>, request: &LocalRequest) -> PyResult<()> {
        // The program needs the first batch at once.
        let mut patience = 0.0;
        while let Some(batches) = self.draw_several(py, LENT_TOGETHER, patience)? {
            if !request.send(py, batches)? {
                return Ok(());
            }
            patience = PATIENCE;
        }
        request.end(py);
        Ok(())
    }

    fn __traverse__(&self, visit: PyVisit<'_>) -> Result<(), PyTraverseError> {
        match self.raised.try_lock() {
            Ok(raised) => raised.as_ref().map_or(Ok(()), |raised| visit.call(raised)),
            Err(_) => Ok(()),
        }
    }

    fn __clear__(&self) {
        let raised = self.raised.lock().unwrap_or_else(PoisonError::into_inner).take();
        drop(raised);
    }

    fn __repr__(&self) -> String {
        let seen = self.position.get().seen();
        let total = self.total.map_or_else(String::new, |total| format!(" of {total}"));
        let closed = self.running.as_ref().is_some_and(|running| running.is_closed());
        let end = match (seen.ended, closed) {
            (true, _) => ", ended",
            (false, true) => ", closed",
            (false, false) => "",
        };
        let (batches, epoch) = (seen.batches, seen.epoch);
        format!("<fastpipe pass: {batches}{total} batches yielded, epoch {epoch}{end}>")
    }

    /// Ends the pass and waits for its threads.
    pub(crate) fn close(&self, py: Python<'_>) {
        if let Some(running) = &self.running {
            py.detach(|| running.close(None));
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
        if let Some(running) = self.running.take() {
            // Threads of ours never need the GIL, but others may while this one waits. At the interpreter's end there
            // is none to release.
            let mut running = Some(running);
            if Python::try_attach(|py| py.detach(|| drop(running.take()))).is_none() {
                drop(running);
            }
        }
    }
}
