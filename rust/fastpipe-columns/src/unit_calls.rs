//! Calls that may wait: threads of a pass ask for units, and other threads answer.
//!
//! A thread of a pass that fetches never needs Python's lock: it asks, and waits for the answer or for the end of its
//! pass. The threads that answer belong to the data set, so that no more calls are under
//! way than it allows, even where a pass was left while some were.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use fastpipe_batch::{Error, ErrorKind};

use crate::slices::Slice;
use crate::units::ReadUnit;

/// How long a call that was cancelled may take to be noticed.
const PATIENCE: Duration = Duration::from_millis(20);

/// The result of a call.
pub type Answer = Result<(SchemaRef, Vec<RecordBatch>), Error>;

/// A call that a thread of a pass waits for.
struct Asked {
    slice: Slice,
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
    /// Whether its pass no longer waits for it.
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

/// A call that is to be answered once.
pub struct UnitCall(Arc<Asked>);

impl UnitCall {
    /// The rows that the pass asks for.
    pub fn slice(&self) -> &Slice {
        &self.0.slice
    }

    /// Answers.
    pub fn give(&self, answer: Answer) {
        self.0.give(answer);
    }
}

impl Drop for UnitCall {
    fn drop(&mut self) {
        let mut answer = self.0.answer.lock().unwrap_or_else(PoisonError::into_inner);
        // A thread waits: taken answers are gone, and given ones are there.
        if answer.is_none() && Arc::strong_count(&self.0) > 1 {
            *answer = Some(Err(Error::new(
                ErrorKind::Internal,
                "a call was dropped without an answer",
            )));
            self.0.answered.notify_all();
        }
    }
}

/// Calls that wait, and the number of passes and of threads that answer.
#[derive(Default)]
struct State {
    asked: VecDeque<Arc<Asked>>,
    /// Passes that may ask.
    passes: usize,
    /// Threads of Python's.
    threads: usize,
    /// Whether the interpreter ends: nothing is answered any more.
    ended: bool,
}

/// The calls of a data set: threads of passes ask, and other threads answer.
pub struct UnitCalls {
    state: Mutex<State>,
    changed: Condvar,
    at_once: usize,
    process: u32,
}

impl UnitCalls {
    /// `at_once` is the number of calls that are answered at the same time.
    pub fn new(at_once: usize) -> Arc<UnitCalls> {
        Arc::new(UnitCalls {
            state: Mutex::default(),
            changed: Condvar::new(),
            at_once,
            process: std::process::id(),
        })
    }

    /// Whether its threads are of this process.
    pub fn are_ours(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a pass ask. Also how many threads must be started for it.
    pub fn enter(self: &Arc<Self>) -> (PassEntry, usize) {
        let mut state = self.lock();
        state.passes += 1;
        let missing = self.at_once.saturating_sub(state.threads);
        state.threads += missing;
        (PassEntry(self.clone()), missing)
    }

    /// Notes that this number of threads could not be started.
    pub fn without(&self, threads: usize) {
        self.lock().threads -= threads;
    }

    /// Lets threads that answer end after the calls that they answer.
    pub fn end(&self) {
        // In a forked child a thread that doesn't exist there may hold the lock.
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

    /// Waits for a call; `None` once no pass is left, and then the thread must end.
    pub fn next(&self) -> Option<UnitCall> {
        let mut state = self.lock();
        loop {
            if state.ended {
                state.threads -= 1;
                return None;
            }
            if let Some(asked) = state.asked.pop_front() {
                if asked.forgotten.load(Ordering::Relaxed) {
                    continue;
                }
                return Some(UnitCall(asked));
            }
            if state.passes == 0 {
                state.threads -= 1;
                return None;
            }
            state = self.changed.wait(state).unwrap_or_else(PoisonError::into_inner);
        }
    }
}

/// That a pass may ask, until this is dropped.
pub struct PassEntry(Arc<UnitCalls>);

impl Drop for PassEntry {
    fn drop(&mut self) {
        // In a forked child a thread that doesn't exist there may hold the lock.
        if self.0.are_ours() {
            self.0.lock().passes -= 1;
            self.0.changed.notify_all();
        }
    }
}

/// Returns the name that the source has for a unit.
pub type UnitName = Arc<dyn Fn(u64) -> String + Send + Sync>;

/// Asks for the units of a pass. An observer of the pass may keep it after the pass has ended.
pub struct UnitAsker {
    calls: Arc<UnitCalls>,
    name: UnitName,
}

impl UnitAsker {
    /// Asks for units of these names.
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
