//! A look at a pass that runs, or has ended.

use std::sync::Arc;

use fastpipe_batch::Work;

use crate::pass::PassContext;
use crate::stats::Stats;
use crate::telemetry::Span;

/// A look at a pass.
pub struct PassObserver {
    pub(crate) context: Arc<PassContext>,
    pub(crate) process: u32,
}

impl PassObserver {
    /// What the pass has done, and where its time went. `None` in a forked child, where it isn't the child's.
    pub fn stats(&self) -> Option<Stats> {
        (self.process == std::process::id()).then(|| Stats::of(&self.context))
    }

    /// Every task that was done, if [`Options::record_tasks`](crate::Options::record_tasks) asked for them.
    pub fn spans(&self) -> Vec<Span> {
        if self.process == std::process::id() {
            self.context.telemetry.spans()
        } else {
            Vec::new()
        }
    }

    /// What the source calls its work.
    pub fn work(&self) -> Work {
        self.context.config.source().facts().work
    }
}
