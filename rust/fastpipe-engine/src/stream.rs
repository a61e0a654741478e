//! A pass over a source: batches in order, decoded ahead of the consumer.

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
    context: Arc<PassContext>,
    workers: Mutex<Option<Workers>>,
    process: u32,
}

impl Stream {
    /// Starts a pass over `source` where `cursor` stands, in memory that may have served passes before.
    pub fn start(source: Arc<dyn Source>, cursor: Cursor, options: Options, memory: Arc<Memory>) -> Result<Stream> {
        let order = cursor.order().clone();
        let settings = *order.settings();
        let seeks = !cursor.is_at_start();
        if options.memory_limit.is_none() {
            check_order(&order, None, seeks)?;
        }
        // The order takes what it takes all the while.
        let left = |limit: u64| limit.saturating_sub(order.memory(settings.shuffle_buffer));
        let limit = options.memory_limit.map(left);
        let context = Arc::new(PassContext::new(source, cursor, options, memory, limit));
        // For whoever tells of it when memory runs out.
        reserve_address_space();
        context.working_memory.memory().keep_batches(context.ahead());
        context.working_memory.begin(options.memory_limit);
        if let Some(limit) = options.memory_limit {
            release_all();
            minimum_memory::check(&context, &order, limit)?;
            if seeks {
                // Before anything else is held, which is when the first batch is sought.
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

    /// The next batch, if it is there within `wait`. Several threads may ask: each batch goes to one of them. An error
    /// ends the pass, which lets go of its threads and memory. It is returned again and again, so that nobody takes the
    /// end of the data for it.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if self.process != std::process::id() {
            let reason =
                "the pass was started by another process, which has its threads; start one here with iter(reader)";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        // Whoever keeps the pass by its error, in a traceback say, keeps nothing else.
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

    /// Ends the pass with an error and waits for its threads: a batch that was handed over is lost, and those behind it
    /// are no substitute.
    pub fn fail(&self, error: Error) {
        if self.process == std::process::id() {
            self.context.fail(error);
            self.end();
        }
    }

    /// A look at the pass, which may outlast it.
    pub fn observer(&self) -> PassObserver {
        PassObserver {
            context: self.context.clone(),
            process: self.process,
        }
    }

    /// Ends the pass and waits for its threads. Batches that were handed over stay as they are.
    pub fn close(&self) {
        if self.process == std::process::id() {
            self.context.delivery.close();
            self.end();
        }
    }

    /// Waits for the threads and lets go of all that batches under way hold; the error stays, if there is one.
    fn end(&self) {
        self.context.telemetry.end();
        self.context.delivery.end();
        self.context.fetches.close();
        // What is in the queue is taken from it all the same, and lets go of what it holds.
        let workers = lock(&self.workers).take();
        drop(workers);
        // Nobody goes on with what was begun.
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

    /// Starts a runner that the schedule counts already.
    fn start_runner(&self) {
        if let Some(workers) = &*lock(&self.workers) {
            let context = self.context.clone();
            workers.spawn(move || context.run_all());
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
