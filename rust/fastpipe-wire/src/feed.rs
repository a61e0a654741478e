//! Batches that come in any order, some twice, and are handed over once and in theirs.

use std::collections::BTreeMap;
use std::sync::{Condvar, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::{Error, ErrorKind, Result, Slab};
use fastpipe_engine::{Batch, Poll};

/// Where batches that others make wait for the consumer.
///
/// It belongs to one process: in a forked child its locks may be held by threads that don't exist there.
pub struct Feed {
    state: Mutex<State>,
    /// The consumer may go on.
    changed: Condvar,
    /// Wakes the tasks that receive batches.
    wake: OnceLock<Wake>,
    process: u32,
}

/// Called when the consumer has taken a batch or waits for one. The argument is true if no more batches are wanted.
pub type Wake = Box<dyn Fn(bool) + Send + Sync>;

struct State {
    ready: BTreeMap<u64, Box<Batch>>,
    /// The number of the next batch to be handed over.
    next: u64,
    /// Behind the last one.
    end: Option<u64>,
    /// What stands in the place of a batch: the first of them is told.
    failure: Option<(u64, Error)>,
    closed: bool,
    begun: Instant,
    ended: Option<Instant>,
    /// Since when a consumer waits for a batch, and since when none does.
    waits: Option<Instant>,
    left: Option<Instant>,
    seen: Look,
}

/// What a feed has done so far.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Look {
    /// The number of the next batch to be handed over.
    pub next: u64,
    /// Batches that wait for the consumer.
    pub ready: u64,
    /// Their bytes.
    pub ready_bytes: u64,
    /// Batches that came, without those that came twice.
    pub batches: u64,
    /// Their rows.
    pub rows: u64,
    /// Their bytes.
    pub bytes: u64,
    /// Batches that came twice.
    pub twice: u64,
    /// Seconds since it began, until it ended.
    pub elapsed: f64,
    /// Seconds for which the consumer waited.
    pub waited: f64,
    /// Seconds for which it was away with a batch.
    pub away: f64,
    /// Seconds for which it has been waiting now; 0 if it isn't.
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
    /// Whether there is something to say to a consumer.
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

    /// Whether it is of this process.
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

    /// A batch has come. False if it came before, or isn't wanted any more.
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

    /// Whether a batch is still wanted, and hasn't come.
    pub fn wants(&self, number: u64) -> bool {
        let state = self.lock();
        !state.closed
            && number >= state.next
            && state.end.is_none_or(|end| number < end)
            && !state.ready.contains_key(&number)
    }

    /// There are no batches from this one on.
    pub fn end(&self, number: u64) {
        let mut state = self.lock();
        state.end = Some(number);
        let over = state.is_over();
        drop(state);
        self.changed.notify_all();
        self.wake(over);
    }

    /// A batch won't come; those before it are still handed over.
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

    /// No more batches are wanted, and those that wait aren't, either. Twice does no harm.
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

    /// The next batch, if it is there within `wait`. Several threads may ask: each batch goes to one of them. An error
    /// ends it, and is returned again and again.
    ///
    /// # Errors
    /// What [`Feed::fail`] was told, at its place; [`ErrorKind::Closed`] if it was closed, or is another process's.
    pub fn poll(&self, wait: Duration) -> Result<Poll> {
        if !self.is_ours() {
            let reason = "the pass was started by another process; start one here with iter(reader)";
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
                // Whoever brings batches may hurry.
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

    /// What it has done so far.
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
            Poll::Pending => panic!("nothing came"),
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
    fn errors_stand_where_their_batches_would() {
        let feed = Feed::default();
        feed.fail(2, Error::new(ErrorKind::Storage, "later"));
        feed.fail(1, Error::new(ErrorKind::Malformed, "first"));
        feed.fail(3, Error::new(ErrorKind::Storage, "last"));
        assert!(matches!(feed.poll(NOW), Ok(Poll::Pending)));
        feed.put(0, batch(0));
        feed.put(1, batch(1));
        assert_eq!(next(&feed), Some(0));
        // A batch that came is no failure.
        assert_eq!(next(&feed), Some(1));
        for _ in 0..2 {
            assert_eq!(feed.poll(NOW).map(drop).unwrap_err().reason(), "first");
        }
    }

    #[test]
    fn whoever_waits_is_woken() {
        let feed = Arc::new(Feed::default());
        let (woken, wakes) = std::sync::mpsc::channel();
        feed.on_change(Box::new(move |over| _ = woken.send(over)));
        let (maker, look) = (feed.clone(), feed.clone());
        let thread = std::thread::spawn(move || {
            // A consumer waits.
            assert_eq!(wakes.recv(), Ok(false));
            assert!(maker.look().waiting > 0.0);
            maker.put(0, batch(0));
            // It has taken the batch.
            assert_eq!(wakes.recv(), Ok(false));
            assert_eq!(maker.look().next, 1);
            maker.close();
            while !wakes.recv().unwrap() {}
        });
        assert!(matches!(feed.poll(LONG), Ok(Poll::Ready(0, _))));
        let closed = loop {
            match feed.poll(LONG) {
                Ok(Poll::Pending) => panic!("it wasn't closed"),
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
