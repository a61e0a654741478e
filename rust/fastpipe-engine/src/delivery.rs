//! Between tasks and consumers: batches are done in any order, and handed over in theirs.
//!
//! A consumer that finds no batch sleeps. To wake it interrupts another processor, which takes as long as to decode a
//! small batch. So where batches come fast it is woken for several at once: when half of those under way are ready,
//! when it has slept for [`GATHERING`], or when the threads have nothing else to do.

use std::collections::HashMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::{Error, ErrorKind, Result, Slab};
use fastpipe_files::Files;

use crate::batch::Batch;
use crate::budget::Reserved;
use crate::failure::explained;
use crate::telemetry::Telemetry;
use crate::threads::Chooser;
use crate::working_memory::WorkingMemory;

/// How long a consumer sleeps until it is woken for a single batch.
const GATHERING: Duration = Duration::from_micros(500);

/// A consumer that is away for so long does something with its batch.
const BUSY: Duration = Duration::from_micros(20);

/// A batch that is done, or what went wrong.
pub(crate) type Done = Result<(Box<Batch>, Option<Reserved>)>;

/// What a consumer finds.
pub(crate) enum Next {
    /// The next batch, its number, and how many runners must be started now that it is taken.
    Batch(u64, Box<Batch>, usize),
    /// There are no more.
    End,
    /// Not yet.
    Pending,
}

/// Where tasks leave batches, and consumers find them; and how a pass ends.
pub(crate) struct DeliveryQueue {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the consumer has gone, or has the error that ended the pass.
    closed: AtomicBool,
}

/// What is under way, and who waits for it.
#[derive(Default)]
struct State {
    /// The next batch to be handed over.
    next: u64,
    ready: HashMap<u64, Done>,
    /// The number of batches that were begun so far.
    begun: u64,
    /// The number of batches, once all are planned.
    end: Option<u64>,
    /// The error that ended the pass.
    failed: Option<Error>,
    /// When the consumer got its last batch, if it hasn't come back.
    left: Option<Instant>,
    chooser: Option<Chooser>,
    /// Consumers that sleep.
    asleep: u32,
    /// Since when, if it may be woken for several batches.
    gathering: Option<Instant>,
    /// Whether the last one didn't sleep for long.
    fast: bool,
}

impl DeliveryQueue {
    pub(crate) fn new(chooser: Option<Chooser>) -> Self {
        DeliveryQueue {
            state: Mutex::new(State {
                chooser,
                ..State::default()
            }),
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.closed.load(Ordering::Relaxed)
    }

    /// A batch is done, or has failed.
    pub(crate) fn put(&self, number: u64, done: Done) {
        let mut state = self.lock();
        state.ready.insert(number, done);
        let wake = state.must_wake(false);
        drop(state);
        if wake {
            self.changed.notify_all();
        }
    }

    /// There is nothing else to do: whoever sleeps shouldn't wait for more batches.
    pub(crate) fn wake_idle(&self) {
        if self.lock().must_wake(true) {
            self.changed.notify_all();
        }
    }

    /// All batches before this one were begun. Returns the next to be handed over; `None` if no more are to be begun.
    pub(crate) fn begins(&self, number: u64) -> Option<u64> {
        let mut state = self.lock();
        state.begun = number;
        state.end.is_none().then_some(state.next)
    }

    /// Ends the pass at a batch, in the place of which an error stands, if any; those before are still handed over.
    pub(crate) fn end_at(&self, number: u64, error: Option<Error>) {
        let mut state = self.lock();
        state.end = Some(number + u64::from(error.is_some()));
        if let Some(error) = error {
            state.ready.insert(number, Err(error));
        }
        self.changed.notify_all();
    }

    /// Batches that wait for the consumer.
    pub(crate) fn ready(&self) -> usize {
        self.lock().ready.len()
    }

    /// Whether the consumer is busy, and this many batches wait for it; and whether that many are there, busy or not.
    pub(crate) fn has_enough(&self, batches: usize) -> (bool, bool) {
        let state = self.lock();
        (state.lags(batches), state.has_ready(batches))
    }

    /// Ends the pass with an error, at the batch that would have come next.
    pub(crate) fn fail(&self, error: &Error) {
        let mut state = self.lock();
        if !self.is_closed() {
            state.failed.get_or_insert_with(|| error.clone());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// The consumer goes: from now on it is told that, whatever else happens or has happened.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        self.closed.store(true, Ordering::Relaxed);
        state.failed = None;
        drop(state);
        self.changed.notify_all();
    }

    /// Nobody wants more batches: the consumer has gone, or has the error. That error stays.
    pub(crate) fn end(&self) {
        self.closed.store(true, Ordering::Relaxed);
        // Whoever is about to sleep has seen it, or is woken.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Lets go of all batches that nobody has got.
    pub(crate) fn clear(&self) {
        let lost = std::mem::take(&mut self.lock().ready);
        drop(lost);
    }

    /// The next batch, if it is there within `wait`; or the error that ends the pass. `choose` is told how many were
    /// taken, and may choose another number of threads: it returns how many runners must be started for that.
    pub(crate) fn next(
        &self,
        wait: Duration,
        (telemetry, working_memory, files): (&Telemetry, &WorkingMemory, &Files),
        choose: impl FnOnce(&mut Chooser, u64) -> usize,
    ) -> Result<Next> {
        let mut state = self.wait(wait, telemetry);
        if let Some(error) = &state.failed {
            return Err(error.clone());
        }
        if self.is_closed() {
            let reason = "the pass was closed; iter(reader) starts a new one";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        if state.is_over() {
            self.check(&mut state, files)?;
            telemetry.end();
            return Ok(Next::End);
        }
        let number = state.next;
        match state.ready.remove(&number) {
            None => Ok(Next::Pending),
            Some(Err(error)) => {
                let error = explained(error, working_memory, files);
                state.failed = Some(error.clone());
                // They will never be handed over.
                let lost = std::mem::take(&mut state.ready);
                drop(state);
                self.changed.notify_all();
                drop(lost);
                working_memory.release_after(&error);
                Err(error)
            }
            Some(Ok((mut batch, reserved))) => {
                if state.end == Some(number + 1) {
                    // Some consumers count, and never see the end.
                    self.check(&mut state, files)?;
                }
                state.next += 1;
                let taken = state.next;
                let start = state.chooser.as_mut().map_or(0, |chooser| choose(chooser, taken));
                state.left = Some(Instant::now());
                let awaited = state.is_awaited();
                drop(state);
                if awaited {
                    self.changed.notify_all();
                }
                batch.slabs.iter_mut().for_each(Slab::hand_off);
                drop(reserved);
                Ok(Next::Batch(number, batch, start))
            }
        }
    }

    /// Waits until there is something for the consumer, for so long at most.
    fn wait(&self, wait: Duration, telemetry: &Telemetry) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        if let Some(left) = state.left.take() {
            telemetry.was_away(left.elapsed());
        }
        let nothing = |state: &State| !self.is_closed() && !state.has_something();
        if nothing(&state) {
            let since = Instant::now();
            state.sleep(since);
            let waited = self.changed.wait_timeout_while(state, wait, |state| nothing(state));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            let slept = since.elapsed();
            state.wake(slept);
            telemetry.waited(slept);
        }
        state
    }

    /// Ends the pass with an error if a file was changed while it was read.
    fn check(&self, state: &mut State, files: &Files) -> Result<()> {
        files.check().inspect_err(|error| {
            state.failed = Some(error.clone());
            self.changed.notify_all();
        })
    }
}

impl State {
    /// Whether there is something for the consumer: a batch, an error, or the end.
    fn has_something(&self) -> bool {
        self.failed.is_some() || self.is_over() || self.is_ready()
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }

    /// Whether the next batch, or what went wrong with it, is there.
    fn is_ready(&self) -> bool {
        self.ready.contains_key(&self.next)
    }

    /// Whether the next batch is there, and that many in all.
    fn has_ready(&self, batches: usize) -> bool {
        self.is_ready() && self.ready.len() >= batches
    }

    /// Whether the consumer is busy, and this many batches wait for it.
    fn lags(&self, batches: usize) -> bool {
        self.has_ready(batches) && self.left.is_some_and(|left| left.elapsed() > BUSY)
    }

    /// A consumer goes to sleep.
    fn sleep(&mut self, now: Instant) {
        self.asleep += 1;
        self.gathering = self.fast.then_some(now);
    }

    /// A consumer has slept so long.
    fn wake(&mut self, slept: Duration) {
        self.asleep -= 1;
        self.fast = slept < 2 * GATHERING;
    }

    /// Whether any consumer sleeps.
    fn is_awaited(&self) -> bool {
        self.asleep > 0
    }

    /// Whether one sleeps that should be woken by now, since there is a batch for it. `idle` if there is nothing else
    /// to do.
    fn must_wake(&self, idle: bool) -> bool {
        let enough = || 2 * self.ready.len() as u64 >= self.begun.saturating_sub(self.next);
        let slept_enough = || self.gathering.is_none_or(|since| since.elapsed() >= GATHERING);
        self.is_awaited() && self.is_ready() && (idle || enough() || slept_enough())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn put(state: &mut State, number: u64) {
        state.ready.insert(number, Err(Error::new(ErrorKind::Closed, "")));
    }

    fn with_ready(ready: &[u64]) -> State {
        let mut state = State {
            begun: 8,
            ..State::default()
        };
        for &number in ready {
            put(&mut state, number);
        }
        state
    }

    #[test]
    fn nobody_is_woken_for_other_batches_than_the_next() {
        let mut state = with_ready(&[1, 2, 3, 4, 5, 6, 7]);
        state.sleep(Instant::now());
        assert!(!state.must_wake(true));
        put(&mut state, 0);
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
        put(&mut state, 1);
        put(&mut state, 2);
        assert!(!state.must_wake(false));
        put(&mut state, 5);
        assert!(state.must_wake(false), "half of them");
    }

    #[test]
    fn the_first_error_counts_until_the_consumer_goes() {
        let error = |reason| Error::new(ErrorKind::Storage, reason);
        let reason = |delivery: &DeliveryQueue| delivery.lock().failed.as_ref().map(|e| e.reason().to_owned());
        let delivery = DeliveryQueue::new(None);
        delivery.fail(&error("first"));
        delivery.fail(&error("second"));
        delivery.end();
        assert!(delivery.is_closed());
        assert_eq!(reason(&delivery).as_deref(), Some("first"), "it outlasts the end");
        delivery.close();
        delivery.fail(&error("late"));
        assert_eq!(reason(&delivery), None);
    }

    #[test]
    fn an_error_that_ends_the_batches_is_one_of_them() {
        let delivery = DeliveryQueue::new(None);
        assert_eq!(delivery.begins(3), Some(0));
        delivery.end_at(3, Some(Error::new(ErrorKind::Limit, "too much")));
        assert_eq!((delivery.begins(3), delivery.ready()), (None, 1));
        assert_eq!(delivery.lock().end, Some(4));
        delivery.clear();
        assert_eq!(delivery.ready(), 0);
        delivery.end_at(3, None);
        assert_eq!(delivery.lock().end, Some(3));
        assert_eq!(delivery.ready(), 0);
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
