//! The way from TensorFlow's threads into Python, shut before the interpreter ends.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Lets threads into Python until it is closed. A thread that enters an interpreter on its way out never comes back,
/// and whoever waits for its kernel waits forever.
pub(crate) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    closed: bool,
    inside: usize,
}

/// A thread's stay in Python.
pub(crate) struct Inside<'a>(&'a Gate);

impl Gate {
    pub(crate) const fn new() -> Self {
        Gate {
            state: Mutex::new(State {
                closed: false,
                inside: 0,
            }),
            left: Condvar::new(),
        }
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// None once it is closed.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let mut state = self.lock();
        if state.closed {
            return None;
        }
        state.inside += 1;
        Some(Inside(self))
    }

    pub(crate) fn is_closed(&self) -> bool {
        self.lock().closed
    }

    /// Closes it and waits until all have left. Without the GIL, which they need to leave.
    pub(crate) fn close(&self) {
        let mut state = self.lock();
        state.closed = true;
        while state.inside > 0 {
            state = self.left.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.0.lock().inside -= 1;
        self.0.left.notify_all();
    }
}
