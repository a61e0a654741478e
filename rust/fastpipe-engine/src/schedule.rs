//! Which thread does what next.
//!
//! Work that is ready stands in a queue: that of the earliest batch first, and of one batch the longest first, as the
//! cost model expects it, so that the threads end together. A thread goes on where it just ended, though, if it can:
//! what it reads there is in the cache of its processor. *Runners* take from it, at most as many at once as are allowed
//! just now. A runner that finds the queue empty looks for work that waits for other work but could be started by
//! skipping some records (see `sequence/skip_ahead.rs`); if there is none it ends, and its thread sleeps until
//! something is put in the queue.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

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

struct Ready<P> {
    /// Greatest first.
    rank: (Reverse<u64>, u64, Reverse<u64>),
    since: Option<Instant>,
    part: P,
}

impl<P> PartialEq for Ready<P> {
    fn eq(&self, other: &Self) -> bool {
        self.rank == other.rank
    }
}

impl<P> Eq for Ready<P> {}

impl<P> PartialOrd for Ready<P> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl<P> Ord for Ready<P> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank.cmp(&other.rank)
    }
}

struct Queue<P> {
    ready: BinaryHeap<Ready<P>>,
    /// Work that goes on where a thread just ended, with the thread's number.
    next: Vec<(usize, Ready<P>)>,
    /// How often in a row threads went on with theirs although there was more urgent work.
    passed: u32,
    put: u64,
    /// Runners that were started and haven't ended.
    running: usize,
    /// Runners at once.
    allowed: usize,
}

/// How often in a row more urgent work may be passed by.
const MOST_PASSED: u32 = 4;

impl<P> Queue<P> {
    fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.next.is_empty()
    }

    /// Takes what a thread is to do.
    fn pop(&mut self, thread: usize) -> Option<Ready<P>> {
        let next = &self.next;
        let first = (0..next.len()).max_by(|&a, &b| next[a].1.cmp(&next[b].1));
        let first = first.filter(|&i| self.ready.peek().is_none_or(|ready| next[i].1 > *ready));
        let own = next.iter().position(|(whose, _)| *whose == thread);
        let chosen = own.filter(|_| self.passed < MOST_PASSED).or(first);
        self.passed = if chosen == first { 0 } else { self.passed + 1 };
        match chosen {
            Some(i) => Some(self.next.swap_remove(i).1),
            None => self.ready.pop(),
        }
    }
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

/// The queue of a pass. It doesn't know what the parts of the work are.
pub(crate) struct Schedule<P> {
    queue: Mutex<Queue<P>>,
    /// Nanoseconds and number of starts on threads that had slept.
    delayed: (AtomicU64, AtomicU64),
}

impl<P> Schedule<P> {
    pub(crate) fn new(allowed: usize) -> Schedule<P> {
        Schedule {
            queue: Mutex::new(Queue {
                ready: BinaryHeap::new(),
                next: Vec::new(),
                passed: 0,
                put: 0,
                running: 0,
                allowed: allowed.max(1),
            }),
            delayed: Default::default(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, Queue<P>> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Puts work in the queue; `thread` if it goes on where that one just ended. True if a runner must be started for
    /// it.
    #[must_use]
    pub(crate) fn put(&self, urgency: Urgency, thread: Option<usize>, part: P) -> bool {
        let mut queue = self.lock();
        let start = queue.running < queue.allowed;
        queue.put += 1;
        let rank = (Reverse(urgency.batch), urgency.cost, Reverse(queue.put));
        let ready = Ready {
            rank,
            since: start.then(Instant::now),
            part,
        };
        match thread {
            Some(thread) => queue.next.push((thread, ready)),
            None => queue.ready.push(ready),
        }
        queue.running += usize::from(start);
        start
    }

    /// Counts a runner more, that looks for work which is in no queue. False if as many run as may.
    #[must_use]
    pub(crate) fn start(&self) -> bool {
        let mut queue = self.lock();
        let start = queue.running < queue.allowed;
        queue.running += usize::from(start);
        start
    }

    /// The next work for a runner on this thread; `None` if there is none, or too many run.
    pub(crate) fn take(&self, thread: usize) -> Option<P> {
        let mut queue = self.lock();
        if queue.running > queue.allowed {
            return None;
        }
        let ready = queue.pop(thread)?;
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
        if !queue.is_empty() && queue.running <= queue.allowed {
            return End::NotYet;
        }
        queue.running -= 1;
        match queue.running {
            0 => End::Last,
            _ => End::Ended,
        }
    }

    /// Lets this many run at once from now on. Returns how many must be started for what is in the queue.
    pub(crate) fn allow(&self, threads: usize) -> usize {
        let mut queue = self.lock();
        queue.allowed = threads.max(1);
        let start = queue
            .allowed
            .saturating_sub(queue.running)
            .min(queue.ready.len() + queue.next.len());
        queue.running += start;
        start
    }

    /// Whether others run besides the one that asks, or something is in the queue.
    pub(crate) fn is_busy(&self) -> bool {
        let queue = self.lock();
        queue.running > 1 || !queue.is_empty()
    }

    /// How many may run at once.
    pub(crate) fn allowed(&self) -> usize {
        self.lock().allowed
    }

    /// How long it took until threads that slept did something, all together, in nanoseconds.
    pub(crate) fn delays(&self) -> u64 {
        self.delayed.0.load(Ordering::Relaxed)
    }

    /// How long it takes until a thread that slept does something, in nanoseconds; 0 before one has.
    pub(crate) fn delay(&self) -> u64 {
        let count = self.delayed.1.load(Ordering::Relaxed);
        self.delayed.0.load(Ordering::Relaxed).checked_div(count).unwrap_or(0)
    }

    /// Forgets what is in the queue.
    pub(crate) fn clear(&self) {
        let mut queue = self.lock();
        let dropped = (std::mem::take(&mut queue.ready), std::mem::take(&mut queue.next));
        drop(queue);
        drop(dropped);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Any work will do.
    fn part() -> char {
        'x'
    }

    #[test]
    fn early_batches_come_first_and_of_one_the_longest() {
        let schedule = Schedule::new(1);
        for (batch, cost) in [(3, 10), (1, 5), (1, 50), (2, 7)] {
            let _ = schedule.put(Urgency { batch, cost }, None, part());
        }
        let order: Vec<_> = std::iter::from_fn(|| schedule.lock().ready.pop())
            .map(|r| (r.rank.0.0, r.rank.1))
            .collect();
        assert_eq!(order, [(1, 50), (1, 5), (2, 7), (3, 10)]);
    }

    #[test]
    fn a_thread_goes_on_where_it_ended_but_not_for_ever() {
        let schedule = Schedule::new(1);
        let put = |batch, thread| {
            let _ = schedule.put(Urgency { batch, cost: 0 }, thread, part());
        };
        let pop = |thread| schedule.lock().pop(thread).map(|ready| ready.rank.0.0);
        for batch in 1..=3 {
            put(batch, None);
        }
        put(2, Some(7));
        put(9, Some(1));
        assert_eq!(pop(1), Some(9), "its own");
        assert_eq!(pop(1), Some(1), "the most urgent");
        assert_eq!(pop(1), Some(2));
        assert_eq!(pop(1), Some(2), "somebody else's, who has not come for it");
        for batch in 10..20 {
            put(batch, Some(1));
        }
        let taken: Vec<_> = std::iter::from_fn(|| pop(1)).collect();
        let urgent = taken.iter().position(|&batch| batch == 3);
        assert_eq!((urgent, taken.len()), (Some(MOST_PASSED as usize), 11), "{taken:?}");
    }

    #[test]
    fn no_more_run_than_are_allowed_and_none_is_forgotten() {
        let schedule = Schedule::new(2);
        let urgency = Urgency { batch: 0, cost: 0 };
        let started: Vec<_> = (0..4).map(|_| schedule.put(urgency, None, part())).collect();
        assert_eq!(started, [true, true, false, false]);
        assert!(!schedule.start(), "as many run as may");
        assert_eq!(schedule.allow(3), 1);
        assert_eq!(schedule.allow(1), 0);
        assert!(
            schedule.take(0).is_none() && schedule.end() == End::Ended,
            "one too many"
        );
        assert!(schedule.take(0).is_none() && schedule.end() == End::Ended, "another");
        assert!(schedule.end() == End::NotYet, "there is work");
        for _ in 0..4 {
            assert!(schedule.take(0).is_some());
        }
        assert!(schedule.take(0).is_none());
        assert!(
            !schedule.put(urgency, None, part()) && schedule.end() == End::NotYet,
            "what came meanwhile is seen"
        );
        assert!(schedule.take(0).is_some() && schedule.end() == End::Last);
        assert!(
            schedule.start() && schedule.end() == End::Last,
            "one that found nothing"
        );
    }
}
