//! What a pass has done, and where its time went. Always on: a few clock readings and additions for each task, none for
//! a record.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastpipe_batch::Work;

/// What threads spend their time on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Fetching the bytes of units.
    Read,
    /// Making units ready: decompressing, say.
    Open,
    /// Finding where records start, so that any of them can be picked.
    Index,
    /// Skipping records, so that another thread can go on behind them.
    Advance,
    /// Bringing records to where they belong: decoding, say.
    Decode,
    /// Joining what has no fixed size.
    Assemble,
    /// Asking the order what comes next, and preparing batches.
    Plan,
}

impl Activity {
    /// All of them.
    pub const ALL: [Activity; 7] = [
        Activity::Read,
        Activity::Open,
        Activity::Index,
        Activity::Advance,
        Activity::Decode,
        Activity::Assemble,
        Activity::Plan,
    ];

    /// A name for each; what a source does has the name that the source gives it.
    pub fn name(self, work: Work) -> &'static str {
        match self {
            Activity::Read => "reading",
            Activity::Open => work.open,
            Activity::Index => "indexing",
            Activity::Advance => "skipping",
            Activity::Decode => work.place,
            Activity::Assemble => "assembling",
            Activity::Plan => "planning",
        }
    }
}

/// What was counted.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Counts {
    pub(crate) units_opened: u64,
    pub(crate) rows_opened: u64,
    pub(crate) bytes_read: u64,
    pub(crate) bytes_opened: u64,
    pub(crate) bytes_delivered: u64,
    pub(crate) rows_delivered: u64,
    pub(crate) batches: u64,
    pub(crate) rows_skipped: u64,
    pub(crate) rows_reopened: u64,
    /// Nanoseconds that calls which fetch took.
    pub(crate) fetching: u64,
    /// Nanoseconds in which the consumer waited for a batch.
    pub(crate) consumer_waited: u64,
    /// Nanoseconds in which it was away with one.
    pub(crate) consumer_away: u64,
}

/// Counters of a pass.
#[derive(Debug)]
pub struct Telemetry {
    began: Instant,
    /// Nanoseconds that the pass took, once it has ended.
    ended: OnceLock<u64>,
    nanos: [AtomicU64; Activity::ALL.len()],
    units_opened: AtomicU64,
    rows_opened: AtomicU64,
    bytes_read: AtomicU64,
    bytes_opened: AtomicU64,
    bytes_delivered: AtomicU64,
    rows_delivered: AtomicU64,
    batches: AtomicU64,
    rows_skipped: AtomicU64,
    rows_reopened: AtomicU64,
    fetching: AtomicU64,
    consumer_waited: AtomicU64,
    consumer_away: AtomicU64,
}

fn add(counter: &AtomicU64, amount: u64) {
    counter.fetch_add(amount, Ordering::Relaxed);
}

impl Telemetry {
    pub(crate) fn new() -> Telemetry {
        Telemetry {
            began: Instant::now(),
            ended: OnceLock::new(),
            nanos: Default::default(),
            units_opened: AtomicU64::new(0),
            rows_opened: AtomicU64::new(0),
            bytes_read: AtomicU64::new(0),
            bytes_opened: AtomicU64::new(0),
            bytes_delivered: AtomicU64::new(0),
            rows_delivered: AtomicU64::new(0),
            batches: AtomicU64::new(0),
            rows_skipped: AtomicU64::new(0),
            rows_reopened: AtomicU64::new(0),
            fetching: AtomicU64::new(0),
            consumer_waited: AtomicU64::new(0),
            consumer_away: AtomicU64::new(0),
        }
    }

    /// Nanoseconds since the pass began.
    pub(crate) fn now(&self) -> u64 {
        self.began.elapsed().as_nanos() as u64
    }

    /// The pass has ended.
    pub(crate) fn end(&self) {
        self.ended.get_or_init(|| self.now());
    }

    /// Nanoseconds since the pass began, until it ended.
    pub(crate) fn elapsed(&self) -> u64 {
        self.ended.get().copied().unwrap_or_else(|| self.now())
    }

    /// Does something and says how many nanoseconds it took.
    pub(crate) fn time<T>(&self, activity: Activity, part: impl FnOnce() -> T) -> (T, u64) {
        let start = Instant::now();
        let result = part();
        let nanos = start.elapsed().as_nanos() as u64;
        self.took(activity, nanos);
        (result, nanos)
    }

    pub(crate) fn took(&self, activity: Activity, nanos: u64) {
        self.nanos[activity as usize].fetch_add(nanos, Ordering::Relaxed);
    }

    pub(crate) fn nanos(&self, activity: Activity) -> u64 {
        self.nanos[activity as usize].load(Ordering::Relaxed)
    }

    /// Nanoseconds of work of all threads.
    pub(crate) fn busy(&self) -> u64 {
        Activity::ALL.iter().map(|&activity| self.nanos(activity)).sum()
    }

    /// A unit was opened: this many rows, bytes as stored, and bytes as it is open.
    pub(crate) fn opened(&self, rows: u64, stored: u64, held: u64) {
        add(&self.units_opened, 1);
        add(&self.rows_opened, rows);
        add(&self.bytes_read, stored);
        add(&self.bytes_opened, held);
    }

    /// A unit of this many rows is opened for another time.
    pub(crate) fn reopens(&self, rows: u64) {
        add(&self.rows_reopened, rows);
    }

    /// So many rows were skipped.
    pub(crate) fn skipped(&self, rows: u64) {
        add(&self.rows_skipped, rows);
    }

    /// A call that fetches took so long. It isn't work: no thread of the pass waits for it.
    pub(crate) fn fetched(&self, nanos: u64) {
        add(&self.fetching, nanos);
    }

    /// A batch was made.
    pub(crate) fn made(&self, rows: u64, bytes: u64) {
        add(&self.bytes_delivered, bytes);
        add(&self.rows_delivered, rows);
        add(&self.batches, 1);
    }

    /// The consumer has waited for a batch.
    pub(crate) fn waited(&self, time: Duration) {
        add(&self.consumer_waited, time.as_nanos() as u64);
    }

    /// The consumer was away with a batch.
    pub(crate) fn was_away(&self, time: Duration) {
        add(&self.consumer_away, time.as_nanos() as u64);
    }

    /// Bytes that were read so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Nanoseconds in which the consumer was away with batches, and in which it waited for them.
    pub(crate) fn consumer(&self) -> (u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (load(&self.consumer_away), load(&self.consumer_waited))
    }

    /// All that was counted so far.
    pub(crate) fn counts(&self) -> Counts {
        let count = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        Counts {
            units_opened: count(&self.units_opened),
            rows_opened: count(&self.rows_opened),
            bytes_read: count(&self.bytes_read),
            bytes_opened: count(&self.bytes_opened),
            bytes_delivered: count(&self.bytes_delivered),
            rows_delivered: count(&self.rows_delivered),
            batches: count(&self.batches),
            rows_skipped: count(&self.rows_skipped),
            rows_reopened: count(&self.rows_reopened),
            fetching: count(&self.fetching),
            consumer_waited: count(&self.consumer_waited),
            consumer_away: count(&self.consumer_away),
        }
    }
}
