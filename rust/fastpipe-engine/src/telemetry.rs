//! Counters of a pass: work done and time spent. They are always on. Each task costs a few clock readings and
//! additions, and single records cost nothing.

use std::sync::OnceLock;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant};

use fastpipe_batch::Work;

/// The activities on which threads spend their time.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activity {
    /// Fetching the bytes of units.
    Read,
    /// Preparing units, for example decompressing them.
    Open,
    /// Finding the starts of records, so that any record can be picked.
    Index,
    /// Skipping records, so that another thread can continue after them.
    Advance,
    /// Placing records in a batch, for example by decoding them.
    Decode,
    /// Joining variable-size values.
    Assemble,
    /// Taking batches from the order, and preparing them.
    Plan,
}

impl Activity {
    /// All activities.
    pub const ALL: [Activity; 7] = [
        Activity::Read,
        Activity::Open,
        Activity::Index,
        Activity::Advance,
        Activity::Decode,
        Activity::Assemble,
        Activity::Plan,
    ];

    /// Returns the name of the activity. The source names its own activities.
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

/// A snapshot of the counters.
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
    /// Nanoseconds that fetching calls took.
    pub(crate) fetching: u64,
    /// Nanoseconds that the consumer waited for batches.
    pub(crate) consumer_waited: u64,
    /// Nanoseconds that the consumer spent between calls, using its batches.
    pub(crate) consumer_away: u64,
}

/// Counters of a pass.
#[derive(Debug)]
pub struct Telemetry {
    began: Instant,
    /// Nanoseconds that the pass took, set when it ends.
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

    /// Records the end of the pass.
    pub(crate) fn end(&self) {
        self.ended.get_or_init(|| self.now());
    }

    /// Nanoseconds from the start of the pass until now, or until it ended.
    pub(crate) fn elapsed(&self) -> u64 {
        self.ended.get().copied().unwrap_or_else(|| self.now())
    }

    /// Runs `part`, counts its time, and returns its result and the nanoseconds it took.
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

    /// Nanoseconds of work, summed over all threads.
    pub(crate) fn busy(&self) -> u64 {
        Activity::ALL.iter().map(|&activity| self.nanos(activity)).sum()
    }

    /// Counts an opened unit: its rows, its stored bytes, and its bytes when open.
    pub(crate) fn opened(&self, rows: u64, stored: u64, held: u64) {
        add(&self.units_opened, 1);
        add(&self.rows_opened, rows);
        add(&self.bytes_read, stored);
        add(&self.bytes_opened, held);
    }

    /// Counts `rows` rows of a unit that is opened again.
    pub(crate) fn reopens(&self, rows: u64) {
        add(&self.rows_reopened, rows);
    }

    /// Counts skipped rows.
    pub(crate) fn skipped(&self, rows: u64) {
        add(&self.rows_skipped, rows);
    }

    /// Counts the time of a fetching call. It isn't work, because no thread of the pass waits for the call.
    pub(crate) fn fetched(&self, nanos: u64) {
        add(&self.fetching, nanos);
    }

    /// Counts a finished batch.
    pub(crate) fn made(&self, rows: u64, bytes: u64) {
        add(&self.bytes_delivered, bytes);
        add(&self.rows_delivered, rows);
        add(&self.batches, 1);
    }

    /// Counts the time that the consumer waited for a batch.
    pub(crate) fn waited(&self, time: Duration) {
        add(&self.consumer_waited, time.as_nanos() as u64);
    }

    /// Counts the time that the consumer spent using a batch.
    pub(crate) fn was_away(&self, time: Duration) {
        add(&self.consumer_away, time.as_nanos() as u64);
    }

    /// Bytes read so far.
    pub(crate) fn bytes_read(&self) -> u64 {
        self.bytes_read.load(Ordering::Relaxed)
    }

    /// Nanoseconds that the consumer spent using batches, and nanoseconds that it waited for them.
    pub(crate) fn consumer(&self) -> (u64, u64) {
        let load = |counter: &AtomicU64| counter.load(Ordering::Relaxed);
        (load(&self.consumer_away), load(&self.consumer_waited))
    }

    /// Returns all counters.
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
