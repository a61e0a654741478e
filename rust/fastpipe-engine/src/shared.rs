//! What the consumer and the threads of a pass share, and how a pass fails.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, Weak};

use fastpipe_batch::{self as batch, Error, ErrorKind, Result, Source};
use fastpipe_files::Files;
use rayon::ThreadPool;

use crate::admission::Admission;
use crate::budget::Budget;
use crate::cost::CostModel;
use crate::fetch::Fetches;
use crate::hand_over::HandOver;
use crate::lock::lock;
use crate::memory::Memory;
use crate::options::Options;
use crate::schedule::Schedule;
use crate::sequence::Parked;
use crate::telemetry::Telemetry;
use crate::threads::Measured;

/// A part of the work.
pub(crate) type Part = Box<dyn FnOnce(&Arc<Shared>) -> Result<()> + Send>;

/// What a running pass is made of.
pub(crate) struct Shared {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) parts: Arc<[batch::Part]>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) parked: Parked,
    pub(crate) options: Options,
    pub(crate) files: Files,
    pub(crate) fetches: Fetches,
    pub(crate) schedule: Schedule<Part>,
    pub(crate) costs: CostModel,
    pub(crate) budget: Arc<Budget>,
    pub(crate) telemetry: Telemetry,
    pub(crate) admission: Mutex<Admission>,
    pub(crate) hand_over: Mutex<HandOver>,
    pub(crate) changed: Condvar,
    /// The threads, for whoever isn't one of them.
    pub(crate) pool: OnceLock<Weak<ThreadPool>>,
    /// Whether any record of a unit can be read at once.
    pub(crate) random: bool,
    /// Bytes of the first batch.
    pub(crate) batch_bytes: OnceLock<u64>,
    /// Threads that may be used at most.
    pub(crate) threads: usize,
    pub(crate) seed: u64,
    pub(crate) closed: AtomicBool,
    /// Whether somebody is about to look whether batches can be begun.
    pub(crate) admitting: AtomicBool,
    /// Whether a batch wasn't begun for want of memory.
    pub(crate) short_of_memory: AtomicBool,
}

impl Shared {
    /// Whether the consumer has gone, or has the error that ended the pass.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    pub(crate) fn can_hand_over(&self, state: &HandOver) -> bool {
        state.failed.is_some() || state.is_over() || self.is_closed() || state.is_ready()
    }

    /// The error, or what is behind it: the allocator's where that had no memory, since arenas that can't grow only say that
    /// there is none; and the change of a file where that looks like damage.
    pub(crate) fn explained(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Limit | ErrorKind::OutOfMemory => self.memory.slabs.take_failure().unwrap_or(error),
            ErrorKind::Malformed | ErrorKind::Shape | ErrorKind::ValueRange | ErrorKind::Null => {
                self.files.change_behind(&error).unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Ends the pass with an error if a file was changed while it was read.
    pub(crate) fn check_files(&self, state: &mut HandOver) -> Result<()> {
        let checked = self.files.check();
        if let Err(error) = &checked {
            state.failed = Some(error.clone());
            self.changed.notify_all();
        }
        checked
    }

    /// The consumer goes: from now on it is told that, whatever else happens or has happened.
    pub(crate) fn close(&self) {
        let mut state = lock(&self.hand_over);
        self.closed.store(true, Ordering::Relaxed);
        state.failed = None;
    }

    /// Ends the pass with an error, at the batch that would have come next.
    pub(crate) fn fail(&self, error: Error) {
        let error = self.explained(error);
        let mut state = lock(&self.hand_over);
        if !self.is_closed() {
            state.failed.get_or_insert_with(|| error.clone());
        }
        drop(state);
        self.changed.notify_all();
        self.release_after(&error);
    }

    /// Where memory has run out, others have a use for what is free: a next pass among them.
    pub(crate) fn release_after(&self, error: &Error) {
        if error.kind() == ErrorKind::OutOfMemory {
            self.memory.release();
        }
    }

    /// Lets another number of threads work, if that is better. Returns how many runners must be started for it.
    pub(crate) fn choose_threads(&self, state: &mut HandOver) -> usize {
        let Some(chooser) = &mut state.chooser else { return 0 };
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        let measured = Measured {
            batches: state.next,
            work: self.telemetry.busy(),
            away: load(&self.telemetry.consumer_away),
            waited: load(&self.telemetry.consumer_waited),
            delays: self.schedule.delays(),
        };
        let start = chooser.look(measured).map_or(0, |threads| self.schedule.allow(threads));
        self.memory.keep_batches(self.ahead());
        start
    }
}
