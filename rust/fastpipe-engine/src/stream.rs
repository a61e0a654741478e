//! A pass over a source. It yields batches in order and prepares them in advance.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind, Result, Source, release_all, reserve_address_space};
use fastpipe_order::Cursor;

use crate::batch::Batch;
use crate::delivery::Next;
use crate::lock::lock;
use crate::memory::Memory;
use crate::minimum_memory;
use crate::observer::PassObserver;
use crate::options::Options;
use crate::order_memory::check_order;
use crate::pass::PassContext;
use crate::schedule::Urgency;
use crate::workers::Workers;

/// The result of [`Stream::poll`].
pub enum Poll {
    /// The next batch and its index.
    Ready(u64, Box<Batch>),
    /// All batches were delivered.
    End,
    /// No batch is ready yet.
    Pending,
}

/// A running pass.
pub struct Stream {
    context: Arc<PassContext>,
    workers: Mutex<Option<Workers>>,
    process: u32,
}

impl Stream {
    /// Starts a pass over `source` at the position of `cursor`. It reuses the free memory of earlier passes in
    /// `memory`.
    pub fn start(source: Arc<dyn Source>, cursor: Cursor, options: Options, memory: Arc<Memory>) -> Result<Stream> {
        let order = cursor.order().clone();
        let settings = order.settings();
        let seeks = !cursor.is_at_start();
        if options.memory_limit.is_none() {
            check_order(&order, None, seeks)?;
        }
        // The order takes its memory for the whole pass.
        let left = |limit: u64| limit.saturating_sub(order.memory(settings.shuffle_buffer));
        let limit = options.memory_limit.map(left);
        let context = Arc::new(PassContext::new(source, cursor, options, memory, limit));
        // Reserved for the code that reports an error after memory has run out.
        reserve_address_space();
        context.working_memory.memory().keep_batches(context.ahead());
        context.working_memory.begin(options.memory_limit);
        if let Some(limit) = options.memory_limit {
            release_all();
            minimum_memory::check(&context, &order, limit)?;
            if seeks {
                // Check this before any other memory is held, since the first batch is sought before that.
                check_order(&order, Some(limit), seeks)?;
            }
        }
        let threads = context.config.threads();
        let workers = Workers::new(threads).or_else(|error| match error.kind() {
            ErrorKind::OutOfMemory => {
                context.working_memory.memory().release();
                Workers::new(threads)
            }
            _ => Err(error),
        })?;
        context.pool.set(&workers);
        let stream = Stream {
            context,
            workers: Mutex::new(Some(workers)),
            process: std::process::id(),
        };
        stream.start_admitting();
        Ok(stream)
    }

    /// Returns the next batch if it arrives within `wait`. Several threads may call this; each batch goes to one of
    /// them. An error ends the pass and releases its threads and memory. Later calls return the same error, so that it
    /// can't be mistaken for the end of the data.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if self.process != std::process::id() {
            let reason = "the pass was started by another process; call iter(reader) to start one in this process";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        // A caller may keep the pass alive through its error, for example in a traceback. Only the error is kept then.
        match self.context.next(wait).inspect_err(|_| self.end())? {
            Next::Pending => Ok(Poll::Pending),
            Next::End => Ok(Poll::End),
            Next::Batch(number, batch, start) => {
                for _ in 0..start {
                    self.start_runner();
                }
                self.start_admitting();
                Ok(Poll::Ready(number, batch))
            }
        }
    }

    /// Ends the pass with an error and waits for its threads. Call this if a delivered batch was lost, since later
    /// batches can't replace it.
    pub fn fail(&self, error: Error) {
        if self.process == std::process::id() {
            self.context.fail(error);
            self.end();
        }
    }

    /// Returns an observer of the pass, which may outlive it.
    pub fn observer(&self) -> PassObserver {
        PassObserver {
            context: self.context.clone(),
            process: self.process,
        }
    }

    /// Ends the pass and waits for its threads. Delivered batches remain valid.
    pub fn close(&self) {
        if self.process == std::process::id() {
            self.context.delivery.close();
            self.end();
        }
    }

    /// Waits for the threads and releases everything that batches in flight hold. An error of the pass is kept.
    fn end(&self) {
        self.context.telemetry.end();
        self.context.delivery.end();
        self.context.fetches.close();
        // Threads still take the queued tasks. These see that the pass is closed and release what they hold.
        let workers = lock(&self.workers).take();
        drop(workers);
        // No thread continues the remaining work.
        self.context.schedule.clear();
        lock(&self.context.parked).clear();
        self.context.gate.clear();
        self.context.delivery.clear();
    }

    fn start_admitting(&self) {
        let context = &self.context;
        if context.gate.ask() && context.schedule.put(Urgency::FIRST, None, Box::new(PassContext::admit)) {
            self.start_runner();
        }
    }

    /// Starts a runner that the schedule has already counted.
    fn start_runner(&self) {
        if let Some(workers) = &*lock(&self.workers) {
            let context = self.context.clone();
            workers.spawn(move || context.run_all());
        }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // In a forked child, threads that don't exist there may hold the locks forever. `get_mut` needs no lock.
        if self.process == std::process::id() {
            self.close();
        } else if let Some(workers) = self.workers.get_mut().unwrap_or_else(PoisonError::into_inner).take() {
            drop(workers);
        }
    }
}
