//! How many requests are in progress at once: as many as raise the rate at which bytes arrive.
//!
//! A link of 200 MB/s and 50 ms needs 150 requests of 64 KiB, a server on the same machine a few. So the limit doubles
//! as long as each doubling raises the rate. Later it is raised by a quarter from time to time, which stays if it pays.
//! It is halved if the rate fell to less than half, because a server that is overloaded answers slowly.

use std::time::{Duration, Instant};

/// Requests at the beginning.
const FIRST: usize = 32;

const LEAST: usize = 8;

/// The shortest time in which a rate is measured.
const SHORTEST: Duration = Duration::from_millis(20);

/// The gain that keeps a limit that was doubled, and one that was raised by a quarter.
const DOUBLED: f64 = 1.15;
const RAISED: f64 = 1.05;

/// Measured rates between two attempts to raise the limit.
const REST: u32 = 8;

/// The limit of requests that are in progress at once.
#[derive(Debug)]
pub(crate) struct Pace {
    limit: usize,
    most: usize,
    phase: Phase,
    /// The rate with the limit before the last change, in bytes per second.
    before: f64,
    since: Option<Instant>,
    requests: usize,
    bytes: u64,
    /// Whether the limit held a request back since then.
    was_reached: bool,
}

#[derive(Debug)]
enum Phase {
    Doubling,
    /// The number of rates until the next attempt.
    Resting(u32),
    /// The limit before the attempt.
    Trying(usize),
}

impl Pace {
    /// Creates a limit of up to `most` requests.
    pub(crate) fn new(most: usize) -> Pace {
        Pace {
            limit: FIRST.min(most),
            most,
            phase: Phase::Doubling,
            before: 0.0,
            since: None,
            requests: 0,
            bytes: 0,
            was_reached: false,
        }
    }

    /// The number of requests that may be in progress.
    pub(crate) fn limit(&self) -> usize {
        self.limit
    }

    /// Notes a request from `begun` to `now`, and its bytes. `held` says that the limit holds other requests back.
    pub(crate) fn ended(&mut self, bytes: u64, held: bool, begun: Instant, now: Instant) {
        let since = *self.since.get_or_insert(begun);
        self.requests += 1;
        self.bytes += bytes;
        self.was_reached |= held;
        let time = now.saturating_duration_since(since);
        // Requests that begin together end together, so a rate is measured over two rounds.
        if self.requests < 2 * self.limit || time < SHORTEST {
            return;
        }
        if self.was_reached {
            self.judge(self.bytes as f64 / time.as_secs_f64());
        }
        (self.since, self.requests, self.bytes, self.was_reached) = (Some(now), 0, 0, false);
    }

    /// Changes the limit after a rate was measured with it.
    fn judge(&mut self, rate: f64) {
        match self.phase {
            Phase::Doubling if rate > DOUBLED * self.before => {
                self.before = rate;
                if self.limit == self.most {
                    self.phase = Phase::Resting(REST);
                }
                self.set(2 * self.limit);
            }
            Phase::Doubling => {
                self.set(self.limit / 2);
                self.phase = Phase::Resting(REST);
            }
            Phase::Resting(_) if rate < self.before / 2.0 => {
                self.before = rate;
                self.set(self.limit / 2);
                self.phase = Phase::Resting(REST);
            }
            Phase::Resting(0) => {
                self.before = rate;
                self.phase = Phase::Trying(self.limit);
                self.set(self.limit + self.limit.div_ceil(4));
            }
            Phase::Resting(left) => self.phase = Phase::Resting(left - 1),
            Phase::Trying(former) => {
                if rate < RAISED * self.before {
                    self.set(former);
                } else {
                    self.before = rate;
                }
                self.phase = Phase::Resting(REST);
            }
        }
    }

    fn set(&mut self, limit: usize) {
        self.limit = limit.clamp(LEAST.min(self.most), self.most);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Sends requests over a link for some seconds. Returns the limit at the end, and the share of the link in the last
    /// second. Each request waits for `latency` seconds, and all share the link's `rate`.
    fn sent(pace: &mut Pace, seconds: f64, size: u64, latency: f64, rate: f64) -> (usize, f64) {
        let begin = Instant::now();
        let at = |time: f64| begin + Duration::from_secs_f64(time);
        let (mut free, mut ends) = (0.0f64, std::collections::VecDeque::new());
        let (mut time, mut last) = (0.0, 0u64);
        while time < seconds {
            while ends.len() < pace.limit() {
                free = (time + latency).max(free) + size as f64 / rate;
                ends.push_back((time, free));
            }
            let begun;
            (begun, time) = ends.pop_front().unwrap();
            pace.ended(size, true, at(begun), at(time));
            last += if time > seconds - 1.0 { size } else { 0 };
        }
        (pace.limit(), last as f64 / rate)
    }

    #[test]
    fn a_slow_link_is_filled_and_a_fast_one_gets_few_requests() {
        for (size, latency, rate, wanted) in [
            (64 << 10, 0.05, 200e6, 150..=512),
            (64 << 10, 0.05, 20e6, 8..=64),
            (8 << 20, 0.05, 200e6, 8..=64),
            (64 << 10, 0.0002, 3e9, 8..=32),
            (16 << 10, 0.2, 1e9, 512..=512),
        ] {
            let mut pace = Pace::new(512);
            let (limit, share) = sent(&mut pace, 6.0, size, latency, rate);
            assert!(wanted.contains(&limit), "{limit} requests of {size} bytes");
            let possible = (512.0 * size as f64 / latency / rate).min(1.0);
            assert!(
                share > 0.95 * possible,
                "{share} of the link with {limit} requests of {size} bytes"
            );
        }
    }

    #[test]
    fn the_limit_follows_the_link() {
        let mut pace = Pace::new(512);
        let (before, _) = sent(&mut pace, 4.0, 64 << 10, 0.05, 200e6);
        let (slower, share) = sent(&mut pace, 20.0, 64 << 10, 0.05, 20e6);
        assert!(slower < before && share > 0.95, "{slower} of {before}, {share}");
        let (faster, share) = sent(&mut pace, 60.0, 64 << 10, 0.05, 200e6);
        assert!(faster > slower && share > 0.8, "{faster}, {share}");
    }

    #[test]
    fn the_limit_stays_if_it_holds_nothing_back() {
        let (mut pace, begin) = (Pace::new(512), Instant::now());
        for number in 0..1000 {
            let at = begin + Duration::from_millis(number);
            pace.ended(1 << 20, false, at, at);
        }
        assert_eq!(pace.limit(), FIRST);
        assert_eq!(Pace::new(3).limit(), 3);
    }
}
