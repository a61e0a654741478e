//! What a pass over a data set receives whose batches others make.

use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, SlabPool, Source};
use fastpipe_engine::{Batch, Memory, Options};
use fastpipe_order::Settings;
use fastpipe_wire::{Arrivals, Feed, Wanted, check, read_pieces};
use numpy::PyReadonlyArray1;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::arrays::shared_arena::SharedArena;
use crate::errors::{IntoPy, Raised};
use crate::passes::pass::Pass;
use crate::passes::progress::Progress;

/// Batches that are kept for whoever reads a batch after the other, and for those that arrive.
const KEPT: u64 = 8;

/// Where those who bring the batches of a pass put them. Batches are counted from the first of the pass.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct BatchFeed {
    feed: Arc<Feed>,
    source: Arc<dyn Source>,
    memory: Arc<Memory>,
    most_rows: usize,
    most_bytes: usize,
}

impl BatchFeed {
    pub(crate) fn new(source: Arc<dyn Source>, memory: Arc<Memory>, most_rows: u32, most_bytes: Option<u64>) -> Self {
        memory.keep_batches(KEPT);
        BatchFeed {
            feed: Arc::default(),
            source,
            memory,
            most_rows: most_rows as usize,
            most_bytes: most_bytes.map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX)),
        }
    }

    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }
}

#[pymethods]
impl BatchFeed {
    /// Takes batches that somebody was asked for: those from `next` to `stop`, without it, of an epoch, the first of
    /// which says it is that step; None where that isn't known.
    fn receive(&self, next: u64, stop: u64, epoch: u64, step: Option<u64>) -> IncomingBatches {
        let wanted = Wanted {
            next,
            stop,
            epoch,
            step,
            most: self.most_bytes,
        };
        IncomingBatches {
            arrivals: Mutex::new(Arrivals::new(wanted, self.memory.slabs().clone())),
            feed: self.feed.clone(),
            source: self.source.clone(),
            most_rows: self.most_rows,
        }
    }

    /// Draws the next batch of a pass in this process, and takes it. None if there are no more.
    fn put_next(&self, py: Python<'_>, number: u64, batches: &Pass) -> PyResult<Option<bool>> {
        batches.draw_whole(py, |_, batch| Ok(self.feed.put(number, Box::new(batch))))
    }

    /// Whether a batch is wanted still, and hasn't come.
    fn wants(&self, number: u64) -> bool {
        self.feed.wants(number)
    }

    /// There are no batches from this one on.
    fn end(&self, number: u64) {
        self.feed.end(number);
    }

    /// A batch can't be had: what is raised in its place.
    fn fail(&self, py: Python<'_>, number: u64, exception: Bound<'_, PyAny>) {
        let reason = exception.to_string();
        let raised = Raised::elsewhere(py, PyErr::from_value(exception));
        let error = Error::new(ErrorKind::Raised, reason).with_cause(Arc::new(raised));
        self.feed.fail(number, error);
    }

    /// Waits until the consumer has taken more than `next` batches, waits for one that isn't there, or wants no more;
    /// at most so many seconds.
    fn wait(&self, py: Python<'_>, next: u64, seconds: f64) {
        let wait = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        py.detach(|| self.feed.wait(next, wait));
    }

    /// The number of the next batch that is handed over, how many wait, whether a consumer waits for one, and whether
    /// no more are wanted.
    fn look(&self) -> (u64, u64, bool, bool) {
        let seen = self.feed.look();
        (seen.next, seen.ready, seen.waiting > 0.0, seen.over)
    }
}

/// Batches that somebody was asked for, as they come.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct IncomingBatches {
    arrivals: Mutex<Arrivals>,
    feed: Arc<Feed>,
    source: Arc<dyn Source>,
    most_rows: usize,
}

impl IncomingBatches {
    fn lock(&self) -> MutexGuard<'_, Arrivals> {
        self.arrivals.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Hands over a batch that is whole.
    fn put(&self, number: u64, batch: Batch) -> Result<(), Error> {
        check(&self.source.facts().columns, &batch, self.most_rows)?;
        self.feed.put(number, Box::new(batch));
        Ok(())
    }
}

#[pymethods]
impl IncomingBatches {
    /// The number of the batch that comes next; behind the last one, that behind it.
    #[getter]
    fn next(&self) -> u64 {
        self.lock().next()
    }

    /// Bytes of the largest batch that was announced.
    #[getter]
    fn largest(&self) -> usize {
        self.lock().largest()
    }

    /// Takes what comes next: what is said of batches, if some begin, and bytes, uint8, which are copied. Those that
    /// are whole are put into the feed.
    fn take(&self, py: Python<'_>, said: Option<&[u8]>, bytes: PyReadonlyArray1<'_, u8>) -> PyResult<()> {
        let bytes = bytes.as_slice()?;
        let taken = py.detach(|| {
            let mut arrivals = self.lock();
            said.map_or(Ok(()), |said| arrivals.announce(said))?;
            arrivals.take(bytes, |number, batch| self.put(number, batch))
        });
        taken.py(py)
    }

    /// Takes batches that were lent from another process's memory, which is mapped here: what is said of them, and the
    /// offset and the length of each piece.
    fn borrow(&self, py: Python<'_>, said: &[u8], memory: &SharedArena, pieces: &[u8]) -> PyResult<()> {
        let taken = py.detach(|| {
            let pieces = read_pieces(pieces)?.into_iter();
            let borrowed: Vec<_> = pieces
                .map(|(offset, len)| memory.borrowed(offset, len))
                .collect::<Result<_, _>>()?;
            let mut borrowed = borrowed.into_iter();
            let empty = SlabPool::new(0);
            let missing = || Error::new(ErrorKind::Internal, "a batch takes more memory than was lent");
            let mut arrivals = self.lock();
            arrivals.announce(said)?;
            let slab = |len| match len {
                0 => empty.take(0),
                _ => borrowed.next().ok_or_else(missing),
            };
            arrivals.take_lent(slab, |number, batch| self.put(number, batch))
        });
        taken.py(py)
    }
}

/// What those who bring the batches of a pass are told of it.
pub(crate) fn request<'py>(
    py: Python<'py>,
    [epoch, step, left, steps]: [u64; 4],
    progress: Option<Progress>,
    total: Option<u64>,
    csr: bool,
    options: &Options,
    settings: &Settings,
) -> PyResult<Bound<'py, PyDict>> {
    let request = PyDict::new(py);
    request.set_item("order", settings.to_json())?;
    request.set_item("epoch", epoch)?;
    request.set_item("step", step)?;
    request.set_item("left", left)?;
    request.set_item("steps", steps)?;
    request.set_item("progress", progress)?;
    request.set_item("total", total)?;
    request.set_item("csr", csr)?;
    request.set_item("prefetch", options.prefetch)?;
    request.set_item("memory_limit", options.memory_limit)?;
    Ok(request)
}
