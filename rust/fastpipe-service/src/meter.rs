//! Counts what a server does.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};
use std::sync::{Mutex, PoisonError};
use std::time::Instant;

/// Numbers of a server. Counters grow; `clients` is how many streams are being sent now.
#[derive(Debug, Default)]
pub struct Meter {
    /// Streams of batches that were asked for.
    pub requests: AtomicU64,
    /// Streams of batches that are being sent.
    pub clients: AtomicU64,
    /// Batches that were sent.
    pub batches: AtomicU64,
    /// Their bytes.
    pub bytes: AtomicU64,
    /// Errors that clients were told.
    pub errors: AtomicU64,
    /// Requests that were refused because the server was busy.
    pub refused: AtomicU64,
    /// Connections that were closed because their clients took nothing while others waited.
    pub closed: AtomicU64,
    waits: Mutex<Waits>,
}

/// What a request waits for.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A batch that is being made.
    Making = 0,
    /// Its client, which takes what was sent before.
    HeldBack = 1,
}

#[derive(Debug)]
struct Waits {
    /// Requests that wait now, and seconds of these so far, by what they wait for.
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
    /// Counts up to now, so that waits show before they end.
    fn count(&mut self) {
        let now = Instant::now();
        let passed = now.duration_since(self.until).as_secs_f64();
        for (seconds, waiting) in self.seconds.iter_mut().zip(self.now) {
            *seconds += passed * f64::from(waiting);
        }
        self.until = now;
    }
}

/// A request that waits, until this is dropped.
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
    /// One more.
    pub fn add(&self, counter: impl FnOnce(&Meter) -> &AtomicU64, count: u64) {
        counter(self).fetch_add(count, Relaxed);
    }

    /// A request waits from now on.
    pub fn waits(&self, wait: Wait) -> Waiting<'_> {
        self.change(|now| now[wait as usize] += 1);
        Waiting { meter: self, wait }
    }

    fn change(&self, change: impl FnOnce(&mut [u32; 2])) {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.count();
        change(&mut waits.now);
    }

    /// Seconds that requests have waited for something, over all requests.
    pub fn seconds(&self, wait: Wait) -> f64 {
        let mut waits = self.waits.lock().unwrap_or_else(PoisonError::into_inner);
        waits.count();
        waits.seconds[wait as usize]
    }
}
