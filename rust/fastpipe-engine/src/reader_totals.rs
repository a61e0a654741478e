//! Totals over all passes of a reader, for monitoring.
//!
//! Batches are counted when the consumer gets them. Each pass counts its work (`telemetry.rs`). The counts are added to
//! the totals once no thread can change them, so that totals never decrease.

use std::collections::HashSet;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use fastpipe_batch::KeyCount;

use crate::batch::Batch;
use crate::telemetry::{Activity, Telemetry};

/// The first bucket contains waits of less than 2^10 nanoseconds, and the last bucket waits of 2^37 (137 seconds) or
/// more.
const SHORTEST: u32 = 10;
const LONGEST: u32 = 37;
/// Each power of two in between has four buckets of equal width.
const BUCKETS: usize = 4 * (LONGEST - SHORTEST) as usize + 2;

/// A batch that the consumer receives.
pub struct Yielded {
    /// The index of the batch in its pass.
    pub(crate) number: u64,
    /// The epoch of the batch.
    pub(crate) epoch: u64,
    /// The step of the batch, and its index among the batches of all ranks.
    pub(crate) place: (u64, u64),
    /// The keys of each of its columns.
    pub(crate) keys: Vec<KeyCount>,
    rows: u64,
    bytes: u64,
    waited: Duration,
}

impl Yielded {
    /// Describes batch `number` of a pass, for which the consumer has waited since `asked`.
    pub fn new(number: u64, batch: &Batch, asked: Instant) -> Yielded {
        Yielded {
            number,
            epoch: batch.info.epoch,
            place: (batch.info.step, batch.info.batch),
            keys: batch.info.keys.clone(),
            rows: (batch.info.valid
                - batch
                    .info
                    .filled_slots()
                    .filter(|&slot| slot < batch.info.valid)
                    .count()) as u64,
            bytes: batch.parts.iter().map(|part| part.len as u64).sum(),
            waited: asked.elapsed(),
        }
    }
}

/// Totals over the passes of a reader.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Totals {
    /// Batches that the consumer has received.
    pub batches: u64,
    /// Valid rows of these batches, without padding.
    pub rows: u64,
    /// Bytes of the arrays of these batches.
    pub bytes: u64,
    /// The epoch of the last batch.
    pub epoch: u64,
    /// Rows of an epoch that are in no batch of any rank.
    pub left_out: u64,
    /// Bytes read from files.
    pub bytes_read: u64,
    /// Nanoseconds that fetching calls took.
    pub fetching: u64,
    /// Nanoseconds that threads spent on each of [`Activity::ALL`].
    pub work: [u64; Activity::ALL.len()],
    /// Nanoseconds that the consumer has waited for batches.
    pub waited: u64,
    /// The number of waits in each bucket.
    pub waits: Vec<u64>,
}

impl Totals {
    fn add(&mut self, telemetry: &Telemetry) {
        let counts = telemetry.counts();
        self.bytes_read += counts.bytes_read;
        self.fetching += counts.fetching;
        for (sum, activity) in self.work.iter_mut().zip(Activity::ALL) {
            *sum += telemetry.nanos(activity);
        }
    }
}

/// The totals of a reader in one process. A forked child counts from zero.
#[derive(Debug, Default)]
pub struct ReaderTotals {
    /// Locked only briefly, and with the GIL held, so no other thread can hold the lock when the process forks.
    /// TensorFlow's threads are an exception, but TensorFlow itself doesn't survive a fork.
    state: Mutex<State>,
}

#[derive(Debug, Default)]
struct State {
    process: u32,
    /// Does not include the work of `running`.
    totals: Totals,
    /// Counters of passes whose threads may still be working.
    running: Vec<Arc<Telemetry>>,
    /// The features about whose keys the caller was warned.
    warned: HashSet<Arc<str>>,
}

impl ReaderTotals {
    /// Returns the exclusive upper bound of each bucket except the last, in nanoseconds.
    pub fn wait_bounds() -> impl Iterator<Item = u64> {
        let bounds = |power| (4..8_u64).map(move |quarters| quarters << (power - 2));
        (SHORTEST..LONGEST).flat_map(bounds).chain([1 << LONGEST])
    }

    /// Returns the current totals.
    pub fn totals(&self) -> Totals {
        let state = self.of_this_process();
        let mut totals = state.totals.clone();
        state.running.iter().for_each(|telemetry| totals.add(telemetry));
        totals
    }

    /// Starts counting a pass that leaves out `left_out` rows of each epoch.
    pub(crate) fn begin_pass(&self, telemetry: Option<Arc<Telemetry>>, left_out: u64) {
        let State { totals, running, .. } = &mut *self.of_this_process();
        for ended in running.extract_if(.., |telemetry| Arc::strong_count(telemetry) == 1) {
            totals.add(&ended);
        }
        running.extend(telemetry);
        totals.left_out = left_out;
    }

    /// Counts a batch that the consumer has received from a started pass.
    pub(crate) fn count(&self, batch: &Yielded) {
        let (totals, waited) = (&mut self.lock().totals, batch.waited.as_nanos() as u64);
        totals.batches += 1;
        totals.rows += batch.rows;
        totals.bytes += batch.bytes;
        totals.epoch = batch.epoch;
        totals.waited += waited;
        totals.waits[bucket(waited)] += 1;
    }

    /// Whether the caller is to be warned about the keys of a feature, which happens once.
    pub(crate) fn warns(&self, feature: &Arc<str>) -> bool {
        self.of_this_process().warned.insert(feature.clone())
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn of_this_process(&self) -> MutexGuard<'_, State> {
        let mut state = self.lock();
        let process = std::process::id();
        if state.process != process {
            *state = State {
                process,
                ..State::default()
            };
            state.totals.waits = vec![0; BUCKETS];
        }
        state
    }
}

/// Returns the bucket of a wait.
fn bucket(nanos: u64) -> usize {
    match nanos.checked_ilog2() {
        Some(power) if power >= LONGEST => BUCKETS - 1,
        Some(power) if power >= SHORTEST => {
            let quarters = (nanos >> (power - 2)) as usize - 4;
            4 * (power - SHORTEST) as usize + quarters + 1
        }
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn yielded(rows: u64, waited: u64) -> Yielded {
        Yielded {
            number: 0,
            epoch: 3,
            place: (0, 0),
            keys: Vec::new(),
            rows,
            bytes: 8 * rows,
            waited: Duration::from_nanos(waited),
        }
    }

    proptest! {
        #[test]
        fn a_wait_is_in_the_bucket_between_its_bounds(power in 0..64u32, nanos: u64) {
            let (nanos, bounds) = (nanos >> power, ReaderTotals::wait_bounds().collect::<Vec<_>>());
            prop_assert_eq!(bounds.len() + 1, BUCKETS);
            prop_assert_eq!(bucket(nanos), bounds.partition_point(|&bound| bound <= nanos));
        }
    }

    #[test]
    fn buckets_above_the_first_are_narrower_than_a_quarter_of_their_waits() {
        let bounds: Vec<_> = ReaderTotals::wait_bounds().collect();
        assert!(
            bounds
                .iter()
                .enumerate()
                .all(|(at, &bound)| bucket(bound) == at + 1 && bucket(bound - 1) == at)
        );
        assert!(
            bounds
                .windows(2)
                .all(|pair| pair[1] > pair[0] && 4 * (pair[1] - pair[0]) <= pair[0])
        );
    }

    #[test]
    fn the_work_of_a_pass_is_counted_once() {
        let totals = ReaderTotals::default();
        let read = || totals.totals().bytes_read;
        let (first, second) = (Arc::new(Telemetry::new()), Arc::new(Telemetry::new()));
        totals.begin_pass(Some(first.clone()), 7);
        first.opened(1, 100, 1);
        totals.begin_pass(Some(second.clone()), 5);
        second.opened(1, 10, 1);
        // A thread of the first pass is still working.
        first.opened(1, 1000, 1);
        first.took(Activity::Decode, 5);
        first.fetched(6);
        assert_eq!(read(), 1110);
        drop(first);
        assert_eq!(read(), 1110);
        totals.begin_pass(None, 5);
        assert_eq!(totals.lock().running.len(), 1);
        let now = totals.totals();
        assert_eq!(
            (now.bytes_read, now.fetching, now.work[Activity::Decode as usize]),
            (1110, 6, 5)
        );
        assert_eq!(now.left_out, 5);
    }

    #[test]
    fn another_process_counts_from_zero() {
        let totals = ReaderTotals::default();
        let none = totals.totals();
        assert_eq!(none.waits, [0; BUCKETS]);
        totals.begin_pass(Some(Arc::new(Telemetry::new())), 0);
        totals.count(&yielded(4, 100));
        totals.count(&yielded(3, 5000));
        let seen = totals.totals();
        assert_eq!(
            (seen.batches, seen.rows, seen.bytes, seen.epoch, seen.waited),
            (2, 7, 56, 3, 5100)
        );
        assert_eq!(seen.waits.iter().sum::<u64>(), 2);
        totals.lock().process += 1;
        assert_eq!(totals.totals(), none);
    }
}
