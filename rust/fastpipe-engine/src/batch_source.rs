//! The origin of the batches of a pass: threads of this process, or other processes that send them.

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::{Error, Result};

use crate::observer::PassObserver;
use crate::stats::Stats;
use crate::stream::{Poll, Stream};
use crate::telemetry::Telemetry;

/// Yields the batches of a pass in order. Dropping it ends the pass.
pub trait BatchSource: Send + Sync {
    /// Returns the next batch if it arrives within `wait`.
    ///
    /// # Errors
    /// Returns the error that ended the pass.
    fn poll(&self, wait: Duration) -> Result<Poll>;

    /// Ends the pass with an error.
    fn fail(&self, error: Error);

    /// Ends the pass.
    fn close(&self);

    /// Whether this process produces the batches.
    fn is_local(&self) -> bool;

    /// Returns an observer of the pass, which may outlive it.
    fn observe(&self) -> Box<dyn ObservePass>;

    /// The counters of the pass's work, if this process produces the batches.
    fn telemetry(&self) -> Option<Arc<Telemetry>> {
        None
    }
}

/// An observer of a pass.
pub trait ObservePass: Send + Sync {
    /// Returns statistics of the pass. `None` in a forked child, since the pass belongs to its parent.
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
