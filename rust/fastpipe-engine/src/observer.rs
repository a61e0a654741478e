//! An observer of a pass that is running or has ended.

use std::sync::Arc;

use crate::pass::PassContext;
use crate::stats::Stats;

/// An observer of a pass.
pub struct PassObserver {
    pub(crate) context: Arc<PassContext>,
    pub(crate) process: u32,
}

impl PassObserver {
    /// Returns statistics of the pass. `None` in a forked child, since the pass belongs to its parent.
    pub fn stats(&self) -> Option<Stats> {
        (self.process == std::process::id()).then(|| Stats::of(&self.context))
    }
}
