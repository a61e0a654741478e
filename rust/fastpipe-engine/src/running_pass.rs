//! A pass that its consumer draws from, wherever its batches come from.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use fastpipe_batch::{ColumnSpec, Error, ErrorKind, Source};
use fastpipe_order::{Order, RemainingEpoch, State};

use crate::batch_source::{BatchSource, ObservePass};
use crate::memory::Memory;
use crate::options::Options;
use crate::order_memory::unplanned;
use crate::reader_totals::{ReaderTotals, Yielded};
use crate::stream::{Poll, Stream};

/// How long a wait for a batch may keep Ctrl-C waiting.
const PATIENCE: Duration = Duration::from_millis(20);

/// The source of a pass, which observers may keep after the pass, and a lease for the time of the pass.
pub struct PassSource {
    /// The source.
    pub source: Arc<dyn Source>,
    /// Dropped when the pass ends.
    pub lease: Option<Lease>,
}

/// An object that a pass keeps until it ends.
pub type Lease = Arc<dyn Any + Send + Sync>;

/// The progress of the consumer.
pub struct Seen {
    /// Only locked for a moment, and with the GIL, so that no other thread can hold it when a process forks; but for
    /// TensorFlow's threads, and TensorFlow itself doesn't survive a fork.
    state: Mutex<Delivered>,
}

/// The batches that the consumer has taken.
pub struct Delivered {
    /// Batches.
    pub batches: u64,
    /// The number of the last batch, counted from 1.
    last: u64,
    /// The epoch of the last batch, or of the first one before that.
    pub epoch: u64,
    /// The state after it.
    pub state: State,
    /// Whether the consumer has reached the end.
    pub ended: bool,
}

impl Seen {
    /// The progress up to now.
    pub fn lock(&self) -> MutexGuard<'_, Delivered> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// A pass under way. Its threads end when it is dropped.
pub struct RunningPass {
    batches: Box<dyn BatchSource>,
    source: Arc<dyn Source>,
    /// Dropped after the batches, which wait for their threads when dropped; or when the last unit was read.
    lease: Mutex<Option<Lease>>,
    origin: Origin,
    seen: Arc<Seen>,
    /// The reason given by the caller that closed it.
    closed_by: OnceLock<String>,
}

/// The arguments that a pass was started with.
pub struct Origin {
    /// The order of rows.
    pub order: Arc<Order>,
    /// How it runs.
    pub options: Options,
    /// The memory of its batches.
    pub memory: Arc<Memory>,
    /// Where its batches and work are counted, if anywhere.
    pub totals: Option<Arc<ReaderTotals>>,
}

impl RunningPass {
    /// A pass of batches that come from here, and that starts with `state`.
    pub fn new(batches: Box<dyn BatchSource>, begun: PassSource, origin: Origin, state: State) -> Arc<Self> {
        if let Some(totals) = &origin.totals {
            totals.begin_pass(batches.telemetry(), origin.order.left_out());
        }
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
        Arc::new(RunningPass {
            batches,
            source: begun.source,
            lease: Mutex::new(begun.lease),
            origin,
            seen,
            closed_by: OnceLock::new(),
        })
    }

    /// Another pass like this one, without a unit, over the rows of `rest` after the batches that the consumer has
    /// taken. If `rest` is a whole epoch, this pass must have only that epoch. Also returns the rest for the new pass.
    ///
    /// # Errors
    /// If other processes make the batches; if the rows can't be planned; of memory.
    pub fn without(&self, rest: &RemainingEpoch, unit: u64) -> Result<(Arc<RunningPass>, RemainingEpoch), Error> {
        let Origin {
            order,
            options,
            memory,
            totals,
        } = &self.origin;
        if !self.batches.is_local() {
            let reason = "batches that others make can't be had without one of their units; let the reader that is \
                          served leave out what can't be read";
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        // All batches before the last one have the same size, and no batch fails after the last.
        let rows = self.seen.lock().batches * u64::from(order.settings().batch_size);
        let rest = rest.behind(order, rows, unit).map_err(unplanned)?;
        let cursor = order.remaining_epoch(&rest).map_err(unplanned)?;
        let stream = Stream::start(self.source.clone(), cursor, *options, memory.clone())?;
        let origin = Origin {
            order: order.clone(),
            options: *options,
            memory: memory.clone(),
            totals: totals.clone(),
        };
        let state = State::start(rest.epoch, order.settings().ranks);
        let begun = PassSource {
            source: self.source.clone(),
            lease: self.lease.lock().unwrap_or_else(PoisonError::into_inner).clone(),
        };
        Ok((RunningPass::new(Box::new(stream), begun, origin, state), rest))
    }

    /// The progress of the consumer, which observers may keep after the pass.
    pub fn seen(&self) -> &Arc<Seen> {
        &self.seen
    }

    /// A look at the pass, which may outlast it.
    pub fn observe(&self) -> Box<dyn ObservePass> {
        self.batches.observe()
    }

    /// Whether it was closed with a reason.
    pub fn is_closed(&self) -> bool {
        self.closed_by.get().is_some()
    }

    /// The epoch of the next batch.
    pub fn epoch(&self) -> u64 {
        self.seen.lock().state.epoch
    }

    /// Looks for the next batch, waiting for a moment. An error ends the pass, and its threads. Without the GIL.
    pub fn poll(&self) -> Result<Poll, Error> {
        self.poll_for(PATIENCE)
    }

    /// Looks for the next batch, waiting at most so long.
    pub fn poll_for(&self, wait: Duration) -> Result<Poll, Error> {
        self.batches.poll(wait).map_err(|error| match self.closed_by.get() {
            Some(by) if error.kind() == ErrorKind::Closed => Error::new(ErrorKind::Closed, by.as_str()),
            _ => error,
        })
    }

    /// Ends the pass and waits for its threads. Later draws raise an error with this reason.
    pub fn close(&self, by: Option<String>) {
        if let Some(by) = by {
            self.closed_by.get_or_init(|| by);
        }
        self.batches.close();
        self.release();
    }

    /// Ends the pass with an error and waits for its threads. Without the GIL.
    pub fn fail(&self, error: Error) {
        self.batches.fail(error);
        self.release();
    }

    /// Nothing more is read.
    pub fn release(&self) {
        drop(self.lease.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The columns of its batches.
    pub fn columns(&self) -> &[ColumnSpec] {
        &self.source.facts().columns
    }

    /// Notes that the consumer has got a batch, and what is left after it.
    pub fn delivered(&self, batch: Yielded, after: State) {
        if let Some(totals) = &self.origin.totals {
            totals.count(&batch);
        }
        let mut seen = self.seen.lock();
        seen.batches += 1;
        // Several threads may draw, and one overtake another between the two steps.
        if batch.number >= seen.last {
            (seen.last, seen.epoch, seen.state) = (batch.number + 1, batch.epoch, after);
        }
    }

    /// Notes that the consumer has seen the end.
    pub fn ended(&self) {
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
