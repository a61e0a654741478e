//! A pass over a source: batches in order, decoded ahead of the consumer.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::{Access, Error, ErrorKind, Result, Slab, Source, give_back, put_spare_by};
use fastpipe_files::Files;
use fastpipe_order::Cursor;

use crate::admission::Admission;
use crate::batch::Batch;
use crate::budget::Budget;
use crate::cost::CostModel;
use crate::fetch::Fetches;
use crate::hand_over::HandOver;
use crate::least;
use crate::lock::lock;
use crate::memory::Memory;
use crate::options::Options;
use crate::order_memory::check_order;
use crate::schedule::{Schedule, Urgency};
use crate::sequence::Parked;
use crate::shared::Shared;
use crate::telemetry::Telemetry;
use crate::threads::Chooser;
use crate::watch::Watch;
use crate::workers::{Workers, default_threads};

/// What [`Stream::poll`] found.
pub enum Poll {
    /// The next batch, and its number.
    Ready(u64, Box<Batch>),
    /// There are no more.
    End,
    /// Not yet.
    Pending,
}

/// A running pass.
pub struct Stream {
    shared: Arc<Shared>,
    workers: Mutex<Option<Workers>>,
    process: u32,
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
            fetches: Fetches::of(&source),
            pool: OnceLock::new(),
            random: source.access() == Access::Random,
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
        let _ = shared.pool.set(workers.pool());
        let stream = Stream {
            shared,
            workers: Mutex::new(Some(workers)),
            process: std::process::id(),
        };
        stream.start_admitting();
        Ok(stream)
    }

    /// The next batch, if it is there within `wait`. Several threads may ask: each batch goes to one of them. An error
    /// ends the pass, which lets go of its threads and memory. It is returned again and again, so that nobody takes the end of
    /// the data for it.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if self.process != std::process::id() {
            let reason =
                "the pass was started by another process, which has its threads; start one here with iter(reader)";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        // Whoever keeps the pass by its error, in a traceback say, keeps nothing else.
        self.look(wait).inspect_err(|_| self.end())
    }

    fn look(&self, wait: Duration) -> Result<Poll> {
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
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if shared.is_closed() {
            return Err(Error::new(
                ErrorKind::Closed,
                "the pass was closed; iter(reader) starts a new one",
            ));
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

    /// Ends the pass with an error and waits for its threads: a batch that was handed over is lost, and those behind it are
    /// no substitute.
    pub fn fail(&self, error: Error) {
        if self.process == std::process::id() {
            self.shared.fail(error);
            self.end();
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
        if self.process == std::process::id() {
            self.shared.close();
            self.end();
        }
    }

    /// Waits for the threads and lets go of all that batches under way hold; the error stays, if there is one.
    fn end(&self) {
        self.shared.telemetry.end();
        self.shared.closed.store(true, Ordering::Relaxed);
        drop(lock(&self.shared.hand_over));
        self.shared.changed.notify_all();
        self.shared.fetches.close();
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
