//! Metrics of a server.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Counters of a server, and `clients`, the number of streams that are being sent.
#[derive(Debug, Default)]
pub struct Meter {
    /// Streams of batches that clients requested.
    pub requests: AtomicU64,
    /// Streams of batches that are being sent.
    pub clients: AtomicU64,
    /// Batches that were sent.
    pub batches: AtomicU64,
    /// Bytes of these batches.
    pub bytes: AtomicU64,
    /// Errors that were sent to clients.
    pub errors: AtomicU64,
    /// Requests that were refused because the server was busy.
    pub refused: AtomicU64,
    /// Connections that were closed because their clients stopped reading while others waited.
    pub closed: AtomicU64,
    waits: Mutex<Waits>,
}

/// The reason why a request waits.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A batch is being made.
    Making = 0,
    /// The client hasn't read earlier data yet.
    HeldBack = 1,
}

#[derive(Debug)]
struct Waits {
    /// By reason: the number of waiting requests, and the seconds that requests have waited.
    now: [u32; 2],
    seconds: [f64; 2],
    until: Instant,
}

impl Default for Waits {
    fn default() -> Self {
        Waits {
            now: [0; 2],
            seconds: [0.0; 2],
            until: Instant::now(),
        }
    }
}

impl Waits {
    /// Adds the time up to now, so that a wait counts before it ends.
    fn count(&mut self) {
        let now = Instant::now();
        let passed = now.duration_since(self.until).as_secs_f64();
        for (seconds, waiting) in self.seconds.iter_mut().zip(self.now) {
            *seconds += passed * f64::from(waiting);
        }
        self.until = now;
    }
}

/// Counts a request as waiting until it is dropped.
pub struct Waiting<'a> {
    meter: &'a Meter,
    wait: Wait,
}

impl Drop for Waiting<'_> {
    fn drop(&mut self) {
        self.meter.change(|now| now[self.wait as usize] -= 1);
    }
}

impl Meter {
    /// Increases a counter.
    pub fn add(&self, counter: impl FnOnce(&Meter) -> &AtomicU64, count: u64) {
        counter(self).fetch_add(count, Relaxed);
    }

    /// Starts counting a request as waiting.
    pub fn waits(&self, wait: Wait) -> Waiting<'_> {
        self.change(|now| now[wait as usize] += 1);
        Waiting { meter: self, wait }
    }

    fn change(&self, change: impl FnOnce(&mut [u32; 2])) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.count();
        change(&mut waits.now);
    }

    /// Seconds that requests have waited for this reason, summed over requests.
    pub fn seconds(&self, wait: Wait) -> f64 {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.count();
        waits.seconds[wait as usize]
    }
}
