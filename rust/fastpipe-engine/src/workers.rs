//! The threads of a pass.
//!
//! Each pass has its own threads and waits for them when it ends, so a pass that is left early leaves no thread
//! running. A forked child has none of its parent's threads. It must neither use them nor wait for them, and starts its
//! own.

use std::io;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};
use std::thread::JoinHandle;

use fastpipe_batch::{Error, ErrorKind, Result, room_for};
use rayon::{ThreadPool, ThreadPoolBuilder};

/// Bytes of a thread's stack.
const STACK: usize = 4 << 20;

/// Additional bytes of a thread before it runs any code. If the system can't allocate them, it terminates the process.
const BESIDES: usize = 256 << 10;

/// Returns the number of processors that the process may use. It respects affinity and control groups.
pub fn default_threads() -> usize {
    std::thread::available_parallelism().map_or(1, |n| n.get())
}

/// Threads that are joined when dropped.
pub(crate) struct Workers {
    pool: Option<Arc<ThreadPool>>,
    handles: Vec<JoinHandle<()>>,
    process: u32,
}

impl Workers {
    pub(crate) fn new(threads: usize) -> Result<Self> {
        let threads = threads.max(1);
        let bytes = threads.saturating_mul(STACK + BESIDES);
        if !room_for(bytes) {
            let what = format!("{threads} threads; a smaller num_threads needs less");
            return Err(Error::out_of_memory(bytes, &what));
        }
        let handles = Arc::new(Mutex::new(Vec::new()));
        let mut failed = None;
        let pool = ThreadPoolBuilder::new()
            .num_threads(threads)
            .thread_name(|i| format!("fastpipe-{i}"))
            // Tasks catch their panics. Any other panic must not abort the process.
            .panic_handler(|_| ())
            .spawn_handler(|thread| {
                let builder = std::thread::Builder::new().name(thread.name().unwrap_or("fastpipe").to_owned());
                let spawned = builder.stack_size(STACK).spawn(|| thread.run());
                let handle = spawned.inspect_err(|error| failed = Some(error.kind()))?;
                handles.lock().unwrap_or_else(PoisonError::into_inner).push(handle);
                Ok(())
            })
            .build();
        let handles = std::mem::take(&mut *handles.lock().unwrap_or_else(PoisonError::into_inner));
        match pool {
            Ok(pool) => Ok(Workers {
                pool: Some(Arc::new(pool)),
                handles,
                process: std::process::id(),
            }),
            Err(error) => {
                // The threads that did start stop when the failed pool is dropped.
                handles.into_iter().for_each(|handle| drop(handle.join()));
                let kind = match failed {
                    Some(io::ErrorKind::OutOfMemory | io::ErrorKind::WouldBlock) => ErrorKind::OutOfMemory,
                    _ => ErrorKind::Storage,
                };
                let reason = format!("cannot start {threads} threads: {error}. Set a smaller num_threads");
                Err(Error::new(kind, reason))
            }
        }
    }

    /// Whether this process started the threads.
    pub(crate) fn are_ours(&self) -> bool {
        self.process == std::process::id()
    }

    /// Runs a task on one of the threads.
    pub(crate) fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(pool) = &self.pool {
            pool.spawn_fifo(task);
        }
    }
}

/// A weak reference to the threads of a pass, for other threads, which must not keep the pool alive.
#[derive(Default)]
pub(crate) struct Pool(OnceLock<Weak<ThreadPool>>);

impl Pool {
    /// Stores a reference to the threads once they have been started.
    pub(crate) fn set(&self, workers: &Workers) {
        let pool = workers.pool.as_ref().map_or_else(Weak::new, Arc::downgrade);
        let _ = self.0.set(pool);
    }

    /// Runs a task on one of the threads, unless the pass is closed.
    pub(crate) fn spawn(&self, task: impl FnOnce() + Send + 'static) {
        if let Some(pool) = self.0.get().and_then(Weak::upgrade) {
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
            // These are copies of the parent's handles; no threads belong to them.
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
    #[cfg(all(target_os = "linux", not(miri)))]
    fn threads_that_there_is_no_memory_for_are_an_error() {
        // The stacks take more than 2^47 bytes, the whole address space of a process.
        let error = Workers::new(1 << 26).err().unwrap();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
        assert!(error.reason().contains("67108864 threads"), "{error}");
    }

    #[test]
    fn dropping_waits_for_started_tasks() {
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
