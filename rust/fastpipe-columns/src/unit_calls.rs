//! Blocking calls to fetch units: threads of a pass ask for units, and threads of the dataset answer.
//!
//! A fetching thread of a pass never needs Python's GIL. It asks, and waits for the answer or for the end of its pass.
//! The answering threads belong to the dataset. So the dataset's limit for concurrent calls also holds if a pass was
//! abandoned during some calls.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use fastpipe_batch::{Error, ErrorKind};

use crate::slices::Slice;
use crate::units::ReadUnit;

/// Maximum delay until a cancelled call is noticed.
const PATIENCE: Duration = Duration::from_millis(20);

/// The result of a call.
pub type Answer = Result<(SchemaRef, Vec<RecordBatch>), Error>;

/// A call for which a thread of a pass waits.
struct Asked {
    slice: Slice,
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
    /// Whether the pass has stopped waiting for the call.
    forgotten: AtomicBool,
}

impl Asked {
    fn give(&self, answer: Answer) {
        *self.answer.lock().unwrap_or_else(PoisonError::into_inner) = Some(answer);
        self.answered.notify_all();
    }
}

fn ending() -> Error {
    Error::new(ErrorKind::Closed, "the interpreter is ending")
}

/// A call that must be answered once.
pub struct UnitCall(Arc<Asked>);

impl UnitCall {
    /// Returns the rows that the pass asks for.
    pub fn slice(&self) -> &Slice {
        &self.0.slice
    }

    /// Sets the answer of the call.
    pub fn give(&self, answer: Answer) {
        self.0.give(answer);
    }
}

impl Drop for UnitCall {
    fn drop(&mut self) {
        let mut answer = self.0.answer.lock().unwrap_or_else(PoisonError::into_inner);
        // If another reference exists, the asking thread still waits and needs an answer.
        if answer.is_none() && Arc::strong_count(&self.0) > 1 {
            *answer = Some(Err(Error::new(
                ErrorKind::Internal,
                "a call was dropped without an answer",
            )));
            self.0.answered.notify_all();
        }
    }
}

/// The waiting calls, and the numbers of passes and answering threads.
#[derive(Default)]
struct State {
    asked: VecDeque<Arc<Asked>>,
    /// Number of passes that may ask.
    passes: usize,
    /// Number of answering threads, which belong to Python.
    threads: usize,
    /// Whether the interpreter is shutting down, and calls get an error instead of an answer.
    ended: bool,
}

/// The queue of calls of a dataset: threads of passes ask, and other threads answer.
pub struct UnitCalls {
    state: Mutex<State>,
    changed: Condvar,
    at_once: usize,
    process: u32,
}

impl UnitCalls {
    /// Creates the queue. `at_once` is the maximum number of calls that are answered concurrently.
    pub fn new(at_once: usize) -> Arc<UnitCalls> {
        Arc::new(UnitCalls {
            state: Mutex::default(),
            changed: Condvar::new(),
            at_once,
            process: std::process::id(),
        })
    }

    /// Whether the answering threads belong to this process.
    pub fn are_ours(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Registers a pass. Also returns an entry for each thread that the caller must start for it. An entry that is
    /// dropped is a thread that could not be started.
    pub fn enter(self: &Arc<Self>) -> (PassEntry, Vec<ThreadEntry>) {
        let mut state = self.lock();
        state.passes += 1;
        let missing = self.at_once.saturating_sub(state.threads);
        state.threads += missing;
        let entry = || ThreadEntry {
            calls: self.clone(),
            left: AtomicBool::new(false),
        };
        (
            PassEntry(self.clone()),
            std::iter::repeat_with(entry).take(missing).collect(),
        )
    }

    /// Makes answering threads exit after their current call.
    pub fn end(&self) {
        // In a forked child, the lock may be held by a thread that doesn't exist there.
        if self.are_ours() {
            let mut state = self.lock();
            state.ended = true;
            let asked = std::mem::take(&mut state.asked);
            drop(state);
            self.changed.notify_all();
            for asked in asked {
                asked.give(Err(ending()));
            }
        }
    }
}

/// Registers an answering thread until it is dropped, or until the thread must exit.
pub struct ThreadEntry {
    calls: Arc<UnitCalls>,
    /// Whether the thread is no longer counted. Only changed while the state is locked.
    left: AtomicBool,
}

impl ThreadEntry {
    /// The queue of the calls.
    pub fn calls(&self) -> &UnitCalls {
        &self.calls
    }

    /// Waits for a call. Returns `None` if no pass is left; the thread must then exit.
    pub fn next(&self) -> Option<UnitCall> {
        let mut state = self.calls.lock();
        loop {
            if state.ended || (state.passes == 0 && state.asked.is_empty()) {
                self.leave(&mut state);
                return None;
            }
            if let Some(asked) = state.asked.pop_front() {
                if asked.forgotten.load(Ordering::Relaxed) {
                    continue;
                }
                return Some(UnitCall(asked));
            }
            state = self.calls.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }

    fn leave(&self, state: &mut State) {
        if !self.left.swap(true, Ordering::Relaxed) {
            state.threads -= 1;
        }
    }
}

impl Drop for ThreadEntry {
    fn drop(&mut self) {
        // In a forked child, the lock may be held by a thread that doesn't exist there.
        if self.calls.are_ours() {
            self.leave(&mut self.calls.lock());
        }
    }
}

/// Allows a pass to ask until it is dropped.
pub struct PassEntry(Arc<UnitCalls>);

impl Drop for PassEntry {
    fn drop(&mut self) {
        // In a forked child, the lock may be held by a thread that doesn't exist there.
        if self.0.are_ours() {
            self.0.lock().passes -= 1;
            self.0.changed.notify_all();
        }
    }
}

/// A function that returns the source's name for a unit.
pub type UnitName = Arc<dyn Fn(u64) -> String + Send + Sync>;

/// Requests the units of a pass. An observer of the pass may keep this object after the pass has ended.
pub struct UnitAsker {
    calls: Arc<UnitCalls>,
    name: UnitName,
}

impl UnitAsker {
    /// Creates an asker. `name` returns the names of units.
    pub fn new(calls: Arc<UnitCalls>, name: UnitName) -> Self {
        UnitAsker { calls, name }
    }
}

impl ReadUnit for UnitAsker {
    fn at_once(&self) -> usize {
        self.calls.at_once
    }

    fn name(&self, unit: u64) -> String {
        (self.name)(unit)
    }

    fn read(&self, slice: &Slice, cancelled: &dyn Fn() -> bool) -> Answer {
        let asked = Arc::new(Asked {
            slice: slice.clone(),
            answer: Mutex::new(None),
            answered: Condvar::new(),
            forgotten: AtomicBool::new(false),
        });
        let mut state = self.calls.lock();
        if state.ended {
            return Err(ending());
        }
        state.asked.push_back(asked.clone());
        drop(state);
        self.calls.changed.notify_one();
        let mut answer = asked.answer.lock().unwrap_or_else(PoisonError::into_inner);
        loop {
            if let Some(answer) = answer.take() {
                return answer;
            }
            if cancelled() {
                asked.forgotten.store(true, Ordering::Relaxed);
                return Err(Error::new(ErrorKind::Closed, "the pass was closed"));
            }
            let waited = asked.answered.wait_timeout(answer, PATIENCE);
            answer = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Whether a thread starts, exits, or could not be started, it is counted once.
    #[test]
    fn each_thread_is_counted_once() {
        let calls = UnitCalls::new(3);
        let (first, mut entries) = calls.enter();
        assert_eq!(entries.len(), 3);
        entries.truncate(2);
        let (second, more) = calls.enter();
        assert_eq!(more.len(), 1);
        drop((first, second));
        for entry in entries.iter().chain(&more) {
            assert!(entry.next().is_none());
            assert!(entry.next().is_none());
        }
        let (_third, again) = calls.enter();
        assert_eq!(again.len(), 3);
        drop((entries, more));
        assert_eq!(calls.lock().threads, 3);
        drop(again);
        assert_eq!(calls.lock().threads, 0);
    }
}
