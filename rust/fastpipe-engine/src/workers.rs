//! The threads of a pass.
//!
//! A pass has threads of its own and waits for them when it ends, so that leaving early leaves nothing behind. After
//! `fork` a child has none of its parent's threads: it must neither use nor wait for them, and starts its own.

use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use fastpipe_batch::{Error, ErrorKind, Result};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// As many threads as the process may use processors: affinity and control groups are respected.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Threads, joined when dropped.
pub(crate) struct Workers {
    pool: Option<ThreadPool>,
    handles: Vec<JoinHandle<()>>,
    process: u32,
}

impl Workers {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let handles = Arc::new(Mutex::new(Vec::new()));
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads.max(1))
            .thread_name(|i| format!("fastpipe-{i}"))
            // Tasks catch their panics; what escapes all the same must not abort the process.
            .panic_handler(|_| ())
            .spawn_handler(|thread| {
                let builder = std::thread::Builder::new().name(thread.name().unwrap_or("fastpipe").to_owned());
                let handle = builder.stack_size(4 << 20).spawn(|| thread.run())?;
                handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                Ok(())
            })
            .build();
        let handles = std::mem::take(&mut *handles.lock().unwrap_or_else(PoisonError::into_inner));
        let pool = pool.map_err(|e| Error::new(ErrorKind::Storage, format!("can't start {threads} threads: {e}")))?;
        Ok(Workers {
            pool: Some(pool),
            handles,
            process: std::process::id(),
        })
    }

    /// Whether these are threads of this process.
    pub(crate) fn are_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Starts something on a thread.
    pub(crate) fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(pool) = &self.pool {
            pool.spawn_fifo(task);
        }
    }
}

impl Drop for Workers {
    fn drop(&mut self) {
        let handles = std::mem::take(&mut self.handles);
        if self.are_ours() {
            drop(self.pool.take());
            for handle in handles {
                let _ = handle.join();
            }
        } else {
            // Copies of a parent's threads: there is nothing behind them.
            std::mem::forget(self.pool.take());
            std::mem::forget(handles);
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use super::*;

    #[test]
    fn dropping_waits_for_what_was_started() {
        let done = Arc::new(AtomicUsize::new(0));
        let workers = Workers::new(3).unwrap();
        for _ in 0..50 {
            let done = done.clone();
            workers.spawn(move || {
                std::thread::sleep(std::time::Duration::from_millis(1));
                done.fetch_add(1, Ordering::Relaxed);
            });
        }
        drop(workers);
        assert_eq!(done.load(Ordering::Relaxed), 50);
    }
}
