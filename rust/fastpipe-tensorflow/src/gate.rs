//! The entry for TensorFlow's threads into Python. It is closed before the interpreter exits.

use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};

/// Admits threads into Python until it is closed. A thread that enters an interpreter during its shutdown never
/// returns, so a program that waits for its kernel would hang.
pub(crate) struct Gate {
    state: Mutex<State>,
    left: Condvar,
}

struct State {
    closed: bool,
    inside: usize,
}

/// Marks a thread as inside Python until it is dropped.
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

    /// Admits a thread. Returns `None` if the gate is closed.
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

    /// Closes the gate, and waits until all threads have left. Call it without the GIL, which they need to leave.
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
