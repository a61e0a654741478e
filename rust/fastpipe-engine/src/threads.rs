//! How many threads a pass uses.
//!
//! A batch takes `work / threads + overhead`, where the overhead is how long each thread slept in its turn although it
//! was to start: next to nothing where there is always something in the queue, and more than the work where batches are
//! small and come one by one. As few threads are chosen as make batches as fast as any number does; and when the
//! consumer takes its time, as few as keep up with it. The idea is AvroTensorDataset's, which knows no consumer.

/// Batches between two decisions.
const BATCHES: u64 = 8;

/// The threads keep up if they need at most this fraction of the consumer's time.
const HEADROOM: f64 = 0.8;

/// More threads must make batches faster by this much.
const WORTH: f64 = 0.02;

/// Weight of what was measured last.
const NEW: f64 = 0.3;

/// What was measured since a pass began.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) batches: u64,
    /// Nanoseconds of work of all threads.
    pub(crate) work: u64,
    /// Nanoseconds in which the consumer was away with a batch.
    pub(crate) away: u64,
    /// Nanoseconds in which the consumer waited.
    pub(crate) waited: u64,
    /// Nanoseconds from when threads that slept were to start until they did, all together.
    pub(crate) delays: u64,
}

/// Chooses a number of threads.
#[derive(Debug)]
pub(crate) struct Chooser {
    most: usize,
    chosen: usize,
    last: Measured,
    /// Nanoseconds a batch.
    work: Option<f64>,
    away: f64,
    /// Nanoseconds a batch and thread, when there were several.
    delay: f64,
}

impl Chooser {
    pub(crate) fn new(most: usize) -> Chooser {
        Chooser {
            most: most.max(1),
            chosen: most.max(1),
            last: Measured::default(),
            work: None,
            away: 0.0,
            delay: 0.0,
        }
    }

    /// Another number of threads, if there is reason to.
    pub(crate) fn look(&mut self, now: Measured) -> Option<usize> {
        let batches = now.batches - self.last.batches;
        if batches < BATCHES || self.most == 1 {
            return None;
        }
        let a_batch = |now: u64, last: u64| now.saturating_sub(last) as f64 / batches as f64;
        let (work, away) = (a_batch(now.work, self.last.work), a_batch(now.away, self.last.away));
        let waited = a_batch(now.waited, self.last.waited);
        let delay = a_batch(now.delays, self.last.delays) / self.chosen as f64;
        self.last = now;
        match &mut self.work {
            None => (self.work, self.away, self.delay) = (Some(work), away, delay),
            Some(mean) => {
                *mean += NEW * (work - *mean);
                self.away += NEW * (away - self.away);
                if self.chosen > 1 {
                    self.delay += NEW * (delay - self.delay);
                }
            }
        }
        let mut chosen = self.best();
        // The consumer waits although it should not have to: the model is wrong here, so one more.
        if waited > 0.05 * (waited + away) && chosen <= self.chosen && away > waited {
            chosen = (self.chosen + 1).min(self.most);
        }
        // One step at a time downwards: a consumer that pauses once is no reason.
        chosen = chosen.max(self.chosen.saturating_sub(1));
        (chosen != self.chosen).then(|| {
            self.chosen = chosen;
            chosen
        })
    }

    fn best(&self) -> usize {
        let work = self.work.unwrap_or(0.0);
        let time = |threads: usize| work / threads as f64 + if threads == 1 { 0.0 } else { self.delay };
        let mut best = 1;
        for threads in 2..=self.most {
            if time(threads) < time(best) * (1.0 - WORTH) {
                best = threads;
            }
        }
        (1..=best)
            .find(|&threads| time(threads) <= HEADROOM * self.away)
            .unwrap_or(best)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Lets a chooser see a steady load, in which each thread starts late with each batch by the delay; returns what it
    /// settles on.
    fn settle(most: usize, work: u64, away: u64, delay: u64) -> usize {
        let mut chooser = Chooser::new(most);
        let mut now = Measured::default();
        for _ in 0..200 {
            now.batches += 1;
            now.work += work;
            now.away += away;
            now.delays += delay * chooser.chosen as u64;
            let each = work / chooser.chosen as u64 + delay;
            now.waited += each.saturating_sub(away);
            chooser.look(now);
        }
        chooser.chosen
    }

    #[test]
    fn a_fast_consumer_gets_all_threads() {
        assert_eq!(settle(16, 2_000_000, 10_000, 20_000), 16);
        assert_eq!(settle(2, 2_000_000, 0, 50_000), 2);
    }

    #[test]
    fn a_slow_consumer_gets_as_many_as_keep_up() {
        assert_eq!(settle(16, 2_000_000, 10_000_000, 20_000), 1);
        assert_eq!(settle(16, 2_000_000, 1_000_000, 20_000), 3);
    }

    #[test]
    fn work_below_the_delay_stays_on_one_thread() {
        assert_eq!(settle(8, 20_000, 1_000, 50_000), 1);
        assert_eq!(settle(8, 20_000, 1_000, 100), 8, "threads that hardly sleep");
    }
}
