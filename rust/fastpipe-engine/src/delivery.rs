//! Delivery of batches: tasks finish them in any order, and consumers receive them in order.
//!
//! A consumer that finds no batch sleeps. Waking it interrupts another processor, which takes as long as decoding a
//! small batch. So if batches arrive quickly, the consumer is woken for several at once. It is woken when half of the
//! batches in flight are ready, when it has slept for [`GATHERING`], or when all threads are idle.

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

/// How long a consumer sleeps before it is woken for a single batch.
const GATHERING: Duration = Duration::from_micros(500);

/// A consumer that takes longer than this between calls is processing its batch.
const BUSY: Duration = Duration::from_micros(20);

/// A finished batch, or the error that prevented it.
pub(crate) type Done = Result<(Box<Batch>, Option<Reserved>)>;

/// The result of a consumer's request for the next batch.
pub(crate) enum Next {
    /// The next batch, its index, and how many runners must be started now that it is taken.
    Batch(u64, Box<Batch>, usize),
    /// All batches were delivered.
    End,
    /// No batch is ready yet.
    Pending,
}

/// The queue in which tasks put finished batches and consumers find them. It also records how a pass ends.
pub(crate) struct DeliveryQueue {
    state: Mutex<State>,
    changed: Condvar,
    /// Whether the consumer has closed the pass, or has received the error that ended it.
    closed: AtomicBool,
}

/// Finished batches and waiting consumers.
#[derive(Default)]
struct State {
    /// The next batch to deliver.
    next: u64,
    ready: HashMap<u64, Done>,
    /// Number of batches that were started so far.
    begun: u64,
    /// Total number of batches, once all are planned.
    end: Option<u64>,
    /// The error that ended the pass.
    failed: Option<Error>,
    /// When the consumer received its last batch, if it hasn't returned for the next.
    left: Option<Instant>,
    chooser: Option<Chooser>,
    /// Number of consumers that sleep.
    asleep: u32,
    /// When the consumer fell asleep, if it may be woken for several batches at once.
    gathering: Option<Instant>,
    /// Whether the last sleep of a consumer was short.
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

    /// Adds a finished batch, or the error that prevented it.
    pub(crate) fn put(&self, number: u64, done: Done) {
        let mut state = self.lock();
        state.ready.insert(number, done);
        let wake = state.must_wake(false);
        drop(state);
        if wake {
            self.changed.notify_all();
        }
    }

    /// Wakes a sleeping consumer for a single batch, because no remaining work could finish more batches.
    pub(crate) fn wake_idle(&self) {
        if self.lock().must_wake(true) {
            self.changed.notify_all();
        }
    }

    /// Records that all batches before `number` were started. Returns the next batch to deliver, or `None` if no more
    /// batches may be started.
    pub(crate) fn begins(&self, number: u64) -> Option<u64> {
        let mut state = self.lock();
        state.begun = number;
        state.end.is_none().then_some(state.next)
    }

    /// Ends the pass at batch `number`, which is replaced by `error` if there is one. Earlier batches are still
    /// delivered.
    pub(crate) fn end_at(&self, number: u64, error: Option<Error>) {
        let mut state = self.lock();
        state.end = Some(number + u64::from(error.is_some()));
        if let Some(error) = error {
            state.ready.insert(number, Err(error));
        }
        self.changed.notify_all();
    }

    /// Number of batches that wait for the consumer.
    pub(crate) fn ready(&self) -> usize {
        self.lock().ready.len()
    }

    /// Returns whether the consumer is busy while this many batches wait, and whether this many batches wait at all.
    pub(crate) fn has_enough(&self, batches: usize) -> (bool, bool) {
        let state = self.lock();
        (state.lags(batches), state.has_ready(batches))
    }

    /// Ends the pass with an error, which the consumer gets instead of the next batch.
    pub(crate) fn fail(&self, error: &Error) {
        let mut state = self.lock();
        if !self.is_closed() {
            state.failed.get_or_insert_with(|| error.clone());
        }
        drop(state);
        self.changed.notify_all();
    }

    /// Closes the pass for the consumer. From now on, calls return that it was closed, even if an error occurs or has
    /// occurred.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        self.closed.store(true, Ordering::Relaxed);
        state.failed = None;
        drop(state);
        self.changed.notify_all();
    }

    /// Stops the pass once the consumer has closed it or has received its error. The error is kept.
    pub(crate) fn end(&self) {
        self.closed.store(true, Ordering::Relaxed);
        // A consumer that is about to sleep has seen the flag, or is woken below.
        drop(self.lock());
        self.changed.notify_all();
    }

    /// Drops all batches that were not delivered.
    pub(crate) fn clear(&self) {
        let lost = std::mem::take(&mut self.lock().ready);
        drop(lost);
    }

    /// Returns the next batch if it arrives within `wait`, or the error that ends the pass. `choose` gets the number of
    /// batches taken so far and may change the number of threads. It returns how many runners must be started as a
    /// result.
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
                // The remaining batches will never be delivered.
                let lost = std::mem::take(&mut state.ready);
                drop(state);
                self.changed.notify_all();
                drop(lost);
                working_memory.release_after(&error);
                Err(error)
            }
            Some(Ok((mut batch, reserved))) => {
                if state.end == Some(number + 1) {
                    // Some consumers count batches and never request the end of the pass, so check the files now.
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

    /// Waits up to `wait` until there is a result for the consumer.
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

    /// Ends the pass with an error if a file was changed while it was being read.
    fn check(&self, state: &mut State, files: &Files) -> Result<()> {
        files.check().inspect_err(|error| {
            state.failed = Some(error.clone());
            self.changed.notify_all();
        })
    }
}

impl State {
    /// Whether there is a result for the consumer: a batch, an error, or the end.
    fn has_something(&self) -> bool {
        self.failed.is_some() || self.is_over() || self.is_ready()
    }

    fn is_over(&self) -> bool {
        self.end.is_some_and(|end| self.next >= end)
    }

    /// Whether the next batch, or the error that prevented it, is available.
    fn is_ready(&self) -> bool {
        self.ready.contains_key(&self.next)
    }

    /// Whether the next batch is available, and at least this many batches in total.
    fn has_ready(&self, batches: usize) -> bool {
        self.is_ready() && self.ready.len() >= batches
    }

    /// Whether the consumer is busy while at least this many batches wait for it.
    fn lags(&self, batches: usize) -> bool {
        self.has_ready(batches) && self.left.is_some_and(|left| left.elapsed() > BUSY)
    }

    /// Records that a consumer falls asleep.
    fn sleep(&mut self, now: Instant) {
        self.asleep += 1;
        self.gathering = self.fast.then_some(now);
    }

    /// Records that a consumer woke up after sleeping for `slept`.
    fn wake(&mut self, slept: Duration) {
        self.asleep -= 1;
        self.fast = slept < 2 * GATHERING;
    }

    /// Whether any consumer sleeps.
    fn is_awaited(&self) -> bool {
        self.asleep > 0
    }

    /// Whether a sleeping consumer should be woken now for a ready batch. `idle` means that the threads have nothing
    /// else to do.
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
    fn only_the_next_batch_wakes_the_consumer() {
        let mut state = with_ready(&[1, 2, 3, 4, 5, 6, 7]);
        state.sleep(Instant::now());
        assert!(!state.must_wake(true));
        put(&mut state, 0);
        assert!(state.must_wake(false));
        state.wake(Duration::ZERO);
        assert!(!state.must_wake(true), "no consumer sleeps");
    }

    #[test]
    fn a_fast_consumer_is_woken_for_several_batches() {
        let mut state = with_ready(&[0]);
        state.sleep(Instant::now());
        assert!(state.must_wake(false), "the rate of batches is not known yet");
        state.wake(Duration::from_micros(100));
        state.sleep(Instant::now());
        assert!(!state.must_wake(false));
        assert!(state.must_wake(true), "no more batches will arrive");
        put(&mut state, 1);
        put(&mut state, 2);
        assert!(!state.must_wake(false));
        put(&mut state, 5);
        assert!(state.must_wake(false), "half of the batches in flight are ready");
    }

    #[test]
    fn the_first_error_is_kept_until_the_consumer_leaves() {
        let error = |reason| Error::new(ErrorKind::Storage, reason);
        let reason = |delivery: &DeliveryQueue| delivery.lock().failed.as_ref().map(|e| e.reason().to_owned());
        let delivery = DeliveryQueue::new(None);
        delivery.fail(&error("first"));
        delivery.fail(&error("second"));
        delivery.end();
        assert!(delivery.is_closed());
        assert_eq!(
            reason(&delivery).as_deref(),
            Some("first"),
            "the error is kept after the end"
        );
        delivery.close();
        delivery.fail(&error("late"));
        assert_eq!(reason(&delivery), None);
    }

    #[test]
    fn an_error_that_ends_a_pass_is_delivered_in_order() {
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
    fn only_a_busy_consumer_lags() {
        let mut state = with_ready(&[0, 1]);
        assert!(!state.lags(2), "the consumer is waiting");
        state.left = Some(Instant::now());
        std::thread::sleep(2 * BUSY);
        assert!(state.lags(2) && !state.lags(3));
        state.left = Some(Instant::now() + GATHERING);
        assert!(!state.lags(2), "the consumer has only just left");
    }

    #[test]
    fn a_consumer_that_slept_long_is_woken_for_one_batch() {
        let mut state = with_ready(&[0]);
        state.sleep(Instant::now());
        state.wake(Duration::ZERO);
        state.sleep(Instant::now());
        assert!(!state.must_wake(false));
        std::thread::sleep(GATHERING);
        assert!(state.must_wake(false));
        state.wake(3 * GATHERING);
        state.sleep(Instant::now());
        assert!(state.must_wake(false), "batches arrive slowly");
    }
}
