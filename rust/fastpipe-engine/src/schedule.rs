//! Which thread does what next.
//!
//! Work that is ready stands in a queue: that of the earliest batch first, and of one batch the longest first, as the cost
//! model expects it, so that the threads end together. *Runners* take from it, at most as many at once as are allowed just now.
//! A runner that finds the queue empty looks for work that waits for other work but could be started by passing over some
//! records (see `sequence.rs`); if there is none it ends, and its thread sleeps until something is put in the queue.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Instant;

use fastpipe_batch::Result;

use crate::stream::Shared;

/// Work, and what it is done for.
type Part = Box<dyn FnOnce(&Arc<Shared>) -> Result<()> + Send>;

/// How urgent work is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    /// The batch that needs it.
    pub(crate) batch: u64,
    /// Nanoseconds that it will take.
    pub(crate) cost: u64,
}

impl Urgency {
    /// Before everything else.
    pub(crate) const FIRST: Urgency = Urgency {
        batch: 0,
        cost: u64::MAX,
    };
}

struct Ready {
    /// Greatest first.
    rank: (Reverse<u64>, u64, Reverse<u64>),
    since: Option<Instant>,
    part: Part,
}

impl PartialEq for Ready {
    fn eq(&self, other: &Self) -> bool {
        self.rank == other.rank
    }
}

impl Eq for Ready {}

impl PartialOrd for Ready {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Ready {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank.cmp(&other.rank)
    }
}

#[derive(Default)]
struct Queue {
    ready: BinaryHeap<Ready>,
    put: u64,
    /// Runners that were started and haven't ended.
    running: usize,
    /// Runners at once.
    allowed: usize,
}

/// What becomes of a runner that wants to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// It must look again, since work came meanwhile.
    NotYet,
    /// It has ended; others run.
    Ended,
    /// It has ended, and no other runs.
    Last,
}

/// The queue of a pass.
pub(crate) struct Schedule {
    queue: Mutex<Queue>,
    /// Nanoseconds and number of starts on threads that had slept.
    delayed: (AtomicU64, AtomicU64),
}

impl Schedule {
    pub(crate) fn new(allowed: usize) -> Schedule {
        Schedule {
            queue: Mutex::new(Queue {
                allowed: allowed.max(1),
                ..Queue::default()
            }),
            delayed: Default::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts work in the queue. True if a runner must be started for it.
    #[must_use]
    pub(crate) fn put(&self, urgency: Urgency, part: Part) -> bool {
        let mut queue = self.lock();
        let start = queue.running < queue.allowed;
        queue.put += 1;
        let rank = (Reverse(urgency.batch), urgency.cost, Reverse(queue.put));
        queue.ready.push(Ready {
            rank,
            since: start.then(Instant::now),
            part,
        });
        queue.running += usize::from(start);
        start
    }

    /// The next work for a runner; `None` if there is none, or too many run.
    pub(crate) fn take(&self) -> Option<Part> {
        let mut queue = self.lock();
        if queue.running > queue.allowed {
            return None;
        }
        let ready = queue.ready.pop()?;
        drop(queue);
        if let Some(since) = ready.since {
            self.delayed
                .0
                .fetch_add(since.elapsed().as_nanos() as u64, Ordering::Relaxed);
            self.delayed.1.fetch_add(1, Ordering::Relaxed);
        }
        Some(ready.part)
    }

    /// A runner wants to end: whether it may.
    pub(crate) fn end(&self) -> End {
        let mut queue = self.lock();
        if !queue.ready.is_empty() && queue.running <= queue.allowed {
            return End::NotYet;
        }
        queue.running -= 1;
        match queue.running {
            0 => End::Last,
            _ => End::Ended,
        }
    }

    /// Lets so many run at once from now on. Returns how many must be started for what is in the queue.
    pub(crate) fn allow(&self, threads: usize) -> usize {
        let mut queue = self.lock();
        queue.allowed = threads.max(1);
        let start = queue.allowed.saturating_sub(queue.running).min(queue.ready.len());
        queue.running += start;
        start
    }

    /// Whether others run besides the one that asks, or something is in the queue.
    pub(crate) fn is_busy(&self) -> bool {
        let queue = self.lock();
        queue.running > 1 || !queue.ready.is_empty()
    }

    /// How many may run at once.
    pub(crate) fn allowed(&self) -> usize {
        self.lock().allowed
    }

    /// How long it takes until a thread that slept does something, in nanoseconds; 0 before one has.
    pub(crate) fn delay(&self) -> u64 {
        let count = self.delayed.1.load(Ordering::Relaxed);
        self.delayed.0.load(Ordering::Relaxed).checked_div(count).unwrap_or(0)
    }

    /// Forgets what is in the queue.
    pub(crate) fn clear(&self) {
        let ready = std::mem::take(&mut self.lock().ready);
        drop(ready);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn part() -> Part {
        Box::new(|_| Ok(()))
    }

    #[test]
    fn early_batches_come_first_and_of_one_the_longest() {
        let schedule = Schedule::new(1);
        for (batch, cost) in [(3, 10), (1, 5), (1, 50), (2, 7)] {
            let _ = schedule.put(Urgency { batch, cost }, part());
        }
        let order: Vec<_> = std::iter::from_fn(|| schedule.lock().ready.pop())
            .map(|r| (r.rank.0.0, r.rank.1))
            .collect();
        assert_eq!(order, [(1, 50), (1, 5), (2, 7), (3, 10)]);
    }

    #[test]
    fn no_more_run_than_are_allowed_and_none_is_forgotten() {
        let schedule = Schedule::new(2);
        let urgency = Urgency { batch: 0, cost: 0 };
        let started: Vec<_> = (0..4).map(|_| schedule.put(urgency, part())).collect();
        assert_eq!(started, [true, true, false, false]);
        assert_eq!(schedule.allow(3), 1);
        assert_eq!(schedule.allow(1), 0);
        assert!(
            schedule.take().is_none() && schedule.end() == End::Ended,
            "one too many"
        );
        assert!(schedule.take().is_none() && schedule.end() == End::Ended, "another");
        assert!(schedule.end() == End::NotYet, "there is work");
        for _ in 0..4 {
            assert!(schedule.take().is_some());
        }
        assert!(schedule.take().is_none());
        assert!(
            !schedule.put(urgency, part()) && schedule.end() == End::NotYet,
            "what came meanwhile is seen"
        );
        assert!(schedule.take().is_some() && schedule.end() == End::Last);
    }
}
