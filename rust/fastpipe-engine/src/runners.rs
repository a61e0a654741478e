//! Runners: threads of a pass that run scheduled tasks until the queue is empty.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use fastpipe_batch::Result;

use crate::panicked::panicked;
use crate::pass::{PassContext, Task};
use crate::schedule::{End, Urgency};

impl PassContext {
    /// Runs `part`, and fails the pass if it returns an error or panics.
    pub(crate) fn guarded(self: &Arc<Self>, part: impl FnOnce(&Arc<Self>) -> Result<()>) {
        let result = catch_unwind(AssertUnwindSafe(|| part(self)));
        if let Err(error) = result.unwrap_or_else(|panic| Err(panicked(&*panic))) {
            self.fail(error);
        }
    }

    /// Puts `part` into the queue.
    pub(crate) fn spawn(
        self: &Arc<Self>,
        urgency: Urgency,
        part: impl FnOnce(&Arc<Self>) -> Result<()> + Send + 'static,
    ) {
        self.put(urgency, None, Box::new(part));
    }

    /// Puts `part` into the queue, preferably for this thread, since it continues where the current task ends.
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

    /// Starts a runner on a sleeping thread, if there is one, to look for work outside the queue.
    pub(crate) fn wake_one(self: &Arc<Self>) {
        if self.schedule.start() {
            self.run_on_another();
        }
    }

    /// Starts a runner that the schedule has already counted.
    fn run_on_another(self: &Arc<Self>) {
        let context = self.clone();
        let run = move || context.run_all();
        if rayon::current_thread_index().is_some() {
            return rayon::spawn_fifo(run);
        }
        // The caller is a fetching thread.
        self.pool.spawn(run);
    }

    /// Schedules a check for whether more batches can be started or prepared, on a thread of the pass.
    pub(crate) fn look_again(self: &Arc<Self>) {
        if !self.is_closed() && self.gate.ask() {
            self.spawn(Urgency::FIRST, PassContext::admit);
        }
    }

    /// The loop of a runner: runs tasks from the queue.
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
                // A batch waits for memory that other runners would have released, but none of them is left.
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
