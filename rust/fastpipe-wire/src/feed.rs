//! A buffer for batches that arrive in any order, some of them twice. Each is delivered once, in order.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::{Error, ErrorKind, Result, Slab};
use fastpipe_engine::{Batch, Poll};

/// Batches from other processes that wait for the consumer.
///
/// A feed belongs to one process. In a forked child, its locks may be held by threads that don't exist there.
pub struct Feed {
    state: Mutex<State>,
    /// Notified when the consumer may be able to continue.
    changed: Condvar,
    /// Wakes the tasks that receive batches.
    wake: OnceLock<Wake>,
    process: u32,
}

/// Called when the consumer has taken a batch or waits for one. The argument is true if no more batches are wanted.
pub type Wake = Box<dyn Fn(bool) + Send + Sync>;

struct State {
    ready: BTreeMap<u64, Box<Batch>>,
    /// The index of the next batch to deliver.
    next: u64,
    /// The index after the last batch.
    end: Option<u64>,
    /// The earliest error, and the index of the batch that it replaces.
    failure: Option<(u64, Error)>,
    closed: bool,
    begun: Instant,
    ended: Option<Instant>,
    /// `waits` is when the consumer started to wait for a batch. `left` is when it took the last batch.
    waits: Option<Instant>,
    left: Option<Instant>,
    seen: Look,
}

/// Statistics of a feed.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// The index of the next batch to deliver.
    pub next: u64,
    /// The number of batches that wait for the consumer.
    pub ready: u64,
    /// The bytes of the batches that wait for the consumer.
    pub ready_bytes: u64,
    /// The number of batches that arrived, without duplicates.
    pub batches: u64,
    /// The rows of these batches.
    pub rows: u64,
    /// The bytes of these batches.
    pub bytes: u64,
    /// The number of batches that arrived a second time, or too late to be used.
    pub twice: u64,
    /// Seconds from the start of the feed to its end, or until now.
    pub elapsed: f64,
    /// Seconds for which the consumer waited.
    pub waited: f64,
    /// Seconds for which the consumer worked on batches.
    pub away: f64,
    /// Seconds since the consumer started to wait, or 0 if it isn't waiting.
    pub waiting: f64,
    /// Whether no more batches are wanted.
    pub over: bool,
}

impl Default for Feed {
    fn default() -> Self {
        Feed {
            state: Mutex::new(State {
                ready: BTreeMap::new(),
                next: 0,
                end: None,
                failure: None,
                closed: false,
                begun: Instant::now(),
                ended: None,
                waits: None,
                left: None,
                seen: Look::default(),
            }),
            changed: Condvar::new(),
            wake: OnceLock::new(),
            process: std::process::id(),
        }
    }
}

fn bytes(batch: &Batch) -> u64 {
    batch.slabs.iter().map(|slab| slab.len() as u64).sum()
}

impl State {
    /// Whether a call of `poll` can return a result.
    fn has_next(&self) -> bool {
        self.closed || self.ready.contains_key(&self.next) || self.fails() || self.end == Some(self.next)
    }

    fn fails(&self) -> bool {
        self.failure.as_ref().is_some_and(|(number, _)| *number <= self.next)
    }

    fn is_over(&self) -> bool {
        self.closed || self.fails() || self.end == Some(self.next)
    }
}

impl Feed {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the feed was created by this process.
    pub fn is_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Sets the callback that wakes the tasks that receive batches. Only the first call has an effect.
    pub fn on_change(&self, wake: Wake) {
        _ = self.wake.set(wake);
    }

    fn wake(&self, over: bool) {
        if let Some(wake) = self.wake.get() {
            wake(over);
        }
    }

    /// Adds a batch that has arrived. Returns false if the batch arrived before, or isn't wanted anymore.
    pub fn put(&self, number: u64, batch: Box<Batch>) -> bool {
        let mut state = self.lock();
        let wanted = !state.closed && number >= state.next && state.end.is_none_or(|end| number < end);
        if !wanted || state.ready.contains_key(&number) {
            state.seen.twice += u64::from(!state.closed);
            return false;
        }
        let bytes = bytes(&batch);
        state.seen.batches += 1;
        state.seen.rows += batch.info.rows as u64;
        state.seen.bytes += bytes;
        state.seen.ready_bytes += bytes;
        state.ready.insert(number, batch);
        let wake = number == state.next;
        drop(state);
        if wake {
            self.changed.notify_all();
        }
        true
    }

    /// Whether a batch is still wanted and hasn't arrived.
    pub fn wants(&self, number: u64) -> bool {
        let state = self.lock();
        !state.closed
            && number >= state.next
            && state.end.is_none_or(|end| number < end)
            && !state.ready.contains_key(&number)
    }

    /// Ends the pass before batch `number`.
    pub fn end(&self, number: u64) {
        let mut state = self.lock();
        state.end = Some(number);
        let over = state.is_over();
        drop(state);
        self.changed.notify_all();
        self.wake(over);
    }

    /// Records that a batch won't arrive. Earlier batches are still delivered.
    pub fn fail(&self, number: u64, error: Error) {
        let mut state = self.lock();
        if state.failure.as_ref().is_none_or(|(first, _)| number < *first) {
            state.failure = Some((number, error));
        }
        let over = state.is_over();
        drop(state);
        self.changed.notify_all();
        self.wake(over);
    }

    /// Discards all batches that wait, and rejects later ones. It is safe to call this twice.
    pub fn close(&self) {
        if !self.is_ours() {
            return;
        }
        let mut state = self.lock();
        state.closed = true;
        state.ended.get_or_insert_with(Instant::now);
        state.seen.ready_bytes = 0;
        let lost = std::mem::take(&mut state.ready);
        drop(state);
        drop(lost);
        self.changed.notify_all();
        self.wake(true);
    }

    /// Waits up to `wait` for the next batch. Several threads may call this; each batch is delivered to one of them. An
    /// error ends the pass, and every later call returns it again.
    ///
    /// # Errors
    /// The error of [`Feed::fail`], in place of the batch. [`ErrorKind::Closed`] if the feed was closed, or belongs to
    /// another process.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if !self.is_ours() {
            let reason = "the pass was started by another process; call iter(reader) to start one in this process";
            return Err(Error::new(ErrorKind::Closed, reason));
        }
        let now = Instant::now();
        let mut state = self.lock();
        if let Some(left) = state.left.take() {
            state.seen.away += now.duration_since(left).as_secs_f64();
        }
        if !state.has_next() {
            if state.waits.is_none() {
                state.waits = Some(now);
                // The tasks that receive batches may now request more.
                self.wake(state.is_over());
            }
            let waited = self.changed.wait_timeout_while(state, wait, |state| !state.has_next());
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
            if !state.has_next() {
                return Ok(Poll::Pending);
            }
        }
        let now = Instant::now();
        if let Some(since) = state.waits.take() {
            state.seen.waited += now.duration_since(since).as_secs_f64();
        }
        let number = state.next;
        if let Some(batch) = state.ready.remove(&number) {
            state.next += 1;
            state.seen.ready_bytes -= bytes(&batch);
            state.left = Some(now);
            let over = state.is_over();
            drop(state);
            self.changed.notify_all();
            self.wake(over);
            let mut batch = batch;
            batch.slabs.iter_mut().for_each(Slab::hand_off);
            return Ok(Poll::Ready(number, batch));
        }
        state.ended.get_or_insert(now);
        match &state.failure {
            _ if state.closed => Err(Error::new(
                ErrorKind::Closed,
                "the pass was closed; iter(reader) starts a new one",
            )),
            Some((_, error)) if state.fails() => Err(error.clone()),
            _ => Ok(Poll::End),
        }
    }

    /// Returns the current statistics.
    pub fn look(&self) -> Look {
        let state = self.lock();
        let now = Instant::now();
        let since = |then: Option<Instant>| then.map_or(0.0, |then| now.duration_since(then).as_secs_f64());
        Look {
            next: state.next,
            ready: state.ready.len() as u64,
            elapsed: state.ended.unwrap_or(now).duration_since(state.begun).as_secs_f64(),
            waited: state.seen.waited + since(state.waits),
            away: state.seen.away + since(state.left),
            waiting: since(state.waits),
            over: state.is_over(),
            ..state.seen
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastpipe_batch::SlabPool;
    use fastpipe_engine::BatchInfo;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn batch(number: u64) -> Box<Batch> {
        Box::new(Batch {
            info: BatchInfo {
                step: number,
                rows: 3,
                ..BatchInfo::default()
            },
            slabs: vec![SlabPool::new(0).take(10).unwrap()],
            parts: Vec::new(),
            dense_shapes: Vec::new(),
        })
    }

    const NOW: Duration = Duration::ZERO;
    const LONG: Duration = Duration::from_secs(60);

    fn next(feed: &Feed) -> Option<u64> {
        match feed.poll(NOW).unwrap() {
            Poll::Ready(number, batch) => {
                assert_eq!(batch.info.step, number);
                Some(number)
            }
            Poll::End => None,
            Poll::Pending => panic!("no batch arrived"),
        }
    }

    proptest! {
        #[test]
        fn batches_are_handed_over_once_and_in_order(
            order in Just((0..20u64).collect::<Vec<_>>()).prop_shuffle(), again in vec(0..20u64, 0..9),
        ) {
            let feed = Feed::default();
            feed.end(20);
            let mut taken = 0;
            let mut put = 0;
            for number in order.iter().copied().chain(again) {
                put += u64::from(feed.put(number, batch(number)));
                while let Ok(Poll::Ready(number, _)) = feed.poll(NOW) {
                    prop_assert_eq!(number, taken);
                    taken += 1;
                }
            }
            let look = feed.look();
            prop_assert_eq!((taken, put, look.batches, look.rows, look.bytes), (20, 20, 20, 60, 200));
            prop_assert!(look.over && look.ready_bytes == 0 && !feed.wants(3));
            prop_assert_eq!(next(&feed), None);
            prop_assert!(!feed.put(20, batch(20)));
        }
    }

    #[test]
    fn errors_are_delivered_in_place_of_their_batches() {
        let feed = Feed::default();
        feed.fail(2, Error::new(ErrorKind::Storage, "later"));
        feed.fail(1, Error::new(ErrorKind::Malformed, "first"));
        feed.fail(3, Error::new(ErrorKind::Storage, "last"));
        assert!(matches!(feed.poll(NOW), Ok(Poll::Pending)));
        feed.put(0, batch(0));
        feed.put(1, batch(1));
        assert_eq!(next(&feed), Some(0));
        // A batch that arrived is delivered despite the error for it.
        assert_eq!(next(&feed), Some(1));
        for _ in 0..2 {
            assert_eq!(feed.poll(NOW).map(drop).unwrap_err().reason(), "first");
        }
    }

    #[test]
    fn waiting_threads_are_woken() {
        let feed = Arc::new(Feed::default());
        let (woken, wakes) = std::sync::mpsc::channel();
        feed.on_change(Box::new(move |over| _ = woken.send(over)));
        let (maker, look) = (feed.clone(), feed.clone());
        let thread = std::thread::spawn(move || {
            // The consumer waits.
            assert_eq!(wakes.recv(), Ok(false));
            assert!(maker.look().waiting > 0.0);
            maker.put(0, batch(0));
            // The consumer has taken the batch.
            assert_eq!(wakes.recv(), Ok(false));
            assert_eq!(maker.look().next, 1);
            maker.close();
            while !wakes.recv().unwrap() {}
        });
        assert!(matches!(feed.poll(LONG), Ok(Poll::Ready(0, _))));
        let closed = loop {
            match feed.poll(LONG) {
                Ok(Poll::Pending) => panic!("the feed wasn't closed"),
                Ok(_) => continue,
                Err(error) => break error,
            }
        };
        assert_eq!(closed.kind(), ErrorKind::Closed);
        thread.join().unwrap();
        assert!(look.look().over && look.look().waited > 0.0);
        assert!(!look.put(1, batch(1)));
    }
}
