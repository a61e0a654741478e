//! A pass whose batches are produced by other processes.

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::{Error, Result};
use fastpipe_engine::{BatchSource, ObservePass, Poll, Stats};

use crate::feed::Feed;

/// The batches that arrive in a feed. The feed is closed when this is dropped, because the tasks that receive batches
/// share it.
pub struct RemoteBatches(pub Arc<Feed>);

impl BatchSource for RemoteBatches {
    fn poll(&self, wait: Duration) -> Result<Poll> {
        self.0.poll(wait)
    }

    fn fail(&self, error: Error) {
        self.0.fail(0, error);
        self.0.close();
    }

    fn close(&self) {
        self.0.close();
    }

    fn is_local(&self) -> bool {
        false
    }

    fn observe(&self) -> Box<dyn ObservePass> {
        Box::new(RemotePass(self.0.clone()))
    }
}

impl Drop for RemoteBatches {
    fn drop(&mut self) {
        self.0.close();
    }
}

/// Statistics of a pass whose batches arrive in a feed.
struct RemotePass(Arc<Feed>);

impl ObservePass for RemotePass {
    fn stats(&self) -> Option<Stats> {
        if !self.0.is_ours() {
            return None;
        }
        let seen = self.0.look();
        Some(Stats {
            batches: seen.batches,
            rows: seen.rows,
            bytes_delivered: seen.bytes,
            ready: usize::try_from(seen.ready).unwrap_or(usize::MAX),
            elapsed: seen.elapsed,
            consumer_waited: seen.waited,
            consumer_away: seen.away,
            slab_bytes: seen.ready_bytes,
            ..Stats::default()
        })
    }
}
