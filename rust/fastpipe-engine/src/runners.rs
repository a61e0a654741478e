//! Runners: threads of a pass that do what the schedule says, until there is nothing left to do.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastpipe_batch::Result;

use crate::panicked::panicked;
use crate::pass::{PassContext, Task};
use crate::schedule::{End, Urgency};

impl PassContext {
    /// Runs a part of the engine so that a panic in it becomes an error.
    pub(crate) fn guarded(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()>) {
        let result = catch_unwind(AssertUnwindSafe(|| part(self)));
        if let Err(error) = result.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fail(error);
        }
    }

    /// Puts a part of the engine in the queue.
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

    fn put(self: &Arc<Self>, urgency: Urgency, thread: Option<usize>, part: Task) {
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

    /// Starts a runner that the schedule counts already.
    fn run_on_another(self: &Arc<Self>) {
        let context = self.clone();
        let run = move || context.run_all();
        if rayon::current_thread_index().is_some() {
            return rayon::spawn_fifo(run);
        }
        // A thread that fetches.
        self.pool.spawn(run);
    }

    /// Looks whether more can be begun, or made ready, on a thread of the pass.
    pub(crate) fn look_again(self: &Arc<Self>) {
        if !self.is_closed() && self.gate.ask() {
            self.spawn(Urgency::FIRST, PassContext::admit);
        }
    }

    /// A runner: does what is in the queue.
    pub(crate) fn run_all(self: &Arc<Self>) {
        let thread = rayon::current_thread_index().unwrap_or_default();
        loop {
            while let Some(part) = self.schedule.take(thread) {
                self.guarded(part);
                if self.gate.waited_for_memory() {
                    self.guarded(PassContext::admit);
                }
            }
            let mut found = false;
            self.guarded(|context| {
                found = context.find_start();
                Ok(())
            });
            if found {
                continue;
            }
            self.delivery.wake_idle();
            match self.schedule.end() {
                End::NotYet => {}
                // A batch waits for memory that others were to give back, and none are left.
                End::Last if self.gate.waited_for_memory() && !self.is_closed() => {
                    if !self.schedule.put(Urgency::FIRST, None, Box::new(PassContext::admit)) {
                        return;
                    }
                }
                End::Ended | End::Last => return,
            }
        }
    }
}
