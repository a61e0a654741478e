//! A look at a pass that runs, or has ended.

use std::sync::Arc;

use crate::pass::PassContext;
use crate::stats::Stats;

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
}
