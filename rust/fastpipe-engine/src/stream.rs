//! A pass over a source: batches in order, decoded ahead of the consumer.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::{Buffer, Error, ErrorKind, Part, Pass, Result, Slab, Source, Work, give_back, put_spare_by};
use fastpipe_order::Cursor;

use crate::admission::Admission;
use crate::assemble::assemble;
use crate::batch::Batch;
use crate::budget::Budget;
use crate::cost::CostModel;
use crate::hand_over::HandOver;
use crate::job::{Job, Left};
use crate::least;
use crate::memory::Memory;
use crate::open_files::Files;
use crate::order_memory::check_order;
use crate::schedule::{self, End, Schedule, Urgency};
use crate::sequence::Parked;
use crate::stats::Stats;
use crate::telemetry::{Activity, Span, Telemetry};
use crate::threads::{Chooser, Measured};
use crate::unit::OpenUnit;
use crate::workers::{Workers, default_threads};

/// How a pass runs. Nothing here changes what it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that decode; `None` for as many as pay, of the processors that the process may use.
    pub num_threads: Option<usize>,
    /// How many passes like this one share these processors, at least one: it takes no more threads than its share unless
    /// `num_threads` says so.
    pub sharers: usize,
    /// Batches decoded ahead of the consumer, at least one; `None` for as many as keep the threads busy.
    pub prefetch: Option<usize>,
    /// Bytes that the pass may hold, besides what the consumer has got; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// Whether to keep a record of every task, for [`Watch::spans`].
    pub record_tasks: bool,
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

/// Work that is worth a task of its own, in nanoseconds.
pub(crate) const SMALLEST_TASK: u64 = 50_000;

/// A running pass.
pub struct Stream {
    shared: Arc<Shared>,
    workers: Mutex<Option<Workers>>,
    process: u32,
}

pub(crate) struct Shared {
    pub(crate) source: Arc<dyn Source>,
    pub(crate) parts: Arc<[Part]>,
    pub(crate) memory: Arc<Memory>,
    pub(crate) parked: Parked,
    pub(crate) options: Options,
    pub(crate) files: Files,
    pub(crate) schedule: Schedule,
    pub(crate) costs: CostModel,
    pub(crate) budget: Arc<Budget>,
    pub(crate) telemetry: Telemetry,
    pub(crate) admission: Mutex<Admission>,
    pub(crate) hand_over: Mutex<HandOver>,
    pub(crate) changed: Condvar,
    /// Bytes of the first batch.
    pub(crate) batch_bytes: OnceLock<u64>,
    /// Threads that may be used at most.
    pub(crate) threads: usize,
    seed: u64,
    closed: AtomicBool,
    /// Whether somebody is about to look whether batches can be begun.
    pub(crate) admitting: AtomicBool,
    /// Whether a batch wasn't begun for want of memory.
    pub(crate) short_of_memory: AtomicBool,
}

pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Stream {
    /// Starts a pass over `source` where `cursor` stands, in memory that may have served passes before.
    pub fn start(source: Arc<dyn Source>, cursor: Cursor, options: Options, memory: Arc<Memory>) -> Result<Stream> {
        let share = || default_threads() / options.sharers.max(1);
        let threads = options.num_threads.unwrap_or_else(share).max(1);
        let order = cursor.order().clone();
        let settings = *order.settings();
        let seeks = !cursor.is_at_start();
        if options.memory_limit.is_none() {
            check_order(&order, None, seeks)?;
        }
        // The order takes what it takes all the while.
        let left = |limit: u64| limit.saturating_sub(order.memory(settings.shuffle_buffer));
        let hand_over = HandOver::new(options.num_threads.is_none().then(|| Chooser::new(threads)));
        let shared = Arc::new(Shared {
            parts: source.columns().iter().flat_map(|c| c.parts()).collect(),
            files: Files::of(&*source),
            seed: settings.seed,
            memory,
            parked: Parked::default(),
            schedule: Schedule::new(threads),
            costs: CostModel::new(source.classes().len()),
            budget: Budget::new(options.memory_limit.map(left)),
            telemetry: Telemetry::new(options.record_tasks),
            admission: Mutex::new(Admission::new(cursor)),
            hand_over: Mutex::new(hand_over),
            changed: Condvar::new(),
            batch_bytes: OnceLock::new(),
            closed: AtomicBool::new(false),
            admitting: AtomicBool::new(false),
            short_of_memory: AtomicBool::new(false),
            source,
            options,
            threads,
        });
        // For whoever tells of it when memory runs out.
        put_spare_by();
        shared.memory.keep_batches(shared.ahead());
        let most = options
            .memory_limit
            .map(|limit| usize::try_from(limit).unwrap_or(usize::MAX));
        shared.memory.slabs.keep(most);
        shared.memory.slabs.take_failure();
        shared.memory.buffers.keep(most);
        if let Some(limit) = options.memory_limit {
            give_back();
            least::check(&shared, &order, limit)?;
            if seeks {
                // Before anything else is held, which is when the first batch is sought.
                check_order(&order, Some(limit), seeks)?;
            }
        }
        let workers = Workers::new(threads).or_else(|error| match error.kind() {
            ErrorKind::OutOfMemory => {
                shared.memory.release();
                Workers::new(threads)
            }
            _ => Err(error),
        })?;
        let stream = Stream {
            shared,
            workers: Mutex::new(Some(workers)),
            process: std::process::id(),
        };
        stream.start_admitting();
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
        if let Some(left) = state.left.take() {
            let away = left.elapsed().as_nanos() as u64;
            shared.telemetry.add(&shared.telemetry.consumer_away, away);
        }
        if !shared.can_hand_over(&state) {
            let since = Instant::now();
            state.sleep(since);
            state = shared
                .changed
                .wait_timeout_while(state, wait, |state| !shared.can_hand_over(state))
                .unwrap_or_else(PoisonError::into_inner)
                .0;
            let waited = since.elapsed();
            state.wake(waited);
            shared
                .telemetry
                .add(&shared.telemetry.consumer_waited, waited.as_nanos() as u64);
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
            shared.check_files(&mut state)?;
            shared.telemetry.end();
            return Ok(Poll::End);
        }
        let number = state.next;
        match state.ready.remove(&number) {
            None => Ok(Poll::Pending),
            Some(Err(error)) => {
                let error = shared.explained(error);
                state.failed = Some(error.clone());
                // They will never be handed over.
                let lost = std::mem::take(&mut state.ready);
                drop(state);
                shared.changed.notify_all();
                drop(lost);
                shared.release_after(&error);
                Err(error)
            }
            Some(Ok((mut batch, reserved))) => {
                if state.end == Some(number + 1) {
                    // Some consumers count, and never see the end.
                    shared.check_files(&mut state)?;
                }
                state.next += 1;
                let start = shared.choose_threads(&mut state);
                state.left = Some(Instant::now());
                let awaited = state.is_awaited();
                drop(state);
                if awaited {
                    shared.changed.notify_all();
                }
                batch.slabs.iter_mut().for_each(Slab::lend);
                drop(reserved);
                for _ in 0..start {
                    self.start_runner();
                }
                self.start_admitting();
                Ok(Poll::Ready(number, batch))
            }
        }
    }

    /// Ends the pass with an error: a batch that was handed over is lost, and those behind it are no substitute.
    pub fn fail(&self, error: Error) {
        if self.process == std::process::id() {
            self.shared.fail(error);
        }
    }

    /// A look at the pass, which may outlast it.
    pub fn watch(&self) -> Watch {
        Watch {
            shared: self.shared.clone(),
            process: self.process,
        }
    }

    /// Ends the pass and waits for its threads. Batches that were handed over stay as they are.
    pub fn close(&self) {
        if self.process != std::process::id() {
            return;
        }
        self.shared.telemetry.end();
        self.shared.closed.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.hand_over));
        self.shared.changed.notify_all();
        // What is in the queue is taken from it all the same, and lets go of what it holds.
        let workers = lock(&self.workers).take();
        drop(workers);
        // Nobody goes on with what was begun.
        self.shared.schedule.clear();
        lock(&self.shared.parked).clear();
        lock(&self.shared.admission).clear();
        lock(&self.shared.hand_over).ready.clear();
    }

    fn start_admitting(&self) {
        let shared = &self.shared;
        if shared.admitting.swap(true, Ordering::SeqCst) {
            return;
        }
        if shared.schedule.put(Urgency::FIRST, None, Box::new(Shared::admit)) {
            self.start_runner();
        }
    }

    /// Starts a runner that the schedule counts already.
    fn start_runner(&self) {
        if let Some(workers) = &*lock(&self.workers) {
            let shared = self.shared.clone();
            workers.spawn(move || shared.run_all());
        }
    }
}

/// A look at a pass.
pub struct Watch {
    shared: Arc<Shared>,
    process: u32,
}

impl Watch {
    /// What the pass has done, and where its time went. `None` in a forked child, where it isn't the child's.
    pub fn stats(&self) -> Option<Stats> {
        (self.process == std::process::id()).then(|| Stats::of(&self.shared))
    }

    /// Every task that was done, if [`Options::record_tasks`] asked for them.
    pub fn spans(&self) -> Vec<Span> {
        if self.process == std::process::id() {
            self.shared.telemetry.spans()
        } else {
            Vec::new()
        }
    }

    /// What the source calls its work.
    pub fn work(&self) -> Work {
        self.shared.source.work()
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
        state.failed.is_some() || state.is_over() || self.is_closed() || state.is_ready()
    }

    /// The error, or what is behind it: the allocator's where that had no memory, since arenas that can't grow only say that
    /// there is none; and the change of a file where that looks like damage.
    fn explained(&self, error: Error) -> Error {
        match error.kind() {
            ErrorKind::Limit | ErrorKind::OutOfMemory => self.memory.slabs.take_failure().unwrap_or(error),
            ErrorKind::Malformed | ErrorKind::Shape | ErrorKind::ValueRange | ErrorKind::Null => {
                self.files.change_behind(&error).unwrap_or(error)
            }
            _ => error,
        }
    }

    /// Ends the pass with an error if a file was changed while it was read.
    fn check_files(&self, state: &mut HandOver) -> Result<()> {
        let checked = self.files.check();
        if let Err(error) = &checked {
            state.failed = Some(error.clone());
            self.changed.notify_all();
        }
        checked
    }

    /// Ends the pass with an error, at the batch that would have come next.
    fn fail(&self, error: Error) {
        let error = self.explained(error);
        lock(&self.hand_over).failed.get_or_insert_with(|| error.clone());
        self.changed.notify_all();
        self.release_after(&error);
    }

    /// Where memory has run out, others have a use for what is free: a next pass among them.
    fn release_after(&self, error: &Error) {
        if error.kind() == ErrorKind::OutOfMemory {
            self.memory.release();
        }
    }

    /// Runs a part of the engine so that a panic in it becomes an error.
    pub(crate) fn guarded(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()>) {
        let result = catch_unwind(AssertUnwindSafe(|| part(self)));
        if let Err(error) = result.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fail(error);
        }
    }

    /// Puts a part of the engine in the queue. Only threads of the pass call this.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        urgency: Urgency,
        part: impl FnOnce(&Arc<Self>) -> Result<()> + Send + 'static,
    ) {
        self.put(urgency, None, Box::new(part));
    }

    /// Puts a part in the queue that goes on where this thread ends.
    pub(crate) fn spawn_next(
        self: &Arc<Self>,
        urgency: Urgency,
        part: impl FnOnce(&Arc<Self>) -> Result<()> + Send + 'static,
    ) {
        self.put(urgency, rayon::current_thread_index(), Box::new(part));
    }

    fn put(self: &Arc<Self>, urgency: Urgency, thread: Option<usize>, part: schedule::Part) {
        if self.schedule.put(urgency, thread, part) {
            self.run_on_another();
        }
    }

    /// Lets a thread that sleeps look for something to do, if there is one.
    pub(crate) fn wake_one(self: &Arc<Self>) {
        if self.schedule.start() {
            self.run_on_another();
        }
    }

    /// Starts a runner that the schedule counts already. Only threads of the pass call this.
    fn run_on_another(self: &Arc<Self>) {
        let shared = self.clone();
        rayon::spawn_fifo(move || shared.run_all());
    }

    /// A runner: does what is in the queue.
    fn run_all(self: &Arc<Self>) {
        let thread = rayon::current_thread_index().unwrap_or_default();
        loop {
            while let Some(part) = self.schedule.take(thread) {
                self.guarded(part);
                if self.short_of_memory.swap(false, Ordering::SeqCst) {
                    self.guarded(Shared::admit);
                }
            }
            let mut found = false;
            self.guarded(|shared| {
                found = shared.find_start();
                Ok(())
            });
            if found {
                continue;
            }
            if lock(&self.hand_over).must_wake(true) {
                self.changed.notify_all();
            }
            match self.schedule.end() {
                End::NotYet => {}
                // A batch waits for memory that others were to give back, and none are left.
                End::Last if self.short_of_memory.swap(false, Ordering::SeqCst) && !self.is_closed() => {
                    if !self.schedule.put(Urgency::FIRST, None, Box::new(Shared::admit)) {
                        return;
                    }
                }
                End::Ended | End::Last => return,
            }
        }
    }

    /// Lets another number of threads work, if that is better. Returns how many runners must be started for it.
    fn choose_threads(&self, state: &mut HandOver) -> usize {
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

    /// Fetches and opens a unit.
    pub(crate) fn open(&self, unit: u64, epoch: u64) -> Result<OpenUnit> {
        self.open_within(unit, epoch, self.options.memory_limit)
    }

    /// The same; an error if it takes more than so many bytes when it is open.
    pub(crate) fn open_within(&self, unit: u64, epoch: u64, most_bytes: Option<u64>) -> Result<OpenUnit> {
        if let Err(error) = self.files.check_before(epoch) {
            // Not of this unit, or not only.
            self.fail(error);
        }
        let info = self.source.describe(unit);
        let (bytes, reading) = self.telemetry.time(Activity::Read, || match info.range {
            Some(range) => self.files.read(range, &self.memory.buffers),
            None => Ok(Buffer::default()),
        });
        let bytes = bytes?;
        let stored = bytes.len() as u64;
        let pass = Pass {
            seed: self.seed,
            epoch,
            most_bytes,
        };
        let (opened, nanos) = self.telemetry.time(Activity::Open, || {
            self.source.open(unit, pass, bytes, &self.memory.buffers)
        });
        let opened = OpenUnit::new(opened?, self.memory.clone());
        let held = opened.get().bytes() as u64;
        self.costs.opened(info.class, stored, held, reading + nanos);
        let telemetry = &self.telemetry;
        telemetry.add(&telemetry.units_opened, 1);
        telemetry.add(&telemetry.rows_opened, u64::from(info.rows));
        telemetry.add(&telemetry.bytes_read, stored);
        telemetry.add(&telemetry.bytes_opened, held);
        Ok(opened)
    }

    /// Ends a task of a batch; the last one hands it over.
    pub(crate) fn end_task(&self, job: &Job) -> Result<()> {
        let Some(left) = job.end_task() else { return Ok(()) };
        let start = self.telemetry.now();
        let done = left.and_then(|mut left| {
            if left.rows.is_none() {
                // Nothing had to be read for it.
                left.rows = self.rows(job.size).map(Arc::new).map(Some)?;
            }
            let reserved = left.reserved.take();
            Ok((self.join(left, job.class)?, reserved))
        });
        self.telemetry.took(Activity::Assemble, self.telemetry.now() - start);
        self.note((0, Activity::Assemble), job.number, start);
        if let Ok((batch, _)) = &done {
            let bytes = batch.slabs.iter().map(|slab| slab.len() as u64).sum();
            let telemetry = &self.telemetry;
            telemetry.add(&telemetry.bytes_delivered, bytes);
            telemetry.add(&telemetry.rows_delivered, batch.about.rows as u64);
            telemetry.add(&telemetry.batches, 1);
            self.batch_bytes.get_or_init(|| bytes);
        }
        let mut state = lock(&self.hand_over);
        state.put(job.number, done);
        let wake = state.must_wake(false);
        drop(state);
        if wake {
            self.changed.notify_all();
        }
        Ok(())
    }

    /// Joins a batch whose tasks are done and lays it out for the consumer.
    fn join(&self, mut left: Left, class: u32) -> Result<Box<Batch>> {
        let rows = left.rows.take().and_then(|rows| Arc::try_unwrap(rows).ok());
        let (Some(rows), Some(about)) = (rows, left.about.take()) else {
            return Err(Error::new(
                ErrorKind::Internal,
                "a batch was handed over while it was written",
            ));
        };
        let columns = self.source.columns();
        let bytes = left.fragments.iter().map(|f| f.arena_bytes() as u64).sum();
        self.costs.appended(class, about.rows as u64, bytes);
        let batch = catch_unwind(AssertUnwindSafe(|| {
            assemble(about, columns, rows, &mut left.fragments, &self.memory.slabs)
        }));
        let batch = batch.unwrap_or_else(|panic| Err(panicked(&*panic)));
        let mut free = lock(&self.memory.fragments);
        for mut fragment in left.fragments {
            if free.len() < 2 * self.threads {
                if self.budget.limit().is_some() {
                    // Arenas that nobody uses count only where free memory is counted.
                    (0..self.parts.len()).for_each(|part| drop(fragment.take_arena(part)));
                }
                fragment.clear();
                free.push(fragment);
            }
        }
        batch.map(Box::new)
    }
}

/// The error for a panic: a fault in fastpipe.
#[cold]
pub fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
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
