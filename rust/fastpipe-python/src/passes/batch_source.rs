//! Where the batches of a pass come from: the engine in this process, or others who send them.

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::Error;
use fastpipe_engine::{PassObserver, Poll, Stats, Stream};
use fastpipe_wire::Feed;

/// Yields the batches of a pass, one after the other.
pub(crate) enum Supply {
    /// This process makes them.
    Engine(Stream),
    /// Others make them.
    Remote(Arc<Feed>),
}

impl Supply {
    /// The next batch, if it is there within `wait`.
    pub(crate) fn poll(&self, wait: Duration) -> Result<Poll, Error> {
        match self {
            Supply::Engine(stream) => stream.poll(wait),
            Supply::Remote(feed) => feed.poll(wait),
        }
    }

    /// Ends the pass with an error.
    pub(crate) fn fail(&self, error: Error) {
        match self {
            Supply::Engine(stream) => stream.fail(error),
            Supply::Remote(feed) => {
                feed.fail(0, error);
                feed.close();
            }
        }
    }

    /// Ends the pass.
    pub(crate) fn close(&self) {
        match self {
            Supply::Engine(stream) => stream.close(),
            Supply::Remote(feed) => feed.close(),
        }
    }

    /// A look at the pass, which may outlast it.
    pub(crate) fn look(&self) -> Look {
        match self {
            Supply::Engine(stream) => Look::Engine(stream.observer()),
            Supply::Remote(feed) => Look::Remote(feed.clone()),
        }
    }
}

impl Drop for Supply {
    fn drop(&mut self) {
        // Those who send batches have the feed, too. A stream ends by itself.
        if let Supply::Remote(feed) = self {
            feed.close();
        }
    }
}

/// A task that was done: what, for which batch, by which thread, when it started, when it ended, and how long it was
/// expected to take.
pub(crate) type Task = (&'static str, u64, u32, u64, u64, u64);

/// A look at a pass.
pub(crate) enum Look {
    Engine(PassObserver),
    Remote(Arc<Feed>),
}

impl Look {
    /// What the pass has done, and where its time went. `None` in a forked child, where it isn't the child's.
    pub(crate) fn stats(&self) -> Option<Stats> {
        let feed = match self {
            Look::Engine(observer) => return observer.stats(),
            Look::Remote(feed) => feed,
        };
        if !feed.is_ours() {
            return None;
        }
        let seen = feed.look();
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

    /// Every task that was done, if they were recorded.
    pub(crate) fn tasks(&self) -> Vec<Task> {
        let Look::Engine(observer) = self else {
            return Vec::new();
        };
        let (spans, work) = (observer.spans().into_iter(), observer.work());
        spans
            .map(|s| (s.activity.name(work), s.batch, s.thread, s.start, s.end, s.expected))
            .collect()
    }
}
