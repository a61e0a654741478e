//! When to send a request a second time.
//!
//! A few requests of object stores take seconds instead of milliseconds. A second request for the same range is
//! usually answered at once. A request gets a competitor after three times the time that nine of ten recent requests
//! took. At most 3 % of the requests get one, so that a store in trouble isn't asked twice for everything. The idea is
//! from Dean and Barroso, "The Tail at Scale", Communications of the ACM 56 (2), 2013.

use std::collections::VecDeque;
use std::time::Duration;

/// Number of recent requests that count.
const RECENT: usize = 64;

/// Number of requests before the first competitor.
const FIRST: usize = 16;

/// The shortest time after which a request gets a competitor.
const SOONEST: Duration = Duration::from_millis(100);

/// One competitor is allowed for this many requests: 3 %.
const REQUESTS_EACH: u64 = 34;

/// The times of recent requests, and the number of competitors.
#[derive(Debug, Default)]
pub struct Hedge {
    recent: VecDeque<Duration>,
    requests: u64,
    competitors: u64,
}

impl Hedge {
    /// Records a request that took `time`.
    pub fn observe(&mut self, time: Duration) {
        if self.recent.len() == RECENT {
            self.recent.pop_front();
        }
        self.recent.push_back(time);
        self.requests += 1;
    }

    /// Returns the time after which a request should get a competitor. `None` if too little is known.
    pub fn after(&self) -> Option<Duration> {
        if self.recent.len() < FIRST {
            return None;
        }
        let mut sorted: Vec<Duration> = self.recent.iter().copied().collect();
        sorted.sort_unstable();
        let ninth = sorted[sorted.len() * 9 / 10];
        Some((ninth * 3).max(SOONEST))
    }

    /// Returns whether another competitor is within the limit, and counts it.
    pub fn allows(&mut self) -> bool {
        let allowed = self.competitors < self.requests / REQUESTS_EACH + 1;
        self.competitors += u64::from(allowed);
        allowed
    }

    /// Returns the number of requests that had a result, and of competitors.
    pub fn counts(&self) -> (u64, u64) {
        (self.requests, self.competitors)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn slow_requests_get_a_competitor_within_the_limit() {
        let mut hedge = Hedge::default();
        assert_eq!(hedge.after(), None);
        for i in 0..1000 {
            hedge.observe(Duration::from_millis(if i % 50 == 0 { 5000 } else { 90 }));
        }
        assert_eq!(hedge.after(), Some(Duration::from_millis(270)));
        let allowed = (0..1000).filter(|_| hedge.allows()).count();
        assert_eq!((allowed, hedge.counts()), (30, (1000, 30)));
    }

    #[test]
    fn fast_stores_are_not_asked_twice_soon() {
        let mut hedge = Hedge::default();
        (0..FIRST).for_each(|_| hedge.observe(Duration::from_millis(1)));
        assert_eq!(hedge.after(), Some(SOONEST));
    }
}
