//! Fetches: calls of sources that may wait.
//!
//! They run on separate threads, several at a time, the most urgent first. Their time doesn't count as work of the
//! pass: while one thread waits for a server, another can decode. A pass that is left early cancels the fetches in
//! progress and drops the rest.
//!
//! Units of remote files are fetched too. Neighbors that wait at the same time are read with one request (see
//! `ranges.rs`). A request that could still grow is held back while others are in progress, unless a task waits for it.

use std::collections::{BTreeMap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use fastpipe_batch::{Error, ErrorKind, Fetched, Result, Source};
use fastpipe_files::{Files, REQUEST_BYTES};

use crate::memory::Memory;
use crate::pace::Pace;
use crate::panicked::panicked;
use crate::ranges::{REQUESTS, Ranges};
use crate::telemetry::Telemetry;

/// Number of units fetched in advance, per concurrent fetch of a source that isn't files.
const AHEAD: usize = 2;

/// Bytes of a fetching thread's stack. Sources mostly wait, so this is enough.
const STACK: usize = 1 << 20;

/// A callback that runs once a unit has been fetched.
pub(crate) type Then = Box<dyn FnOnce() + Send>;

/// A unit that is being fetched, or waits to be fetched.
pub(crate) struct Fetch {
    unit: u64,
    /// The index of the fetch within the pass. A unit may be fetched again before the first result was taken.
    number: u64,
    state: Mutex<State>,
}

enum State {
    Under(Vec<Then>),
    /// `None` after the result was taken.
    Done(Option<Result<Fetched>>),
}

impl Fetch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether the fetch has finished or failed.
    pub(crate) fn is_done(&self) -> bool {
        matches!(&*self.lock(), State::Done(_))
    }

    /// Whether a callback waits for the result.
    fn is_awaited(&self) -> bool {
        matches!(&*self.lock(), State::Under(waiting) if !waiting.is_empty())
    }

    /// Runs `then` once the fetch is done, or immediately if it is.
    pub(crate) fn then(&self, then: Then) {
        match &mut *self.lock() {
            State::Under(waiting) => {
                waiting.push(then);
                return;
            }
            State::Done(_) => {}
        }
        then();
    }

    /// Returns the fetched data to the first caller. Further calls return an error.
    pub(crate) fn take(&self) -> Result<Fetched> {
        let taken = match &mut *self.lock() {
            State::Done(done) => done.take(),
            State::Under(_) => None,
        };
        taken.unwrap_or_else(|| {
            let reason = format!("unit {} was opened twice, or before it was fetched", self.unit);
            Err(Error::new(ErrorKind::Internal, reason))
        })
    }

    fn finish(&self, done: Result<Fetched>) {
        let before = std::mem::replace(&mut *self.lock(), State::Done(Some(done)));
        if let State::Under(waiting) = before {
            waiting.into_iter().for_each(|then| then());
        }
    }
}

/// The batch that needs a unit, and the index of the fetch: fetches are done in this order.
type Rank = (u64, u64);

#[derive(Default)]
struct Queue {
    wanted: BTreeMap<Rank, Arc<Fetch>>,
    /// The wanted fetches of remote files, by unit.
    places: BTreeMap<u64, Rank>,
    asked: u64,
    /// The fetch that was requested last.
    last: Weak<Fetch>,
    /// Fetches that wait for the fetch of the preceding unit, by the index of that fetch.
    behind: HashMap<u64, (Rank, Arc<Fetch>)>,
    threads: Vec<JoinHandle<()>>,
    /// Number of threads that have nothing to do.
    idle: usize,
    /// Number of calls of the source that are in progress, if other units are ranges of remote files.
    calls: usize,
    /// Number of callers that request several units, which may be neighbors.
    asking: usize,
    /// Limits the requests of remote files.
    pace: Option<Pace>,
}

impl Queue {
    fn push(&mut self, rank: Rank, fetch: Arc<Fetch>, is_range: bool) {
        if is_range {
            // A unit that is wanted twice is read twice, because each result is taken once.
            self.places.entry(fetch.unit).or_insert(rank);
        }
        self.wanted.insert(rank, fetch);
    }

    fn remove(&mut self, rank: Rank) -> Option<Arc<Fetch>> {
        let fetch = self.wanted.remove(&rank)?;
        if self.places.get(&fetch.unit) == Some(&rank) {
            self.places.remove(&fetch.unit);
        }
        Some(fetch)
    }
}

struct Inner {
    source: Arc<dyn Source>,
    /// The units as ranges of remote files, if they are.
    ranges: Option<Ranges>,
    queue: Mutex<Queue>,
    /// Maximum number of concurrent fetches.
    most: usize,
    /// Maximum number of units that are fetched, or wait to be, before they are needed.
    most_ahead: usize,
    changed: Condvar,
    closed: AtomicBool,
    /// Fetches that were requested and are not done.
    pending: AtomicUsize,
    telemetry: Arc<Telemetry>,
}

/// The fetches of a pass.
pub(crate) struct Fetches {
    inner: Arc<Inner>,
}

impl Fetches {
    pub(crate) fn new(
        source: &Arc<dyn Source>,
        files: &Arc<Files>,
        memory: &Arc<Memory>,
        telemetry: Arc<Telemetry>,
    ) -> Fetches {
        let ranges = Ranges::of(source, files, memory);
        let (most, most_ahead) = match &ranges {
            Some(ranges) => (REQUESTS, ranges.most_ahead()),
            None => (source.facts().fetches, AHEAD * source.facts().fetches),
        };
        let inner = Inner {
            source: source.clone(),
            queue: Mutex::new(Queue {
                pace: ranges.as_ref().map(|_| Pace::new(REQUESTS)),
                ..Queue::default()
            }),
            ranges,
            most,
            most_ahead,
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            telemetry,
        };
        Fetches { inner: Arc::new(inner) }
    }

    /// Whether this source fetches its units.
    pub(crate) fn are_needed(&self) -> bool {
        self.inner.most > 0
    }

    /// Whether a unit is fetched.
    pub(crate) fn include(&self, unit: u64) -> bool {
        self.inner.ranges.is_some() || self.inner.source.is_fetched(unit)
    }

    /// Whether more fetches could be in progress than at present.
    pub(crate) fn have_room(&self) -> bool {
        let enough = match &self.inner.ranges {
            Some(_) => self.inner.most_ahead,
            None => self.inner.most,
        };
        self.inner.pending.load(Ordering::Relaxed) < enough
    }

    /// Maximum number of units to fetch before they are needed.
    pub(crate) fn most_ahead(&self) -> usize {
        self.inner.most_ahead
    }

    /// Waits with all fetches until the result is dropped, because several units are being requested.
    pub(crate) fn together(&self) -> Together<'_> {
        if self.inner.ranges.is_some() {
            self.inner.lock().asking += 1;
        }
        Together(&self.inner)
    }

    /// Lets the threads look again at the fetches that they held back.
    pub(crate) fn look_again(&self) {
        if self.inner.ranges.is_some() {
            self.inner.changed.notify_all();
        }
    }

    /// Requests a unit that is first needed by batch `batch`. If it continues the unit that was requested last, it is
    /// fetched after that unit.
    ///
    /// # Errors
    /// Fails if no thread exists and none can be started.
    pub(crate) fn start(&self, unit: u64, batch: u64) -> Result<Arc<Fetch>> {
        let inner = &self.inner;
        let mut queue = inner.lock();
        queue.asked += 1;
        let fetch = Arc::new(Fetch {
            unit,
            number: queue.asked,
            state: Mutex::new(State::Under(Vec::new())),
        });
        if inner.is_closed() {
            drop(queue);
            fetch.finish(Err(closed()));
            return Ok(fetch);
        }
        let before = std::mem::replace(&mut queue.last, Arc::downgrade(&fetch)).upgrade();
        let before = before.filter(|before| {
            before.unit.checked_add(1) == Some(unit) && inner.source.follows(unit) && !before.is_done()
        });
        let rank = (batch, fetch.number);
        match before {
            // The thread that fetches the preceding unit queues this one afterwards.
            Some(before) => {
                queue.behind.insert(before.number, (rank, fetch.clone()));
            }
            None => {
                inner.need_thread(&mut queue)?;
                queue.push(rank, fetch.clone(), inner.ranges.is_some());
            }
        }
        inner.pending.fetch_add(1, Ordering::Relaxed);
        drop(queue);
        inner.changed.notify_one();
        Ok(fetch)
    }

    /// Cancels the fetches in progress, drops the rest, and waits for the threads. Waiting callbacks run and find an
    /// error.
    pub(crate) fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        let mut queue = self.inner.lock();
        let (wanted, threads) = (std::mem::take(&mut queue.wanted), std::mem::take(&mut queue.threads));
        let behind = std::mem::take(&mut queue.behind);
        drop(queue);
        self.inner.changed.notify_all();
        for (_, fetch) in wanted.into_iter().chain(behind.into_values()) {
            fetch.finish(Err(closed()));
        }
        for thread in threads {
            let _ = thread.join();
        }
    }
}

/// Keeps the threads from fetching.
pub(crate) struct Together<'a>(&'a Inner);

impl Drop for Together<'_> {
    fn drop(&mut self) {
        if self.0.ranges.is_some() {
            self.0.lock().asking -= 1;
            self.0.changed.notify_all();
        }
    }
}

fn closed() -> Error {
    Error::new(ErrorKind::Closed, "the pass was closed")
}

impl Inner {
    fn lock(&self) -> MutexGuard<'_, Queue> {
        self.queue.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_closed(&self) -> bool {
        self.closed.load(Ordering::SeqCst)
    }

    /// The maximum number of fetches at present.
    fn limit(&self, queue: &Queue) -> usize {
        queue.pace.as_ref().map_or(self.most, Pace::limit)
    }

    /// Starts a thread if no thread is idle and the limit allows another.
    fn need_thread(self: &Arc<Self>, queue: &mut Queue) -> Result<()> {
        if queue.idle > queue.wanted.len() || queue.threads.len() >= self.limit(queue) {
            return Ok(());
        }
        let (name, inner) = (format!("fastpipe-fetch-{}", queue.threads.len()), self.clone());
        let builder = std::thread::Builder::new().name(name).stack_size(STACK);
        match builder.spawn(move || inner.run()) {
            Ok(thread) => queue.threads.push(thread),
            Err(error) if queue.threads.is_empty() => {
                let reason = format!("cannot start a fetching thread: {error}");
                return Err(Error::new(ErrorKind::OutOfMemory, reason));
            }
            // The existing threads fetch the unit, only later.
            Err(_) => {}
        }
        Ok(())
    }

    /// The loop of a fetching thread.
    fn run(self: &Arc<Self>) {
        while let Some(fetches) = self.next() {
            let start = Instant::now();
            let fetched = catch_unwind(AssertUnwindSafe(|| self.fetch(&fetches)));
            let fetched = fetched.unwrap_or_else(|panic| fetches.iter().map(|_| Err(panicked(&*panic))).collect());
            self.telemetry.fetched(start.elapsed().as_nanos() as u64);
            self.pending.fetch_sub(fetches.len(), Ordering::Relaxed);
            if self.calls_source(&fetches) {
                self.lock().calls -= 1;
            } else {
                self.pace(&fetched, start);
            }
            for (fetch, fetched) in fetches.iter().zip(fetched) {
                // Callbacks may panic as well; this thread must continue to fetch.
                let _ = catch_unwind(AssertUnwindSafe(|| fetch.finish(fetched)));
                let mut queue = self.lock();
                if let Some((rank, next)) = queue.behind.remove(&fetch.number) {
                    queue.push(rank, next, false);
                    drop(queue);
                    self.changed.notify_one();
                }
            }
        }
    }

    /// Adapts the limit of requests after one has ended, and starts threads if it was raised.
    fn pace(self: &Arc<Self>, fetched: &[Result<Fetched>], begun: Instant) {
        let bytes = fetched.iter().flatten().map(Fetched::held_bytes).sum::<usize>() as u64;
        let mut queue = self.lock();
        let before = self.limit(&queue);
        let held = !queue.wanted.is_empty() && queue.threads.len() - queue.idle >= before;
        let Some(pace) = &mut queue.pace else { return };
        pace.ended(bytes, held, begun, Instant::now());
        if pace.limit() <= before || self.is_closed() {
            return;
        }
        while queue.threads.len() < self.limit(&queue) {
            let threads = queue.threads.len();
            if self.need_thread(&mut queue).is_err() || queue.threads.len() == threads {
                break;
            }
        }
        drop(queue);
        self.changed.notify_all();
    }

    fn fetch(&self, fetches: &[Arc<Fetch>]) -> Vec<Result<Fetched>> {
        let cancelled = || self.is_closed();
        match &self.ranges {
            Some(ranges) if !self.calls_source(fetches) => {
                let units: Vec<u64> = fetches.iter().map(|fetch| fetch.unit).collect();
                ranges.read(&units, &cancelled)
            }
            _ => fetches.iter().map(|f| self.source.fetch(f.unit, &cancelled)).collect(),
        }
    }

    /// Whether fetches are a call of a source that also has ranges of remote files, such as a union.
    fn calls_source(&self, fetches: &[Arc<Fetch>]) -> bool {
        self.ranges.is_some() && fetches.first().is_some_and(|fetch| self.source.is_fetched(fetch.unit))
    }

    /// Waits for the next fetches, which are done by one call.
    fn next(&self) -> Option<Vec<Arc<Fetch>>> {
        let mut queue = self.lock();
        loop {
            if self.is_closed() {
                return None;
            }
            let taken = self.take(&mut queue);
            if !taken.is_empty() {
                return Some(taken);
            }
            queue.idle += 1;
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }

    /// Takes the most urgent fetch, and those of its neighbors. Takes nothing if all are held back.
    fn take(&self, queue: &mut Queue) -> Vec<Arc<Fetch>> {
        let Some(ranges) = &self.ranges else {
            return queue.wanted.pop_first().map(|(_, fetch)| fetch).into_iter().collect();
        };
        // This thread isn't idle.
        if queue.asking > 0 || queue.threads.len() - queue.idle > self.limit(queue) {
            return Vec::new();
        }
        let others = queue.threads.len() > queue.idle + 1;
        let last = queue.last.upgrade().map(|last| last.unit);
        let mut held: Vec<Rank> = Vec::new();
        for (&rank, fetch) in &queue.wanted {
            if held.contains(&rank) {
                continue;
            }
            if self.source.is_fetched(fetch.unit) {
                if queue.calls >= self.source.facts().fetches {
                    continue;
                }
                queue.calls += 1;
                return queue.remove(rank).into_iter().collect();
            }
            if queue.places.get(&fetch.unit) != Some(&rank) {
                return queue.remove(rank).into_iter().collect();
            }
            let place = |(&unit, _): (&u64, &Rank)| unit;
            let next = |unit: u64| queue.places.range(unit + 1..).next().map(place);
            let before = |unit: u64| queue.places.range(..unit).next_back().map(place);
            let found = ranges.neighbors(fetch.unit, &next, &before);
            let ranks = found.units.iter().filter_map(|unit| queue.places.get(unit).copied());
            let ranks: Vec<Rank> = ranks.collect();
            let may_grow = others && found.bytes < REQUEST_BYTES / 2 && found.units.back().copied() == last;
            let awaited = |rank| queue.wanted.get(rank).is_some_and(|fetch| fetch.is_awaited());
            if may_grow && !ranks.iter().any(awaited) {
                held = ranks;
                continue;
            }
            return ranks.into_iter().filter_map(|rank| queue.remove(rank)).collect();
        }
        Vec::new()
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use fastpipe_batch::{BufferPool, Pass, Row, Sink, SourceFacts, Unit, UnitInfo, Unpicked, Work};

    use super::*;

    /// A slow source that reports which units are fetched.
    struct Slow {
        facts: SourceFacts,
        /// Whether each unit continues the one before it.
        chained: bool,
        told: Mutex<Sender<u64>>,
        time: Duration,
    }

    impl Source for Slow {
        fn facts(&self) -> &SourceFacts {
            &self.facts
        }

        fn units(&self) -> u64 {
            u64::MAX
        }

        fn describe(&self, _unit: u64) -> UnitInfo {
            unreachable!("not called by fetches")
        }

        fn follows(&self, unit: u64) -> bool {
            self.chained && unit > 0
        }

        fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
            self.told.lock().unwrap().send(unit).unwrap();
            assert_ne!(unit, 13, "a panic");
            let start = Instant::now();
            while start.elapsed() < self.time {
                if cancelled() {
                    return Err(Error::new(ErrorKind::Closed, "cancelled"));
                }
                std::thread::sleep(Duration::from_millis(1));
            }
            Ok(Fetched::Other {
                what: Box::new(unit),
                held: 10,
            })
        }

        fn open(&self, _: u64, _: Pass, _: Fetched, _: &BufferPool) -> Result<Box<dyn Unit>> {
            unreachable!("not called by fetches")
        }

        fn pick(&self, _: &[&dyn Unit], _: &[Row], _: Range<usize>, _: &mut Sink<'_>) -> Result<(), Unpicked> {
            unreachable!("not called by fetches")
        }

        fn locate(&self, _unit: u64, error: Error) -> Error {
            error
        }
    }

    fn fetches(most: usize, millis: u64) -> (Fetches, std::sync::mpsc::Receiver<u64>) {
        fetches_of(most, millis, false)
    }

    fn fetches_of(most: usize, millis: u64, chained: bool) -> (Fetches, std::sync::mpsc::Receiver<u64>) {
        let (told, heard) = channel();
        let facts = SourceFacts::new([], "slow", Work::default());
        let source: Arc<dyn Source> = Arc::new(Slow {
            facts: SourceFacts { fetches: most, ..facts },
            chained,
            told: Mutex::new(told),
            time: Duration::from_millis(millis),
        });
        let (files, memory) = (Arc::new(Files::of(source.facts())), Memory::new(&[]));
        let fetches = Fetches::new(&source, &files, &memory, Arc::new(Telemetry::new()));
        (fetches, heard)
    }

    /// Waits until all fetches are done.
    fn wait(all: &[Arc<Fetch>]) {
        let (send, heard) = channel();
        for fetch in all {
            let send = send.clone();
            fetch.then(Box::new(move || send.send(()).unwrap()));
        }
        all.iter().for_each(|_| heard.recv().unwrap());
    }

    #[test]
    fn concurrent_fetches_reach_the_limit() {
        let (fetches, _heard) = fetches(5, 300);
        let start = Instant::now();
        let all: Vec<_> = (0..5).map(|unit| fetches.start(unit, unit).unwrap()).collect();
        assert!(!fetches.have_room());
        wait(&all);
        // The sum of all calls, in less time than two of them would take in sequence.
        let spent = fetches.inner.telemetry.counts().fetching;
        assert!(spent >= 1_500_000_000 && start.elapsed() < Duration::from_millis(600));
        assert!(fetches.have_room());
        for (unit, fetch) in all.iter().enumerate() {
            let Fetched::Other { what, .. } = fetch.take().unwrap() else {
                panic!("unexpected kind of data")
            };
            assert_eq!(*what.downcast::<u64>().unwrap(), unit as u64);
            assert_eq!(
                fetch.take().err().unwrap().kind(),
                ErrorKind::Internal,
                "the data was already taken"
            );
        }
        fetches.close();
    }

    #[test]
    fn units_are_fetched_in_the_order_of_need() {
        let (fetches, heard) = fetches(1, 5);
        let all = [(0, 0), (7, 9), (8, 2), (9, 2)].map(|(unit, batch)| {
            let fetch = fetches.start(unit, batch).unwrap();
            // The first fetch is in progress before others are requested.
            if unit == 0 {
                assert_eq!(heard.recv().unwrap(), 0);
            }
            fetch
        });
        wait(&all);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [8, 9, 7]);
        fetches.close();
    }

    #[test]
    fn the_rest_of_a_unit_is_fetched_after_its_start() {
        let (fetches, heard) = fetches_of(4, 200, true);
        let start = Instant::now();
        let all: Vec<_> = (0..4).map(|unit| fetches.start(unit, 0).unwrap()).collect();
        wait(&all);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(
            start.elapsed() >= Duration::from_millis(800),
            "fetched one after the other"
        );
        // A unit doesn't wait if the last requested unit doesn't precede it, or has already been fetched.
        let all = [4, 7].map(|unit| fetches.start(unit, 1).unwrap());
        let start = Instant::now();
        wait(&all);
        assert!(start.elapsed() < Duration::from_millis(395));
        // A unit that is requested again is continued by a separate fetch.
        let twice: Vec<_> = [8, 9, 8, 9].map(|unit| fetches.start(unit, 2).unwrap()).into();
        wait(&twice);
        let many: Vec<_> = (0..10_000).map(|unit| fetches.start(unit, 2).unwrap()).collect();
        fetches.close();
        assert!(many.iter().all(|fetch| fetch.is_done()) && many[9_999].take().is_err());
    }

    #[test]
    fn closing_cancels_all_fetches() {
        let (fetches, heard) = fetches(1, 60_000);
        let all = [0, 1].map(|unit| fetches.start(unit, 0).unwrap());
        assert_eq!(heard.recv().unwrap(), 0);
        let start = Instant::now();
        fetches.close();
        assert!(start.elapsed() < Duration::from_secs(10));
        wait(&all);
        for fetch in &all {
            assert_eq!(fetch.take().err().unwrap().kind(), ErrorKind::Closed);
        }
        let late = fetches.start(2, 0).unwrap();
        assert!(late.is_done() && late.take().is_err());
        assert!(heard.try_recv().is_err());
    }

    #[test]
    fn a_panic_is_an_error() {
        let (fetches, _heard) = fetches(1, 0);
        let all = [13, 14].map(|unit| fetches.start(unit, 0).unwrap());
        wait(&all);
        assert_eq!(all[0].take().err().unwrap().kind(), ErrorKind::Internal);
        assert!(all[1].take().is_ok());
        fetches.close();
    }
}
