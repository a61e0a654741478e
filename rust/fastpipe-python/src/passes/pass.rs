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
use crate::passes::dropped_keys::report;
use crate::passes::lost_units::LostUnits;
use crate::passes::progress::Progress;
use crate::passes::stats;
use crate::service::local_request::LocalRequest;

/// Maximum size in bytes of the batches that a local server sends together, and the seconds that the first may wait.
const LENT_TOGETHER: usize = 1 << 20;
const PATIENCE: f64 = 0.002;

/// The position of a pass. It remains valid after the pass has ended.
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
    /// The epoch of the last batch that was delivered, or the first epoch if none was. After the consumer has seen the
    /// end, the epoch that the next pass would read.
    #[getter]
    fn epoch(&self) -> u64 {
        self.seen().epoch
    }

    /// The epoch and the step of the last batch that was delivered, and its index among the batches of all ranks in the
    /// epoch. None if no batch was delivered.
    #[getter]
    fn last_batch(&self) -> Option<(u64, u64, u64)> {
        self.seen().last_batch
    }

    /// The number of batches that were delivered to the consumer.
    #[getter]
    fn delivered(&self) -> u64 {
        self.seen().batches
    }

    /// Whether the pass still exists.
    #[getter]
    fn active(&self) -> bool {
        self.running.strong_count() > 0
    }

    /// Ends the pass, if it still exists, and waits for its threads. Later calls of `next` raise an error with the
    /// reason `by`.
    #[pyo3(signature = (by=None))]
    fn close(&self, py: Python<'_>, by: Option<String>) {
        if let Some(running) = self.running.upgrade() {
            // This may be the last reference to the pass by now. Dropping that also waits for the threads.
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

    /// Returns statistics of the pass, including where its time went. None in a process that was forked from the pass's
    /// process.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let stats = py.detach(|| self.look.stats());
        stats
            .map(|stats| stats::to_dict(py, &stats, &self.seen.keys()))
            .transpose()
    }

    /// Returns the state after the last batch that was delivered.
    fn progress(&self) -> Progress {
        Progress::from(&self.seen().state)
    }
}

/// A pass over a dataset: an iterator of batches. Its threads end when it is dropped.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Pass {
    /// Dropped without the GIL, because dropping waits for threads.
    running: Option<Arc<RunningPass>>,
    /// Whether batches mark which of their rows are valid.
    padded: bool,
    total: Option<u64>,
    position: Py<Position>,
    /// The exception from user code that ended the pass. It is stored here so that Python's garbage collector sees it:
    /// its traceback may contain frames that reference the pass.
    raised: Mutex<Option<Py<PyAny>>>,
    /// The damaged units. None if damage ends the pass.
    lost: Option<LostUnits>,
}

impl Pass {
    /// Creates an iterator over a pass that starts at `state` and has `total` batches.
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
            lost: None,
        })
    }

    /// Returns the pass, which reports the damaged units of its batches.
    pub(crate) fn with_lost(mut self, lost: Option<LostUnits>) -> Self {
        self.lost = lost;
        self
    }

    /// Returns the exception for the error that ended the pass.
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

    /// Returns the next batch, converted by `make`, or None at the end.
    pub(crate) fn draw<T>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let after = |batch: &mut Batch| std::mem::take(&mut batch.info.after);
        self.drawn(py, after, |running, next| report(py, running.next_report(next)), make)
    }

    /// Like [`Pass::draw`], but the batch keeps its state for callers that pass it on to another process or pass. These
    /// report what its epoch leaves out.
    pub(crate) fn draw_whole<T>(
        &self,
        py: Python<'_>,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        self.drawn(py, |batch| batch.info.after.clone(), |_, _| Ok(()), make)
    }

    fn drawn<T>(
        &self,
        py: Python<'_>,
        after: impl FnOnce(&mut Batch) -> State,
        report: impl FnOnce(&RunningPass, Option<&Yielded>) -> PyResult<()>,
        make: impl FnOnce(&[ColumnSpec], Batch) -> PyResult<T>,
    ) -> PyResult<Option<T>> {
        let Some(running) = &self.running else { return Ok(None) };
        let asked = Instant::now();
        loop {
            let polled = py.detach(|| running.poll());
            match polled.map_err(|error| self.failed(py, running, &error))? {
                Poll::Ready(number, mut batch) => {
                    let (yielded, after) = (Yielded::new(number, &batch, asked), after(&mut batch));
                    let made = guarded(py, || {
                        report(running, Some(&yielded))?;
                        self.lost.as_ref().map_or(Ok(()), |lost| lost.report(py, &batch))?;
                        make(running.columns(), *batch)
                    });
                    // The batch is lost, so later batches must not be delivered.
                    let made = made.inspect_err(|error| {
                        let error = lost(py, error);
                        py.detach(|| running.fail(error));
                    })?;
                    running.delivered(yielded, after);
                    return Ok(Some(made));
                }
                Poll::End => {
                    py.detach(|| running.release());
                    let reported = report(running, None);
                    running.ended();
                    return reported.map(|()| None);
                }
                Poll::Pending => py.check_signals()?,
            }
        }
    }

    /// Waits for the next batch. Returns it with later batches that arrive within `patience` seconds, up to about
    /// `most` bytes. None at the end of the pass. The next call raises an error that occurs after the first batch.
    fn draw_several(&self, py: Python<'_>, most: usize, patience: f64) -> PyResult<Option<Vec<Batch>>> {
        let Some(running) = &self.running else { return Ok(None) };
        let patience = Duration::try_from_secs_f64(patience).unwrap_or_default();
        let Some(first) = self.draw_whole(py, |_, batch| Ok(batch))? else {
            return Ok(None);
        };
        Ok(Some(py.detach(|| more(running, first, most, patience))))
    }

    /// Returns the columns of the batches.
    pub(crate) fn columns(&self) -> &[ColumnSpec] {
        self.running.as_ref().map_or(&[], |running| running.columns())
    }

    /// Whether batches mark which of their rows are valid.
    pub(crate) fn is_padded(&self) -> bool {
        self.padded
    }

    /// Returns the underlying pass, for code that draws from it without Python.
    pub(crate) fn running(&self) -> Option<Arc<RunningPass>> {
        self.running.clone()
    }

    /// Returns the number of batches, or `None` if the pass has no end.
    pub(crate) fn batches(&self) -> Option<u64> {
        self.total
    }
}

/// Returns a batch and later batches that arrive within `patience`, up to about `most` bytes. A later call reports an
/// error of the pass.
pub(crate) fn more(running: &RunningPass, first: Batch, most: usize, patience: Duration) -> Vec<Batch> {
    let until = Instant::now() + patience;
    let mut held = nbytes(&first);
    let mut batches = vec![first];
    // A large batch is sent on its own.
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

    /// Sends batches over a request of a local server. Returns after the last batch, or when the program needs no more.
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

    /// The number of batches of the whole pass, or None if it has no end.
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
            // The engine's threads never need the GIL, but other threads may need it while this one waits. When the
            // interpreter is ending, the GIL can't be released.
            let mut running = Some(running);
            if Python::try_attach(|py| py.detach(|| drop(running.take()))).is_none() {
                drop(running);
            }
        }
    }
}
