//! How a pass runs: its threads, how far ahead it decodes, and its memory.

/// How a pass runs. Nothing here changes what it yields.
#[derive(Clone, Copy, Debug)]
pub struct Options {
    /// Threads that decode; `None` for as many as pay, of the processors that the process may use.
    pub num_threads: Option<usize>,
    /// How many passes like this one share these processors, at least one: it takes no more threads than its share unless
    /// `num_threads` says so.
    pub sharers: usize,
    /// Batches decoded ahead of the consumer, at least one; `None` for as many as keep the threads busy.
    pub prefetch: Option<usize>,
    /// Bytes that the pass may hold, besides what the consumer has got; `None` for no limit.
    pub memory_limit: Option<u64>,
    /// Whether to keep a record of every task, for [`Watch::spans`](crate::Watch::spans).
    pub record_tasks: bool,
    /// The epoch behind the last one; `None` for no end.
    pub end_epoch: Option<u64>,
    /// Batches at most; `None` for all of those epochs.
    pub limit: Option<u64>,
}
