//! A pass that yields batches to a consumer, either from this process or from other processes.

use std::any::Any;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::Duration;

use fastpipe_batch::{ColumnSpec, Error, ErrorKind, KeyCount, Source, add_key_counts};
use fastpipe_order::{Order, RemainingEpoch, State};

use crate::batch_source::{BatchSource, ObservePass};
use crate::memory::Memory;
use crate::options::Options;
use crate::order_memory::unplanned;
use crate::reader_totals::{ReaderTotals, Yielded};
use crate::stream::{Poll, Stream};

/// The longest time for which waiting for a batch delays the handling of Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(20);

/// Up to a tenth of the keys may be left out without a warning, as in `fastpipe._omissions`.
const UNSAID: u64 = 10;

/// The source of a pass and the pass's lease. Observers may keep the source after the pass has ended.
pub struct PassSource {
    /// The source of the rows.
    pub source: Arc<dyn Source>,
    /// Dropped when the pass ends.
    pub lease: Option<Lease>,
}

/// An object that a pass keeps alive until it ends.
pub type Lease = Arc<dyn Any + Send + Sync>;

/// The progress of the consumer.
pub struct Seen {
    /// Locked only briefly, and with the GIL held, so no other thread can hold the lock when the process forks.
    /// TensorFlow's threads are an exception, but TensorFlow itself doesn't survive a fork.
    state: Mutex<Delivered>,
    columns: Arc<[ColumnSpec]>,
}

/// The batches that the consumer has received.
pub struct Delivered {
    /// Number of batches.
    pub batches: u64,
    /// The index of the last batch, counted from 1.
    last: u64,
    /// The epoch of the last batch; before the first batch, the epoch in which the pass starts.
    pub epoch: u64,
    /// The epoch and the step of the last batch, and its index among the batches of all ranks. `None` before the first
    /// batch.
    pub last_batch: Option<(u64, u64, u64)>,
    /// The state after the last batch.
    pub state: State,
    /// Whether the consumer has reached the end.
    pub ended: bool,
    /// The keys of each column in these batches. Empty if no column leaves out keys.
    keys: Vec<KeyCount>,
    /// The keys that [`RunningPass::next_report`] has returned.
    reported: Vec<KeyCount>,
}

/// The keys of a feature, some of which may have been left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct FeatureKeys {
    /// The name of the feature.
    pub feature: Arc<str>,
    /// The keys.
    pub keys: KeyCount,
}

/// The keys that the batches of an epoch have left out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct EpochKeys {
    /// The epoch.
    pub epoch: u64,
    /// The keys of each feature that has any. True if the caller is to be warned: much is left out, for the first time
    /// in this reader.
    pub features: Vec<(FeatureKeys, bool)>,
}

impl Seen {
    /// Locks and returns the progress up to now.
    pub fn lock(&self) -> MutexGuard<'_, Delivered> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Returns the keys of each feature that leaves out keys, in the batches that the consumer has received.
    pub fn keys(&self) -> Vec<FeatureKeys> {
        self.named(self.lock().keys.iter().copied())
    }

    /// Adds the names of the columns to their counts. Leaves out columns without keys.
    fn named(&self, counts: impl Iterator<Item = KeyCount>) -> Vec<FeatureKeys> {
        let columns = self.columns.iter().zip(counts);
        let columns = columns
            .filter(|(_, keys)| keys.read > 0)
            .map(|(column, keys)| FeatureKeys {
                feature: column.name.clone(),
                keys,
            });
        columns.collect()
    }
}

/// An active pass. Its threads stop when it is dropped.
pub struct RunningPass {
    batches: Box<dyn BatchSource>,
    source: Arc<dyn Source>,
    /// Dropped after `batches`, which joins its threads when dropped, or earlier, when the last unit has been read.
    lease: Mutex<Option<Lease>>,
    origin: Origin,
    seen: Arc<Seen>,
    /// The reason given by the caller that closed it.
    closed_by: OnceLock<String>,
}

/// The arguments that a pass was started with.
pub struct Origin {
    /// The order of the rows.
    pub order: Arc<Order>,
    /// Options of the pass.
    pub options: Options,
    /// The memory of its batches.
    pub memory: Arc<Memory>,
    /// Totals to which batches and work are added, if there are any.
    pub totals: Option<Arc<ReaderTotals>>,
}

impl RunningPass {
    /// Creates a pass that takes its batches from `batches` and starts at `state`.
    pub fn new(batches: Box<dyn BatchSource>, begun: PassSource, origin: Origin, state: State) -> Arc<Self> {
        if let Some(totals) = &origin.totals {
            totals.begin_pass(batches.telemetry(), origin.order.left_out());
        }
        let delivered = Delivered {
            batches: 0,
            last: 0,
            epoch: state.epoch,
            last_batch: None,
            state,
            ended: false,
            keys: Vec::new(),
            reported: Vec::new(),
        };
        let seen = Arc::new(Seen {
            state: Mutex::new(delivered),
            columns: begun.source.facts().columns.clone(),
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

    /// Creates a pass like this one that leaves out `unit`. It covers the rows of `rest` after the batches that the
    /// consumer has received. If `rest` is a whole epoch, this pass must contain only that epoch. Also returns the
    /// remaining epoch of the new pass.
    ///
    /// # Errors
    /// Fails if other processes produce the batches, if the rows can't be planned, or if memory runs out.
    pub fn without(&self, rest: &RemainingEpoch, unit: u64) -> Result<(Arc<RunningPass>, RemainingEpoch), Error> {
        let Origin {
            order,
            options,
            memory,
            totals,
        } = &self.origin;
        if !self.batches.is_local() {
            let reason = "a unit cannot be left out here, because other processes produce the batches. Configure the \
                          reader that is served to skip damaged data";
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        if order.rows_per_group().is_some() {
            let reason = "a unit cannot be left out of groups of rows. Leave out damaged data before rows are grouped";
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        // All batches but the last have the same size, and no batch fails after the last one.
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

    /// The progress of the consumer. Observers may keep it after the pass has ended.
    pub fn seen(&self) -> &Arc<Seen> {
        &self.seen
    }

    /// Returns an observer of the pass, which may outlive it.
    pub fn observe(&self) -> Box<dyn ObservePass> {
        self.batches.observe()
    }

    /// Whether the pass was closed with a reason.
    pub fn is_closed(&self) -> bool {
        self.closed_by.get().is_some()
    }

    /// The epoch of the next batch.
    pub fn epoch(&self) -> u64 {
        self.seen.lock().state.epoch
    }

    /// Returns the next batch if it arrives within a short time. An error ends the pass and its threads. Call it
    /// without the GIL.
    pub fn poll(&self) -> Result<Poll, Error> {
        self.poll_for(PATIENCE)
    }

    /// Returns the next batch if it arrives within `wait`.
    pub fn poll_for(&self, wait: Duration) -> Result<Poll, Error> {
        self.batches.poll(wait).map_err(|error| match self.closed_by.get() {
            Some(by) if error.kind() == ErrorKind::Closed => Error::new(ErrorKind::Closed, by.as_str()),
            _ => error,
        })
    }

    /// Ends the pass and waits for its threads. Later calls for a batch return an error with this reason.
    pub fn close(&self, by: Option<String>) {
        if let Some(by) = by {
            self.closed_by.get_or_init(|| by);
        }
        self.batches.close();
        self.release();
    }

    /// Ends the pass with an error and waits for its threads. Call it without the GIL.
    pub fn fail(&self, error: Error) {
        self.batches.fail(error);
        self.release();
    }

    /// Releases the lease, since nothing more will be read.
    pub fn release(&self) {
        drop(self.lease.lock().unwrap_or_else(PoisonError::into_inner).take());
    }

    /// The columns of its batches.
    pub fn columns(&self) -> &[ColumnSpec] {
        &self.source.facts().columns
    }

    /// Records that the consumer has received a batch, and the state after it.
    pub fn delivered(&self, batch: Yielded, after: State) {
        if let Some(totals) = &self.origin.totals {
            totals.count(&batch);
        }
        let mut seen = self.seen.lock();
        seen.batches += 1;
        add_key_counts(&mut seen.keys, &batch.keys);
        // Several threads may take batches, and a later batch may be recorded first.
        if batch.number >= seen.last {
            (seen.last, seen.epoch, seen.state) = (batch.number + 1, batch.epoch, after);
            seen.last_batch = Some((batch.epoch, batch.place.0, batch.place.1));
        }
    }

    /// Returns the keys of the last epoch if `next` is the first batch of another epoch, or `None` at the end of the
    /// pass. Returns them once. If several threads take batches, keys of an epoch's last batches may be reported with
    /// the next epoch. The caller must call it before it records the batch or the end.
    pub fn next_report(&self, next: Option<&Yielded>) -> Option<EpochKeys> {
        let mut seen = self.seen.lock();
        if seen.keys == seen.reported || next.is_some_and(|next| next.epoch <= seen.epoch) {
            return None;
        }
        let now = seen.keys.clone();
        let before = std::mem::replace(&mut seen.reported, now);
        let before = before.into_iter().chain(std::iter::repeat(KeyCount::default()));
        let counts = seen.keys.iter().zip(before).map(|(now, before)| now.since(before));
        let features = self.seen.named(counts).into_iter();
        let warns = |found: &FeatureKeys| {
            let first = || {
                self.origin
                    .totals
                    .as_ref()
                    .is_none_or(|totals| totals.warns(&found.feature))
            };
            found.keys.dropped.saturating_mul(UNSAID) > found.keys.read && first()
        };
        Some(EpochKeys {
            epoch: seen.epoch,
            features: features.map(|found| (found.clone(), warns(&found))).collect(),
        })
    }

    /// Records that the consumer has reached the end.
    pub fn ended(&self) {
        let mut seen = self.seen.lock();
        // Other ranks may still have batches of this epoch, but this rank has finished it.
        seen.state = State::start(
            self.origin.options.end_epoch.unwrap_or(0).max(seen.state.epoch),
            seen.state.ranks,
        );
        seen.epoch = seen.state.epoch;
        seen.ended = true;
    }
}
