//! Values that each process has separately: a forked child doesn't have its parent's threads, and locks that the
//! threads held at the fork are never released in the child.

use std::io;
use std::ops::Deref;
use std::process::id;
use std::sync::{Arc, Mutex, OnceLock, PoisonError, Weak};

use tokio::runtime::{Builder, Runtime};

/// Number of threads that receive batches. Two threads receive more than a 25 Gbit/s network delivers.
const THREADS: usize = 2;

/// One value per process. A forked child never touches its parent's value.
pub struct PerProcess<T>(OnceLock<Box<Node<T>>>);

struct Node<T> {
    process: u32,
    value: T,
    next: PerProcess<T>,
}

impl<T> PerProcess<T> {
    /// Creates an empty cell.
    pub const fn new() -> Self {
        PerProcess(OnceLock::new())
    }

    /// Returns this process's value, if it has one.
    pub fn get(&self) -> Option<&T> {
        let mut node = self.0.get()?;
        while node.process != id() {
            node = node.next.0.get()?;
        }
        Some(&node.value)
    }

    /// Returns this process's value. The first call creates it.
    ///
    /// # Errors
    /// Any error of `make`.
    pub fn get_or_make<E>(&self, make: impl FnOnce() -> Result<T, E>) -> Result<&T, E> {
        if let Some(value) = self.get() {
            return Ok(value);
        }
        let mut made = Box::new(Node {
            process: id(),
            value: make()?,
            next: PerProcess::new(),
        });
        let mut place = &self.0;
        while let Err(refused) = place.set(made) {
            made = refused;
            if let Some(node) = place.get() {
                if node.process == id() {
                    return Ok(&node.value);
                }
                place = &node.next.0;
            }
        }
        Ok(&place.get_or_init(|| unreachable!("it was set")).value)
    }
}

impl<T> Default for PerProcess<T> {
    fn default() -> Self {
        PerProcess::new()
    }
}

impl<T> Drop for PerProcess<T> {
    fn drop(&mut self) {
        if let Some(node) = self.0.take()
            && node.process != id()
        {
            // Threads that don't exist in this process may hold its locks.
            std::mem::forget(node);
        }
    }
}

/// The runtime of this process's clients. It is shut down after the last client is dropped, without waiting for its
/// threads.
pub struct ClientRuntime(Option<Runtime>);

impl ClientRuntime {
    /// Returns the current runtime, or a new one.
    ///
    /// # Errors
    /// If the system can't provide more threads or files.
    pub fn get() -> io::Result<Arc<ClientRuntime>> {
        static CURRENT: PerProcess<Mutex<Weak<ClientRuntime>>> = PerProcess::new();
        let current = CURRENT.get_or_make(|| Ok::<_, io::Error>(Mutex::default()))?;
        let mut current = current.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(runtime) = current.upgrade() {
            return Ok(runtime);
        }
        let runtime = Builder::new_multi_thread()
            .worker_threads(THREADS)
            .thread_name("fastpipe-client")
            .enable_all()
            .build()?;
        let runtime = Arc::new(ClientRuntime(Some(runtime)));
        *current = Arc::downgrade(&runtime);
        Ok(runtime)
    }
}

impl Deref for ClientRuntime {
    type Target = Runtime;

    fn deref(&self) -> &Runtime {
        match &self.0 {
            Some(runtime) => runtime,
            None => unreachable!("it is taken by drop"),
        }
    }
}

impl Drop for ClientRuntime {
    fn drop(&mut self) {
        if let Some(runtime) = self.0.take() {
            runtime.shutdown_background();
        }
    }
}
