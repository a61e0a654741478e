//! Options of a pass: its threads, prefetch, and memory limit.

use crate::in_flight::SMALLEST_TASK;

/// Options of a pass. They never change which batches it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Number of decoding threads. `None` uses the number that gives the best throughput, up to the number of
    /// processors that the process may use.
    pub num_threads: Option<usize>,
    /// Number of passes like this one that share these processors, at least one. The pass uses only its share of the
    /// threads, unless `num_threads` is set.
    pub sharers: usize,
    /// Number of batches to prepare in advance, at least one. `None` prepares enough to keep the threads busy.
    pub prefetch: Option<usize>,
    /// Bytes that the pass may hold, not counting batches that the consumer has received. `None` for no limit.
    pub memory_limit: Option<u64>,
    /// One past the last epoch; `None` for no end.
    pub end_epoch: Option<u64>,
    /// Maximum number of batches; `None` for all batches of these epochs.
    pub limit: Option<u64>,
}

impl Options {
    /// Number of batches that may be in flight if `threads` threads work and the memory limit allows them.
    pub(crate) fn ahead(&self, threads: usize) -> u64 {
        match (self.prefetch, threads as u64) {
            (Some(prefetch), _) => prefetch.max(1) as u64,
            (None, 1) => 2,
            (None, threads) => threads + 2,
        }
    }

    /// Returns the number of tasks for a batch that is expected to take `nanos` nanoseconds. A batch is divided only if
    /// there are fewer batches in flight than threads, since the variable-size values of its tasks must be joined
    /// afterwards.
    pub(crate) fn tasks(&self, nanos: u64, threads: usize) -> u64 {
        let tasks = (threads as u64).div_ceil(self.ahead(threads));
        tasks.min(nanos / SMALLEST_TASK).max(1)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn prefetching(prefetch: Option<usize>) -> Options {
        Options {
            num_threads: None,
            sharers: 1,
            prefetch,
            memory_limit: None,
            end_epoch: None,
            limit: None,
        }
    }

    #[test]
    fn batches_are_split_only_if_too_few_are_in_flight() {
        let free = prefetching(None);
        assert_eq!([1, 2, 8].map(|threads| free.ahead(threads)), [2, 4, 10]);
        assert_eq!([1, 2, 8].map(|threads| free.tasks(u64::MAX, threads)), [1, 1, 1]);
        let two = prefetching(Some(2));
        assert_eq!([1, 2, 8].map(|threads| two.tasks(u64::MAX, threads)), [1, 1, 4]);
        let none = prefetching(Some(0));
        assert_eq!((none.ahead(8), none.tasks(u64::MAX, 8)), (1, 8));
        assert_eq!(none.tasks(3 * SMALLEST_TASK, 8), 3, "no task is too small");
        assert_eq!(none.tasks(0, 8), 1);
    }
}
