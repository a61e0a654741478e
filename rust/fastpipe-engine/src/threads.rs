//! Choosing the number of active threads of a pass.
//!
//! A batch takes `work / threads + overhead`. The overhead is the time from waking each thread until it runs. It is
//! close to zero if the queue is never empty, and exceeds the work if batches are small and arrive one at a time. The
//! chooser selects the smallest number of threads that produces batches as fast as any larger number. If the consumer
//! is slower, it selects the smallest number that keeps up with the consumer. The idea comes from AvroTensorDataset,
//! which doesn't consider the consumer.

/// Number of batches between two decisions.
const BATCHES: u64 = 8;

/// Threads keep up with the consumer if they need at most this fraction of its time.
const HEADROOM: f64 = 0.8;

/// The minimum relative speedup that justifies more threads.
const WORTH: f64 = 0.02;

/// The weight of the latest measurement.
const NEW: f64 = 0.3;

/// Measurements since the start of a pass.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Measured {
    pub(crate) batches: u64,
    /// Nanoseconds of work, summed over all threads.
    pub(crate) work: u64,
    /// Nanoseconds that the consumer spent between calls, using its batches.
    pub(crate) away: u64,
    /// Nanoseconds that the consumer waited for batches.
    pub(crate) waited: u64,
    /// Nanoseconds from waking threads until they ran, summed over all threads.
    pub(crate) delays: u64,
}

/// Chooses the number of active threads.
#[derive(Debug)]
pub(crate) struct Chooser {
    most: usize,
    chosen: usize,
    last: Measured,
    /// Nanoseconds of work per batch.
    work: Option<f64>,
    away: f64,
    /// Nanoseconds of delay per batch and thread, measured when several threads worked.
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

    /// Returns a new number of threads, if it should change.
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
        // The consumer waits although the model says that it shouldn't have to. The model is wrong here, so add a
        // thread.
        if waited > 0.05 * (waited + away) && chosen <= self.chosen && away > waited {
            chosen = (self.chosen + 1).min(self.most);
        }
        // Decrease by one thread at a time: a single pause of the consumer is not a trend.
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

    /// Simulates a steady load in which each thread starts `delay` late with each batch. Returns the number of threads
    /// that the chooser settles on.
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
    fn a_slow_consumer_gets_only_the_threads_that_it_needs() {
        assert_eq!(settle(16, 2_000_000, 10_000_000, 20_000), 1);
        assert_eq!(settle(16, 2_000_000, 1_000_000, 20_000), 3);
    }

    #[test]
    fn work_below_the_delay_stays_on_one_thread() {
        assert_eq!(settle(8, 20_000, 1_000, 50_000), 1);
        assert_eq!(
            settle(8, 20_000, 1_000, 100),
            8,
            "with a short delay, all threads are used"
        );
    }
}
