//! How a pass runs: its threads, how far ahead it decodes, and its memory.

use crate::in_flight::SMALLEST_TASK;

/// How a pass runs. Nothing here changes what it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that decode; `None` for as many as pay, of the processors that the process may use.
    pub num_threads: Option<usize>,
    /// How many passes like this one share these processors, at least one: it takes no more threads than its share
    /// unless `num_threads` says so.
    pub sharers: usize,
    /// Batches decoded ahead of the consumer, at least one; `None` for as many as keep the threads busy.
    pub prefetch: Option<usize>,
    /// Bytes that the pass may hold, besides what the consumer has got; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// The epoch behind the last one; `None` for no end.
    pub end_epoch: Option<u64>,
    /// Batches at most; `None` for all of those epochs.
    pub limit: Option<u64>,
}

impl Options {
    /// Batches that may be under way in any case, where this many threads work.
    pub(crate) fn ahead(&self, threads: usize) -> u64 {
        match (self.prefetch, threads as u64) {
            (Some(prefetch), _) => prefetch.max(1) as u64,
            (None, 1) => 2,
            (None, threads) => threads + 2,
        }
    }

    /// Into how many tasks a batch is cut that is expected to take this many nanoseconds: into several only where there
    /// are not enough batches under way for all threads, since what has no fixed size must then be joined.
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
    fn batches_are_cut_only_where_too_few_of_them_are_under_way() {
        let free = prefetching(None);
        assert_eq!([1, 2, 8].map(|threads| free.ahead(threads)), [2, 4, 10]);
        assert_eq!([1, 2, 8].map(|threads| free.tasks(u64::MAX, threads)), [1, 1, 1]);
        let two = prefetching(Some(2));
        assert_eq!([1, 2, 8].map(|threads| two.tasks(u64::MAX, threads)), [1, 1, 4]);
        let none = prefetching(Some(0));
        assert_eq!((none.ahead(8), none.tasks(u64::MAX, 8)), (1, 8));
        assert_eq!(none.tasks(3 * SMALLEST_TASK, 8), 3, "none is too small");
        assert_eq!(none.tasks(0, 8), 1);
    }
}
