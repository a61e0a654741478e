//! Fetching: calls of sources that may wait.
//!
//! They run on threads of their own, several at once, those that are needed first before the others. What they take is
//! no work of the pass: a thread that waits for a server decodes nothing, and another may. A pass that is left cancels
//! what is under way and forgets the rest.

use std::cmp::Reverse;
use std::collections::{BinaryHeap, HashMap};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;
use std::time::Instant;

use fastpipe_batch::{Error, ErrorKind, Fetched, Result, Source};

use crate::panicked::panicked;
use crate::telemetry::Telemetry;

/// Bytes of a fetching thread's stack: sources mostly wait on it.
const STACK: usize = 1 << 20;

/// What is done once something is fetched.
pub(crate) type Then = Box<dyn FnOnce() + Send>;

/// A unit that is fetched, or will be.
pub(crate) struct Fetch {
    unit: u64,
    /// Which of the pass's fetches it is: a unit may be fetched again before it was taken.
    number: u64,
    state: Mutex<State>,
}

enum State {
    Under(Vec<Then>),
    /// `None` once it was taken.
    Done(Option<Result<Fetched>>),
}

impl Fetch {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether it is there, or has failed.
    pub(crate) fn is_done(&self) -> bool {
        matches!(&*self.lock(), State::Done(_))
    }

    /// Does something once it is there: at once if it is.
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

    /// What was fetched, for the first who asks.
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

/// In the order of need: by batch, and as they were asked for.
struct Wanted {
    rank: Reverse<(u64, u64)>,
    fetch: Arc<Fetch>,
}

impl PartialEq for Wanted {
    fn eq(&self, other: &Self) -> bool {
        self.rank == other.rank
    }
}

impl Eq for Wanted {}

impl PartialOrd for Wanted {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}

impl Ord for Wanted {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.rank.cmp(&other.rank)
    }
}

#[derive(Default)]
struct Queue {
    wanted: BinaryHeap<Wanted>,
    asked: u64,
    /// What was asked for last.
    last: Weak<Fetch>,
    /// Fetches that wait for the one of the unit in front of theirs, by the number of that one.
    behind: HashMap<u64, Wanted>,
    threads: Vec<JoinHandle<()>>,
    /// Threads that have nothing to do.
    idle: usize,
}

struct Inner {
    source: Arc<dyn Source>,
    queue: Mutex<Queue>,
    most: usize,
    changed: Condvar,
    closed: AtomicBool,
    /// Fetches that are asked for and not done.
    pending: AtomicUsize,
    telemetry: Arc<Telemetry>,
}

/// The fetches of a pass.
pub(crate) struct Fetches {
    inner: Arc<Inner>,
}

impl Fetches {
    pub(crate) fn new(source: &Arc<dyn Source>, telemetry: Arc<Telemetry>) -> Fetches {
        let inner = Inner {
            source: source.clone(),
            queue: Mutex::default(),
            most: source.facts().fetches,
            changed: Condvar::new(),
            closed: AtomicBool::new(false),
            pending: AtomicUsize::new(0),
            telemetry,
        };
        Fetches { inner: Arc::new(inner) }
    }

    /// Whether units of this source are fetched by calls.
    pub(crate) fn are_needed(&self) -> bool {
        self.inner.most > 0
    }

    /// Whether more could be under way at once than are.
    pub(crate) fn have_room(&self) -> bool {
        self.inner.pending.load(Ordering::Relaxed) < self.inner.most
    }

    /// Fetches at once.
    pub(crate) fn most(&self) -> usize {
        self.inner.most
    }

    /// Asks for a unit, which batch `batch` needs first. If it is the rest of the one that was asked for before, it
    /// waits for that.
    ///
    /// # Errors
    /// If there is no thread for it, and none can be started.
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
        let wanted = Wanted {
            rank: Reverse((batch, fetch.number)),
            fetch: fetch.clone(),
        };
        match before {
            // The thread that fetches it takes this one up.
            Some(before) => {
                queue.behind.insert(before.number, wanted);
            }
            None => {
                inner.need_thread(&mut queue)?;
                queue.wanted.push(wanted);
            }
        }
        inner.pending.fetch_add(1, Ordering::Relaxed);
        drop(queue);
        inner.changed.notify_one();
        Ok(fetch)
    }

    /// Cancels what is under way, forgets the rest, and waits for the threads. What waits for a fetch goes on with an
    /// error.
    pub(crate) fn close(&self) {
        self.inner.closed.store(true, Ordering::SeqCst);
        let mut queue = self.inner.lock();
        let (wanted, threads) = (std::mem::take(&mut queue.wanted), std::mem::take(&mut queue.threads));
        let behind = std::mem::take(&mut queue.behind);
        drop(queue);
        self.inner.changed.notify_all();
        for Wanted { fetch, .. } in wanted.into_iter().chain(behind.into_values()) {
            fetch.finish(Err(closed()));
        }
        for thread in threads {
            let _ = thread.join();
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

    /// Starts a thread if there is none with nothing to do, and there may be another.
    fn need_thread(self: &Arc<Self>, queue: &mut Queue) -> Result<()> {
        if queue.idle > queue.wanted.len() || queue.threads.len() >= self.most {
            return Ok(());
        }
        let (name, inner) = (format!("fastpipe-fetch-{}", queue.threads.len()), self.clone());
        let builder = std::thread::Builder::new().name(name).stack_size(STACK);
        match builder.spawn(move || inner.run()) {
            Ok(thread) => queue.threads.push(thread),
            Err(error) if queue.threads.is_empty() => {
                let reason = format!("can't start a thread that fetches: {error}");
                return Err(Error::new(ErrorKind::OutOfMemory, reason));
            }
            // Those that there are do it, only later.
            Err(_) => {}
        }
        Ok(())
    }

    /// A thread that fetches.
    fn run(&self) {
        while let Some(fetch) = self.next() {
            let start = Instant::now();
            let fetched = catch_unwind(AssertUnwindSafe(|| self.source.fetch(fetch.unit, &|| self.is_closed())));
            let fetched = fetched.unwrap_or_else(|panic| Err(panicked(&*panic)));
            self.telemetry.fetched(start.elapsed().as_nanos() as u64);
            self.pending.fetch_sub(1, Ordering::Relaxed);
            // What goes on from here may fail as well: this thread fetches on.
            let _ = catch_unwind(AssertUnwindSafe(|| fetch.finish(fetched)));
            let mut queue = self.lock();
            if let Some(next) = queue.behind.remove(&fetch.number) {
                queue.wanted.push(next);
                drop(queue);
                self.changed.notify_one();
            }
        }
    }

    /// Waits for something to fetch.
    fn next(&self) -> Option<Arc<Fetch>> {
        let mut queue = self.lock();
        loop {
            if self.is_closed() {
                return None;
            }
            if let Some(wanted) = queue.wanted.pop() {
                return Some(wanted.fetch);
            }
            queue.idle += 1;
            queue = self.changed.wait(queue).unwrap_or_else(PoisonError::into_inner);
            queue.idle -= 1;
        }
    }
}

#[cfg(test)]
mod tests {
    use std::ops::Range;
    use std::sync::mpsc::{Sender, channel};
    use std::time::Duration;

    use fastpipe_batch::{BufferPool, Pass, Row, Sink, SourceFacts, Unit, UnitInfo, Unpicked, Work};

    use super::*;

    /// Tells which units are fetched, and takes its time.
    struct Slow {
        facts: SourceFacts,
        /// Whether all units are rests of the first.
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
            unreachable!("nobody asks")
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
            unreachable!("nobody asks")
        }

        fn pick(&self, _: &[&dyn Unit], _: &[Row], _: Range<usize>, _: &mut Sink<'_>) -> Result<(), Unpicked> {
            unreachable!("nobody asks")
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
        (Fetches::new(&source, Arc::new(Telemetry::new())), heard)
    }

    /// Waits until all are there.
    fn wait(all: &[Arc<Fetch>]) {
        let (send, heard) = channel();
        for fetch in all {
            let send = send.clone();
            fetch.then(Box::new(move || send.send(()).unwrap()));
        }
        all.iter().for_each(|_| heard.recv().unwrap());
    }

    #[test]
    fn as_many_wait_at_once_as_may() {
        let (fetches, _heard) = fetches(5, 300);
        let start = Instant::now();
        let all: Vec<_> = (0..5).map(|unit| fetches.start(unit, unit).unwrap()).collect();
        assert!(!fetches.have_room());
        wait(&all);
        // All the calls' time, in less than that of two.
        let spent = fetches.inner.telemetry.counts().fetching;
        assert!(spent >= 1_500_000_000 && start.elapsed() < Duration::from_millis(600));
        assert!(fetches.have_room());
        for (unit, fetch) in all.iter().enumerate() {
            let Fetched::Other { what, .. } = fetch.take().unwrap() else {
                panic!("something else")
            };
            assert_eq!(*what.downcast::<u64>().unwrap(), unit as u64);
            assert_eq!(fetch.take().err().unwrap().kind(), ErrorKind::Internal, "it is gone");
        }
        fetches.close();
    }

    #[test]
    fn what_is_needed_first_is_fetched_first() {
        let (fetches, heard) = fetches(1, 5);
        let all = [(0, 0), (7, 9), (8, 2), (9, 2)].map(|(unit, batch)| {
            let fetch = fetches.start(unit, batch).unwrap();
            // The first is under way before others are asked for.
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
    fn the_rest_of_a_unit_is_fetched_behind_it() {
        let (fetches, heard) = fetches_of(4, 200, true);
        let start = Instant::now();
        let all: Vec<_> = (0..4).map(|unit| fetches.start(unit, 0).unwrap()).collect();
        wait(&all);
        assert_eq!(heard.try_iter().collect::<Vec<_>>(), [0, 1, 2, 3]);
        assert!(start.elapsed() >= Duration::from_millis(800), "one after the other");
        // A unit is no rest of one that isn't in front of it, or that is there.
        let all = [4, 7].map(|unit| fetches.start(unit, 1).unwrap());
        let start = Instant::now();
        wait(&all);
        assert!(start.elapsed() < Duration::from_millis(395));
        // A unit that is asked for again has a rest of its own.
        let twice: Vec<_> = [8, 9, 8, 9].map(|unit| fetches.start(unit, 2).unwrap()).into();
        wait(&twice);
        let many: Vec<_> = (0..10_000).map(|unit| fetches.start(unit, 2).unwrap()).collect();
        fetches.close();
        assert!(many.iter().all(|fetch| fetch.is_done()) && many[9_999].take().is_err());
    }

    #[test]
    fn closing_cancels_and_forgets() {
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
