//! A pass as a Python iterator.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, Weak};
use std::time::{Duration, Instant};

use fastpipe_batch::{ColumnSpec, Error, ErrorKind, SlabPool, Source};
use fastpipe_engine::{Batch, Memory as Kept, Options, Poll, Stream, unplanned};
use fastpipe_order::{Order, RemainingEpoch, State};
use fastpipe_wire::nbytes;
use pyo3::gc::{PyTraverseError, PyVisit};
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::batch_arrays::to_dict;
use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::{guarded, lost, raised_of, to_py};
use crate::passes::batch_source::{Look, Supply, Task};
use crate::passes::progress::Progress;
use crate::passes::stats;
use crate::service::outgoing::{self, Lent, Sent};
use crate::sources::data::{Begun, Lease};

/// How long a wait for a batch may keep Ctrl-C waiting.
const PATIENCE: Duration = Duration::from_millis(20);

/// Free slabs that are kept for batches that are sent together.
const SENT_TOGETHER: usize = 8;

/// How far a pass has come. Outlives it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Position {
    seen: Arc<Seen>,
    look: Look,
    running: Weak<Running>,
}

/// What the consumer has got.
struct Seen {
    /// Only locked for a moment, and with the GIL, so that no other thread can hold it when a process forks; but for
    /// TensorFlow's threads, and TensorFlow itself doesn't survive a fork.
    state: Mutex<Delivered>,
}

struct Delivered {
    batches: u64,
    /// The number of the last batch, counted from 1, its epoch, and what is left after it.
    last: u64,
    epoch: u64,
    state: State,
    /// Whether the consumer has seen that there is no more.
    ended: bool,
}

impl Seen {
    fn lock(&self) -> MutexGuard<'_, Delivered> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Position {
    fn seen(&self) -> MutexGuard<'_, Delivered> {
        self.seen.lock()
    }
}

/// A pass under way. Its threads end when it is dropped.
pub(crate) struct Running {
    supply: Supply,
    source: Arc<dyn Source>,
    /// Dropped behind the stream, which waits for its threads when it is; or when there is nothing more to read.
    lease: Mutex<Option<Lease>>,
    origin: Origin,
    seen: Arc<Seen>,
    /// What closed it, in words.
    closed_by: OnceLock<String>,
}

/// What a pass was started with.
pub(crate) struct Origin {
    pub(crate) order: Arc<Order>,
    pub(crate) options: Options,
    pub(crate) memory: Arc<Kept>,
}

impl Running {
    fn new(supply: Supply, begun: Begun, origin: Origin, state: State) -> Arc<Self> {
        let delivered = Delivered {
            batches: 0,
            last: 0,
            epoch: state.epoch,
            state,
            ended: false,
        };
        let seen = Arc::new(Seen {
            state: Mutex::new(delivered),
        });
        Arc::new(Running {
            supply,
            source: begun.source,
            lease: Mutex::new(begun.lease),
            origin,
            seen,
            closed_by: OnceLock::new(),
        })
    }

    /// Another pass like this one, over what is left of `rest` behind the batches that the consumer has got, without a
    /// unit. Of a rest that is a whole epoch, this pass has to be one of that epoch alone. Also the rest of that pass.
    pub(crate) fn without(&self, rest: &RemainingEpoch, unit: u64) -> Result<(Arc<Running>, RemainingEpoch), Error> {
        let Origin { order, options, memory } = &self.origin;
        if matches!(self.supply, Supply::Remote(_)) {
            let reason = "batches that others make can't be had without one of their units; let the reader that is \
                          served leave out what can't be read";
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        // All but the last one are of one size, and nothing fails behind the last.
        let rows = self.seen.lock().batches * u64::from(order.settings().batch_size);
        let rest = rest.behind(order, rows, unit).map_err(unplanned)?;
        let cursor = order.remaining_epoch(&rest).map_err(unplanned)?;
        let stream = Stream::start(self.source.clone(), cursor, *options, memory.clone())?;
        let origin = Origin {
            order: order.clone(),
            options: *options,
            memory: memory.clone(),
        };
        let state = State::start(rest.epoch, order.settings().ranks);
        let begun = Begun {
            source: self.source.clone(),
            lease: self.lease.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        Ok((Running::new(Supply::Engine(stream), begun, origin, state), rest))
    }

    /// The epoch of the batch behind those that the consumer has got.
    pub(crate) fn epoch(&self) -> u64 {
        self.seen.lock().state.epoch
    }

    /// Looks for the next batch, waiting for a moment. An error ends the pass, and its threads. Without the GIL.
    pub(crate) fn poll(&self) -> Result<Poll, Error> {
        self.poll_for(PATIENCE)
    }

    /// Looks for the next batch, waiting at most so long.
    pub(crate) fn poll_for(&self, wait: Duration) -> Result<Poll, Error> {
        self.supply.poll(wait).map_err(|error| match self.closed_by.get() {
            Some(by) if error.kind() == ErrorKind::Closed => Error::new(ErrorKind::Closed, by.as_str()),
            _ => error,
        })
    }

    /// Ends the pass and waits for its threads. Whoever draws from it afterwards is told why it ended.
    fn close(&self, by: Option<String>) {
        if let Some(by) = by {
            self.closed_by.get_or_init(|| by);
        }
        self.supply.close();
        self.release();
    }

    /// Ends the pass with an error and waits for its threads. Without the GIL.
    fn fail(&self, error: Error) {
        self.supply.fail(error);
        self.release();
    }

    /// Nothing more is read.
    fn release(&self) {
        drop(self.lease.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The columns of its batches.
    pub(crate) fn columns(&self) -> &[ColumnSpec] {
        &self.source.facts().columns
    }

    /// Notes that the consumer has got a batch of an epoch, and what is left after it.
    pub(crate) fn delivered(&self, number: u64, epoch: u64, after: State) {
        let mut seen = self.seen.lock();
        seen.batches += 1;
        // Several threads may draw, and one overtake another between the two steps.
        if number >= seen.last {
            (seen.last, seen.epoch, seen.state) = (number + 1, epoch, after);
        }
    }

    /// Notes that the consumer has seen the end.
    pub(crate) fn ended(&self) {
        let mut seen = self.seen.lock();
        // Others may still have batches of this epoch; for this rank it is over.
        seen.state = State::start(
            self.origin.options.end_epoch.unwrap_or(0).max(seen.state.epoch),
            seen.state.ranks,
        );
        seen.epoch = seen.state.epoch;
        seen.ended = true;
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

    /// Every task that was done, if they were recorded: what, for which batch, by which thread, and when it started,
    /// when it ended, and how long it was expected to take, in nanoseconds.
    fn tasks(&self) -> Vec<Task> {
        self.look.tasks()
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
    running: Option<Arc<Running>>,
    /// Whether batches say which of their rows are valid.
    padded: bool,
    total: Option<u64>,
    position: Py<Position>,
    /// What a user's code raised and ended the pass with. It is here, where Python's garbage collector sees it: its
    /// traceback may have frames that have the pass.
    raised: Mutex<Option<Py<PyAny>>>,
    /// For batches that are sent together.
    sending: OnceLock<Arc<SlabPool>>,
}

impl Pass {
    /// Makes an iterator of a pass that starts with `state` and has `total` batches.
    pub(crate) fn new(
        py: Python<'_>,
        supply: Supply,
        begun: Begun,
        padded: bool,
        total: Option<u64>,
        origin: Origin,
        state: State,
    ) -> PyResult<Self> {
        let look = supply.look();
        let running = Running::new(supply, begun, origin, state);
        let position = Position {
            seen: running.seen.clone(),
            look,
            running: Arc::downgrade(&running),
        };
        Ok(Pass {
            running: Some(running),
            padded,
            total,
            position: Py::new(py, position)?,
            raised: Mutex::new(None),
            sending: OnceLock::new(),
        })
    }

    /// The exception for what ended the pass.
    fn failed(&self, py: Python<'_>, running: &Running, error: &Error) -> PyErr {
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
        loop {
            let polled = py.detach(|| running.poll());
            match polled.map_err(|error| self.failed(py, running, &error))? {
                Poll::Ready(number, mut batch) => {
                    let (epoch, after) = (batch.info.epoch, after(&mut batch));
                    let made = guarded(py, || make(running.columns(), *batch));
                    // The batch is lost, so those behind it aren't handed out.
                    let made = made.inspect_err(|error| {
                        let error = lost(py, error);
                        py.detach(|| running.fail(error));
                    })?;
                    running.delivered(number, epoch, after);
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
        let mut batches = vec![first];
        let more = || {
            let until = Instant::now() + patience;
            let mut held = nbytes(&batches[0]);
            // A large one is sent as it lies.
            while held <= most / 2 {
                match running.poll_for(until.saturating_duration_since(Instant::now())) {
                    Ok(Poll::Ready(number, batch)) => {
                        running.delivered(number, batch.info.epoch, batch.info.after.clone());
                        held += nbytes(&batch);
                        batches.push(*batch);
                    }
                    _ => return batches,
                }
            }
            batches
        };
        Ok(Some(py.detach(more)))
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
    pub(crate) fn running(&self) -> Option<Arc<Running>> {
        self.running.clone()
    }
}

#[pymethods]
impl Pass {
    fn __iter__(this: Py<Self>) -> Py<Self> {
        this
    }

    fn __next__<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        self.draw(py, |columns, batch| to_dict(py, columns, batch, self.padded))
    }

    /// The next batches for whoever sends them, at least one: as many as have `most` bytes together, and are there
    /// within `patience` seconds. None if there are no more.
    #[pyo3(signature = (*, most, patience))]
    fn next_sent(&self, py: Python<'_>, most: usize, patience: f64) -> PyResult<Option<Sent>> {
        let pool = self.sending.get_or_init(|| SlabPool::new(SENT_TOGETHER));
        let batches = self.draw_several(py, most, patience)?;
        batches.map(|batches| Sent::new(py, batches, pool)).transpose()
    }

    /// The next batches, lent to another process from the memory that it maps: what is said of them, and the offset and
    /// the length of each piece. None if there are no more.
    #[pyo3(signature = (slabs, *, most, patience))]
    fn next_lent<'py>(
        &self,
        py: Python<'py>,
        slabs: &SharedSlabs,
        most: usize,
        patience: f64,
    ) -> PyResult<Option<Lent<'py>>> {
        let batches = self.draw_several(py, most, patience)?;
        batches.map(|batches| outgoing::lend(py, batches, slabs)).transpose()
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
        let closed = self
            .running
            .as_ref()
            .is_some_and(|running| running.closed_by.get().is_some());
        let end = match (seen.ended, closed) {
            (true, _) => ", ended",
            (false, true) => ", closed",
            (false, false) => "",
        };
        let (batches, epoch) = (seen.batches, seen.epoch);
        format!("<fastpipe pass: {batches}{total} batches yielded, epoch {epoch}{end}>")
    }

    /// Ends the pass and waits for its threads.
    fn close(&self, py: Python<'_>) {
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
