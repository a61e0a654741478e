//! What a pass has done, and where its time went. Always on: a few clock readings and additions for each task, none for a
//! record.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, OnceLock, PoisonError};
use std::time::Instant;

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
    /// Passing over records, so that another thread can go on behind them.
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

/// A stretch of work that one thread did without a break.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Span {
    /// What was done, the main part of it.
    pub activity: Activity,
    /// The batch that it was done for, counted over the pass.
    pub batch: u64,
    /// The thread, from 0.
    pub thread: u32,
    /// Nanoseconds since the pass began.
    pub start: u64,
    /// Nanoseconds since the pass began.
    pub end: u64,
    /// Nanoseconds that it was expected to take.
    pub expected: u64,
}

/// Counters of a pass.
#[derive(Debug)]
pub(crate) struct Telemetry {
    began: Instant,
    /// Nanoseconds that the pass took, once it has ended.
    ended: OnceLock<u64>,
    nanos: [AtomicU64; Activity::ALL.len()],
    pub(crate) units_opened: AtomicU64,
    pub(crate) rows_opened: AtomicU64,
    pub(crate) bytes_read: AtomicU64,
    pub(crate) bytes_opened: AtomicU64,
    pub(crate) bytes_delivered: AtomicU64,
    pub(crate) rows_delivered: AtomicU64,
    pub(crate) batches: AtomicU64,
    pub(crate) rows_skipped: AtomicU64,
    pub(crate) rows_reopened: AtomicU64,
    /// Nanoseconds in which the consumer waited for a batch.
    pub(crate) consumer_waited: AtomicU64,
    /// Nanoseconds in which it was away with one.
    pub(crate) consumer_away: AtomicU64,
    spans: Option<Mutex<Vec<Span>>>,
}

impl Telemetry {
    pub(crate) fn new(record_spans: bool) -> Telemetry {
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
            consumer_waited: AtomicU64::new(0),
            consumer_away: AtomicU64::new(0),
            spans: record_spans.then(Mutex::default),
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

    pub(crate) fn add(&self, counter: &AtomicU64, amount: u64) {
        counter.fetch_add(amount, Ordering::Relaxed);
    }

    /// Notes a stretch of work, if that is wanted.
    pub(crate) fn span(&self, span: impl FnOnce() -> Span) {
        if let Some(spans) = &self.spans {
            spans.lock().unwrap_or_else(PoisonError::into_inner).push(span());
        }
    }

    pub(crate) fn records_spans(&self) -> bool {
        self.spans.is_some()
    }

    pub(crate) fn spans(&self) -> Vec<Span> {
        let spans = self.spans.as_ref();
        spans.map_or_else(Vec::new, |spans| {
            spans.lock().unwrap_or_else(PoisonError::into_inner).clone()
        })
    }
}
