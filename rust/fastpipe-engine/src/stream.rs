//! A pass over a source: batches in order, decoded ahead of the consumer.

use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, Part, Pass, ReadAt, Result, Source};
use fastpipe_order::{BatchPlan, Content, Cursor};

use crate::assemble::assemble;
use crate::batch::{About, Batch};
use crate::job::{Job, Left};
use crate::memory::Memory;
use crate::scatter::Scatter;
use crate::sequence::{Parked, Sequence};
use crate::storage::Files;
use crate::unit::OpenUnit;
use crate::workers::{Workers, default_threads};

/// How a pass runs. Nothing here changes what it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that decode; `None` for as many as the process may use processors.
    pub num_threads: Option<usize>,
    /// Batches decoded ahead of the consumer; at least one is.
    pub prefetch: usize,
    /// The epoch behind the last one; `None` for no end.
    pub end_epoch: Option<u64>,
    /// Batches at most; `None` for all of those epochs.
    pub limit: Option<u64>,
}

/// What [`Stream::poll`] found.
pub enum Poll {
    /// The next batch, and its number.
    Ready(u64, Box<Batch>),
    /// There are no more.
    End,
    /// Not yet.
    Pending,
}

/// Records placed between two looks at whether the pass was closed: far below 100 ms of work.
pub(crate) const RECORDS_AT_ONCE: usize = 1024;

/// Work that is worth a task of its own, in bytes as stored.
pub(crate) const SMALLEST_TASK: u64 = 64 << 10;

/// A running pass.
pub struct Stream {
    shared: Arc<Shared>,
    workers: Mutex<Option<Workers>>,
    process: u32,
}

pub(crate) struct Shared {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) threads: usize,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) parked: Parked,
    options: Options,
    seed: u64,
    files: Files,
    admission: Mutex<Admission>,
    hand_over: Mutex<HandOver>,
    changed: Condvar,
    closed: AtomicBool,
}

/// Who admits batches holds this.
struct Admission {
    cursor: Cursor,
    /// The next batch to be planned, counted over all epochs.
    next: u64,
    sequence: Sequence,
    scatter: Scatter,
}

/// Between tasks and consumers.
#[derive(Default)]
struct HandOver {
    /// The next batch to be handed over.
    next: u64,
    ready: HashMap<u64, Result<Box<Batch>>>,
    /// The number of batches, once all are planned.
    end: Option<u64>,
    /// The error that ended the pass.
    failed: Option<Error>,
}

impl HandOver {
    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Starts a pass over `source` where `cursor` stands, in memory that may have served passes before.
    pub fn start(source: Arc<dyn Source>, cursor: Cursor, options: Options, memory: Arc<Memory>) -> Result<Stream> {
        let threads = options.num_threads.unwrap_or_else(default_threads).max(1);
        let shared = Arc::new(Shared {
            parts: source.columns().iter().flat_map(|c| c.parts()).collect(),
            files: Files::new(source.locations()),
            seed: cursor.order().settings().seed,
            memory,
            parked: Parked::default(),
            admission: Mutex::new(Admission {
                cursor,
                next: 0,
                sequence: Sequence::default(),
                scatter: Scatter::default(),
            }),
            hand_over: Mutex::default(),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            source,
            options,
            threads,
        });
        let workers = Workers::new(threads)?;
        let stream = Stream {
            shared,
            workers: Mutex::new(Some(workers)),
            process: std::process::id(),
        };
        stream.admit();
        Ok(stream)
    }

    /// The next batch, if it is there within `wait`. Several threads may ask: each batch goes to one of them. An error
    /// ends the pass: it is returned again and again, so that nobody takes the end of the data for it.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if self.process != std::process::id() {
            let reason =
                "the pass was started by another process, which has its threads; start one here with iter(reader)";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        let shared = &self.shared;
        let mut state = lock(&shared.hand_over);
        if !shared.can_hand_over(&state) {
            state = shared
                .changed
                .wait_timeout(state, wait)
                .unwrap_or_else(PoisonError::into_inner)
                .0;
        }
        if shared.is_closed() {
            return Err(Error::new(
                ErrorKind::Closed,
                "the pass was closed; iter(reader) starts a new one",
            ));
        }
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if state.is_over() {
            return Ok(Poll::End);
        }
        let number = state.next;
        match state.ready.remove(&number) {
            None => Ok(Poll::Pending),
            Some(Err(error)) => {
                state.failed = Some(error.clone());
                shared.changed.notify_all();
                Err(error)
            }
            Some(Ok(batch)) => {
                state.next += 1;
                shared.changed.notify_all();
                drop(state);
                self.admit();
                Ok(Poll::Ready(number, batch))
            }
        }
    }

    /// Ends the pass and waits for its threads. Batches that were handed over stay as they are.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.shared.closed.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.hand_over));
        self.shared.changed.notify_all();
        let workers = lock(&self.workers).take();
        drop(workers);
        // Nobody goes on with what was begun.
        lock(&self.shared.parked).clear();
        let mut admission = lock(&self.shared.admission);
        admission.sequence.clear();
        admission.scatter.clear();
    }

    fn admit(&self) {
        if let Some(workers) = &*lock(&self.workers) {
            let shared = self.shared.clone();
            workers.spawn(move || shared.guarded(Shared::admit));
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // In a forked child the locks may be held for ever by threads that don't exist there; `get_mut` takes none.
        if self.process == std::process::id() {
            self.close();
        } else if let Some(workers) = self.workers.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop(workers);
        }
    }
}

impl Shared {
    /// Whether the consumer has gone.
    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    fn can_hand_over(&self, state: &HandOver) -> bool {
        state.failed.is_some() || state.is_over() || self.is_closed() || state.ready.contains_key(&state.next)
    }

    /// Ends the pass with an error, at the batch that would have come next.
    fn fail(&self, error: Error) {
        lock(&self.hand_over).failed.get_or_insert(error);
        self.changed.notify_all();
    }

    /// Runs a part of the engine so that a panic in it becomes an error.
    fn guarded(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()>) {
        let result = catch_unwind(AssertUnwindSafe(|| part(self)));
        if let Err(error) = result.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fail(error);
        }
    }

    /// Starts a part of the engine on a thread of the pass. Only threads of the pass call this.
    pub(crate) fn spawn(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()> + Send + 'static) {
        let shared = self.clone();
        rayon::spawn_fifo(move || shared.guarded(part));
    }

    /// Admits as many batches as may be in flight.
    fn admit(self: &Arc<Self>) -> Result<()> {
        let mut admission = lock(&self.admission);
        let ahead = self.options.prefetch.max(1) as u64;
        while !self.is_closed() {
            let number = admission.next;
            {
                let state = lock(&self.hand_over);
                if state.end.is_some() || number >= state.next.saturating_add(ahead) {
                    break;
                }
            }
            let wanted = self.options.limit.is_none_or(|limit| number < limit);
            let Some(plan) = wanted.then(|| self.plan(&mut admission)).flatten() else {
                lock(&self.hand_over).end = Some(number);
                self.changed.notify_all();
                break;
            };
            admission.next += 1;
            if let Err(error) = self.start(&mut admission, number, plan) {
                // It stands in for the batch; those before are still handed over.
                let mut state = lock(&self.hand_over);
                state.ready.insert(number, Err(error));
                state.end = Some(number + 1);
                self.changed.notify_all();
                break;
            }
        }
        Ok(())
    }

    /// The next batch, of the next epoch if need be.
    fn plan(&self, admission: &mut Admission) -> Option<BatchPlan> {
        let goes_on = |epoch: u64| self.options.end_epoch.is_none_or(|end| epoch < end);
        loop {
            let cursor = &mut admission.cursor;
            if !goes_on(cursor.current_epoch()) {
                return None;
            }
            if let Some(plan) = cursor.next() {
                return Some(plan);
            }
            // An endless pass over nothing would never yield.
            if cursor.order().steps() == 0 {
                return None;
            }
            let next = cursor.order().epoch(cursor.current_epoch() + 1);
            *cursor = next;
            admission.sequence.clear();
            admission.scatter.clear();
        }
    }

    fn start(self: &Arc<Self>, admission: &mut Admission, number: u64, plan: BatchPlan) -> Result<()> {
        let about = About {
            epoch: plan.epoch,
            step: plan.step,
            rows: plan.rows as usize,
            valid: plan.valid as usize,
            after: plan.after,
        };
        admission.sequence.release(&plan.released);
        admission.scatter.release(&plan.released);
        match plan.content {
            Content::Runs(runs) => self.start_runs(&mut admission.sequence, number, about, &runs),
            Content::Picks(picks) => self.start_picks(&mut admission.scatter, number, about, picks),
        }
    }

    /// Fetches and opens a unit.
    pub(crate) fn open(&self, unit: u64, epoch: u64) -> Result<OpenUnit> {
        let bytes = match self.source.describe(unit).range {
            None => Vec::new(),
            Some(range) => {
                let file = self.files.get(range.location)?;
                let len = usize::try_from(range.len)
                    .map_err(|_| Error::new(ErrorKind::Limit, "a unit is larger than memory can be addressed"))?;
                let mut bytes = self.memory.buffers.take(len);
                let found = file.read_at(range.offset, &mut bytes)?;
                if found < len {
                    let reason = format!("expected {len} bytes, found {found}: the file became shorter");
                    return Err(Error::new(ErrorKind::Malformed, reason));
                }
                bytes
            }
        };
        let pass = Pass { seed: self.seed, epoch };
        let opened = self.source.open(unit, pass, bytes, &self.memory.buffers)?;
        Ok(OpenUnit::new(opened, self.memory.clone()))
    }

    /// Ends a task of a batch; the last one hands it over.
    pub(crate) fn end_task(&self, job: &Job) -> Result<()> {
        let Some(left) = job.end_task() else { return Ok(()) };
        let batch = left.and_then(|left| self.join(left));
        lock(&self.hand_over).ready.insert(job.number, batch);
        self.changed.notify_all();
        Ok(())
    }

    /// Joins a batch whose tasks are done and lays it out for the consumer.
    fn join(&self, mut left: Left) -> Result<Box<Batch>> {
        let rows = left.rows.take().and_then(|rows| Arc::try_unwrap(rows).ok());
        let (Some(rows), Some(about)) = (rows, left.about.take()) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a batch was handed over while it was written",
            ));
        };
        let columns = self.source.columns();
        let batch = catch_unwind(AssertUnwindSafe(|| {
            assemble(about, columns, rows, &mut left.fragments, &self.memory.slabs)
        }));
        let batch = batch.unwrap_or_else(|panic| Err(panicked(&*panic)));
        let mut free = lock(&self.memory.fragments);
        for mut fragment in left.fragments {
            if free.len() < 2 * self.threads {
                fragment.clear();
                free.push(fragment);
            }
        }
        batch.map(Box::new)
    }
}

#[cold]
pub(crate) fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    Error::new(
        ErrorKind::Internal,
        format!("a fault in fastpipe, please report it: {text}"),
    )
}
