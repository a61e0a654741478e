//! Between tasks and consumers: batches are done in any order, and handed over in theirs.
//!
//! A consumer that finds no batch sleeps. To wake it interrupts another processor, which takes as long as to decode a small
//! batch. So where batches come fast it is woken for several at once: when half of those under way are ready, when it has slept
//! for [`GATHERING`], or when the threads have nothing else to do.

use std::collections::HashMap;
use std::time::{Duration, Instant};

use fastpipe_batch::{Error, Result};

use crate::batch::Batch;
use crate::budget::Reserved;
use crate::threads::Chooser;

/// How long a consumer sleeps until it is woken for a single batch.
const GATHERING: Duration = Duration::from_micros(500);

/// A consumer that is away for so long does something with its batch.
const BUSY: Duration = Duration::from_micros(20);

/// A batch that is done, or what went wrong.
pub(crate) type Done = Result<(Box<Batch>, Option<Reserved>)>;

/// What is under way, and who waits for it.
#[derive(Default)]
pub(crate) struct HandOver {
    /// The next batch to be handed over.
    pub(crate) next: u64,
    pub(crate) ready: HashMap<u64, Done>,
    /// The number of batches that were begun so far.
    pub(crate) begun: u64,
    /// The number of batches, once all are planned.
    pub(crate) end: Option<u64>,
    /// The error that ended the pass.
    pub(crate) failed: Option<Error>,
    /// When the consumer got its last batch, if it hasn't come back.
    pub(crate) left: Option<Instant>,
    pub(crate) chooser: Option<Chooser>,
    /// Consumers that sleep.
    asleep: u32,
    /// Since when, if it may be woken for several batches.
    gathering: Option<Instant>,
    /// Whether the last one didn't sleep for long.
    fast: bool,
}

impl HandOver {
    pub(crate) fn new(chooser: Option<Chooser>) -> Self {
        HandOver {
            chooser,
            ..HandOver::default()
        }
    }

    pub(crate) fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }

    /// Whether the next batch, or what went wrong with it, is there.
    pub(crate) fn is_ready(&self) -> bool {
        self.ready.contains_key(&self.next)
    }

    /// Whether the next batch is there, and so many in all.
    pub(crate) fn has_ready(&self, batches: usize) -> bool {
        self.is_ready() && self.ready.len() >= batches
    }

    /// Whether the consumer is busy, and so many batches wait for it.
    pub(crate) fn lags(&self, batches: usize) -> bool {
        self.has_ready(batches) && self.left.is_some_and(|left| left.elapsed() > BUSY)
    }

    pub(crate) fn put(&mut self, number: u64, done: Done) {
        self.ready.insert(number, done);
    }

    /// A consumer goes to sleep.
    pub(crate) fn sleep(&mut self, now: Instant) {
        self.asleep += 1;
        self.gathering = self.fast.then_some(now);
    }

    /// A consumer has slept so long.
    pub(crate) fn wake(&mut self, slept: Duration) {
        self.asleep -= 1;
        self.fast = slept < 2 * GATHERING;
    }

    /// Whether any consumer sleeps.
    pub(crate) fn is_awaited(&self) -> bool {
        self.asleep > 0
    }

    /// Whether one sleeps that should be woken by now, since there is a batch for it. `idle` if there is nothing else to do.
    pub(crate) fn must_wake(&self, idle: bool) -> bool {
        let enough = || 2 * self.ready.len() as u64 >= self.begun.saturating_sub(self.next);
        let slept_enough = || self.gathering.is_none_or(|since| since.elapsed() >= GATHERING);
        self.is_awaited() && self.is_ready() && (idle || enough() || slept_enough())
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::ErrorKind;

    use super::*;

    fn with_ready(ready: &[u64]) -> HandOver {
        let mut state = HandOver {
            begun: 8,
            ..HandOver::default()
        };
        for &number in ready {
            state.put(number, Err(Error::new(ErrorKind::Closed, "")));
        }
        state
    }

    #[test]
    fn nobody_is_woken_for_other_batches_than_the_next() {
        let mut state = with_ready(&[1, 2, 3, 4, 5, 6, 7]);
        state.sleep(Instant::now());
        assert!(!state.must_wake(true));
        state.put(0, Err(Error::new(ErrorKind::Closed, "")));
        assert!(state.must_wake(false));
        state.wake(Duration::ZERO);
        assert!(!state.must_wake(true), "nobody sleeps");
    }

    #[test]
    fn who_got_batches_fast_is_woken_for_several() {
        let mut state = with_ready(&[0]);
        state.sleep(Instant::now());
        assert!(state.must_wake(false), "nothing is known of how fast they come");
        state.wake(Duration::from_micros(100));
        state.sleep(Instant::now());
        assert!(!state.must_wake(false));
        assert!(state.must_wake(true), "no more will come");
        state.put(1, Err(Error::new(ErrorKind::Closed, "")));
        state.put(2, Err(Error::new(ErrorKind::Closed, "")));
        assert!(!state.must_wake(false));
        state.put(5, Err(Error::new(ErrorKind::Closed, "")));
        assert!(state.must_wake(false), "half of them");
    }

    #[test]
    fn only_a_consumer_that_does_something_lags() {
        let mut state = with_ready(&[0, 1]);
        assert!(!state.lags(2), "it waits");
        state.left = Some(Instant::now());
        std::thread::sleep(2 * BUSY);
        assert!(state.lags(2) && !state.lags(3));
        state.left = Some(Instant::now() + GATHERING);
        assert!(!state.lags(2), "it has only just left");
    }

    #[test]
    fn who_slept_for_long_is_woken_for_one() {
        let mut state = with_ready(&[0]);
        state.sleep(Instant::now());
        state.wake(Duration::ZERO);
        state.sleep(Instant::now());
        assert!(!state.must_wake(false));
        std::thread::sleep(GATHERING);
        assert!(state.must_wake(false));
        state.wake(3 * GATHERING);
        state.sleep(Instant::now());
        assert!(state.must_wake(false), "batches come slowly");
    }
}
