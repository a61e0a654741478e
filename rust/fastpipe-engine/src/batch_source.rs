//! The source of the batches of a pass: threads of this process, or other processes that send them.

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::{Error, Result};

use crate::observer::PassObserver;
use crate::stats::Stats;
use crate::stream::{Poll, Stream};
use crate::telemetry::Telemetry;

/// Yields the batches of a pass, one after the other. The pass ends when it is dropped.
pub trait BatchSource: Send + Sync {
    /// The next batch, if it is there within `wait`.
    ///
    /// # Errors
    /// What ended the pass.
    fn poll(&self, wait: Duration) -> Result<Poll>;

    /// Ends the pass with an error.
    fn fail(&self, error: Error);

    /// Ends the pass.
    fn close(&self);

    /// Whether this process makes the batches.
    fn is_local(&self) -> bool;

    /// A look at the pass, which may outlast it.
    fn observe(&self) -> Box<dyn ObservePass>;

    /// The counters of its work, if this process makes the batches.
    fn telemetry(&self) -> Option<Arc<Telemetry>> {
        None
    }
}

/// A look at a pass.
pub trait ObservePass: Send + Sync {
    /// The work that the pass has done, and the time it took. `None` in a forked child, where it isn't the child's.
    fn stats(&self) -> Option<Stats>;
}

impl BatchSource for Stream {
    fn poll(&self, wait: Duration) -> Result<Poll> {
        Stream::poll(self, wait)
    }

    fn fail(&self, error: Error) {
        Stream::fail(self, error);
    }

    fn close(&self) {
        Stream::close(self);
    }

    fn is_local(&self) -> bool {
        true
    }

    fn observe(&self) -> Box<dyn ObservePass> {
        Box::new(self.observer())
    }

    fn telemetry(&self) -> Option<Arc<Telemetry>> {
        Some(self.observer().context.telemetry.clone())
    }
}

impl ObservePass for PassObserver {
    fn stats(&self) -> Option<Stats> {
        PassObserver::stats(self)
    }
}
