//! Assignment of tasks to threads.
//!
//! Ready tasks wait in a queue. Tasks of the earliest batch come first. Within a batch, the tasks that are expected to
//! take longest come first, so that all threads finish at about the same time. If possible, a thread continues where
//! its last task ended, since that data is in its processor's cache.
//!
//! *Runners* take tasks from the queue; the number of runners is limited. A runner that finds the queue empty looks for
//! a parked task that could start if some records were skipped (see `sequence/skip_ahead.rs`). If it finds none, it
//! ends. Its thread then sleeps until a task is put into the queue.

use std::cmp::Reverse;
use std::collections::BinaryHeap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Instant;

/// The urgency of a task.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Urgency {
    /// The batch that needs the task.
    pub(crate) batch: u64,
    /// Nanoseconds that the task is expected to take.
    pub(crate) cost: u64,
}

impl Urgency {
    /// More urgent than every other task.
    pub(crate) const FIRST: Urgency = Urgency {
        batch: 0,
        cost: u64::MAX,
    };
}

struct Ready<P> {
    /// The greatest rank comes first.
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
    /// Tasks that continue where a thread's last task ended, each with the index of that thread.
    next: Vec<(usize, Ready<P>)>,
    /// How often in a row threads preferred their own task to a more urgent one.
    passed: u32,
    put: u64,
    /// Runners that have started and not ended.
    running: usize,
    /// The maximum number of runners.
    allowed: usize,
}

/// How often in a row threads may prefer their own task to a more urgent one.
const MOST_PASSED: u32 = 4;

impl<P> Queue<P> {
    fn is_empty(&self) -> bool {
        self.ready.is_empty() && self.next.is_empty()
    }

    /// Takes the next task for `thread`.
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

/// The result of a runner's request to end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum End {
    /// The runner must check again, because new tasks have arrived.
    NotYet,
    /// The runner has ended; other runners are active.
    Ended,
    /// The runner has ended, and no other runner is active.
    Last,
}

/// The queue of a pass. It is generic over the type of the tasks.
pub(crate) struct Schedule<P> {
    queue: Mutex<Queue<P>>,
    /// Total nanoseconds and number of starts of threads that had been sleeping.
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

    /// Puts a task into the queue. Pass `thread` if the task continues where that thread's last task ended. Returns
    /// true if the caller must start a runner for it.
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

    /// Counts another runner, which looks for work outside the queue. Returns false if the maximum number of runners is
    /// active.
    #[must_use]
    pub(crate) fn start(&self) -> bool {
        let mut queue = self.lock();
        let start = queue.running < queue.allowed;
        queue.running += usize::from(start);
        start
    }

    /// Returns the next task for a runner on this thread. Returns `None` if the queue is empty or too many runners are
    /// active.
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

    /// Ends a runner, unless it must check the queue again.
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

    /// Sets the maximum number of runners. Returns how many must be started for the tasks in the queue.
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

    /// Whether runners other than the caller are active, or tasks are in the queue.
    pub(crate) fn is_busy(&self) -> bool {
        let queue = self.lock();
        queue.running > 1 || !queue.is_empty()
    }

    /// The maximum number of runners.
    pub(crate) fn allowed(&self) -> usize {
        self.lock().allowed
    }

    /// Nanoseconds from waking threads until they ran, summed over all starts.
    pub(crate) fn delays(&self) -> u64 {
        self.delayed.0.load(Ordering::Relaxed)
    }

    /// Average nanoseconds from waking a thread until it runs; 0 before the first start.
    pub(crate) fn delay(&self) -> u64 {
        let count = self.delayed.1.load(Ordering::Relaxed);
        self.delayed.0.load(Ordering::Relaxed).checked_div(count).unwrap_or(0)
    }

    /// Drops all tasks in the queue.
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

    /// A placeholder for any task.
    fn part() -> char {
        'x'
    }

    #[test]
    fn early_batches_come_first_then_long_tasks() {
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
    fn a_thread_continues_its_own_tasks_for_a_bounded_time() {
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
        assert_eq!(pop(1), Some(9), "the thread's own task");
        assert_eq!(pop(1), Some(1), "the most urgent task");
        assert_eq!(pop(1), Some(2));
        assert_eq!(pop(1), Some(2), "a task of another thread that has not taken it");
        for batch in 10..20 {
            put(batch, Some(1));
        }
        let taken: Vec<_> = std::iter::from_fn(|| pop(1)).collect();
        let urgent = taken.iter().position(|&batch| batch == 3);
        assert_eq!((urgent, taken.len()), (Some(MOST_PASSED as usize), 11), "{taken:?}");
    }

    #[test]
    fn runners_stay_within_the_limit_and_run_every_task() {
        let schedule = Schedule::new(2);
        let urgency = Urgency { batch: 0, cost: 0 };
        let started: Vec<_> = (0..4).map(|_| schedule.put(urgency, None, part())).collect();
        assert_eq!(started, [true, true, false, false]);
        assert!(!schedule.start(), "the maximum is running");
        assert_eq!(schedule.allow(3), 1);
        assert_eq!(schedule.allow(1), 0);
        assert!(
            schedule.take(0).is_none() && schedule.end() == End::Ended,
            "one runner too many"
        );
        assert!(
            schedule.take(0).is_none() && schedule.end() == End::Ended,
            "another runner too many"
        );
        assert!(schedule.end() == End::NotYet, "there are tasks");
        for _ in 0..4 {
            assert!(schedule.take(0).is_some());
        }
        assert!(schedule.take(0).is_none());
        assert!(
            !schedule.put(urgency, None, part()) && schedule.end() == End::NotYet,
            "tasks that arrived in the meantime are seen"
        );
        assert!(schedule.take(0).is_some() && schedule.end() == End::Last);
        assert!(
            schedule.start() && schedule.end() == End::Last,
            "a runner that found no task"
        );
    }
}
