//! Calls into Python that may wait: threads of Python's answer what threads of a pass ask.
//!
//! A thread of a pass that fetches never needs the GIL: it asks, and waits for the answer or for the end of its pass.
//! Python's threads are daemons: a read that hangs keeps no program from ending. They end with the last pass, and
//! before the interpreter does where their reads end in time. They belong to the data set, so that no more calls are
//! under way than it allows, even where a pass was left while some were.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use arrow_array::RecordBatch;
use arrow_schema::SchemaRef;
use fastpipe_batch::{Error, ErrorKind};
use fastpipe_columns::{ReadUnit, Slice};
use pyo3::exceptions::PyMemoryError;
use pyo3::prelude::*;

use crate::arrays::arrow_import::import;
use crate::errors::{Raised, guarded};

/// How long a call that was cancelled may take to be noticed.
const PATIENCE: Duration = Duration::from_millis(20);

/// What a call brought.
type Answer = Result<(SchemaRef, Vec<RecordBatch>), Error>;

/// A call that somebody waits for.
struct Asked {
    slice: Slice,
    answer: Mutex<Option<Answer>>,
    answered: Condvar,
    /// Whether nobody waits for it any more.
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

/// What is asked, and who answers.
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

/// The calls of a data set.
pub(crate) struct Calls {
    state: Mutex<State>,
    changed: Condvar,
    at_once: usize,
    process: u32,
}

impl Calls {
    pub(crate) fn new(at_once: usize) -> Arc<Calls> {
        Arc::new(Calls {
            state: Mutex::default(),
            changed: Condvar::new(),
            at_once,
            process: std::process::id(),
        })
    }

    /// Whether its threads are of this process.
    pub(crate) fn are_ours(&self) -> bool {
        self.process == std::process::id()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Lets a pass ask. Also how many threads must be started for it.
    pub(crate) fn enter(self: &Arc<Self>) -> (Entered, usize) {
        let mut state = self.lock();
        state.passes += 1;
        let missing = self.at_once.saturating_sub(state.threads);
        state.threads += missing;
        (Entered(self.clone()), missing)
    }

    /// So many threads weren't started, after all.
    pub(crate) fn without(&self, threads: usize) {
        self.lock().threads -= threads;
    }

    /// Lets threads of Python's end after the calls that they answer.
    fn end(&self) {
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

    /// What a thread of Python's is to answer; `None` once there is no pass.
    fn next(&self) -> Option<Arc<Asked>> {
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
                return Some(asked);
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
pub(crate) struct Entered(Arc<Calls>);

impl Drop for Entered {
    fn drop(&mut self) {
        // In a forked child a thread that doesn't exist there may hold the lock.
        if self.0.are_ours() {
            self.0.lock().passes -= 1;
            self.0.changed.notify_all();
        }
    }
}

/// Asks for a pass. It may outlive it, for whoever looks at what the pass has done, and asks no more then.
pub(crate) struct Asking {
    calls: Arc<Calls>,
    name: Arc<Py<PyAny>>,
}

impl Asking {
    pub(crate) fn new(calls: Arc<Calls>, name: Arc<Py<PyAny>>) -> Self {
        Asking { calls, name }
    }
}

impl ReadUnit for Asking {
    fn at_once(&self) -> usize {
        self.calls.at_once
    }

    fn name(&self, unit: u64) -> String {
        name_of(&self.name, unit)
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

/// What a source calls a unit; its number if it can't be asked, or doesn't say.
pub(crate) fn name_of(name: &Py<PyAny>, unit: u64) -> String {
    let asked = Python::try_attach(|py| name.call1(py, (unit,)).and_then(|name| name.extract::<String>(py)));
    match asked {
        Some(Ok(name)) => name,
        _ => unit.to_string(),
    }
}

/// Where threads of Python's find what they are to answer.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCalls(pub(crate) Arc<Calls>);

#[pymethods]
impl UnitCalls {
    /// Waits for a call; None once no pass is left, and then the thread must end.
    fn next(&self, py: Python<'_>) -> Option<UnitCall> {
        py.detach(|| self.0.next()).map(|asked| UnitCall { asked })
    }

    /// Lets the threads end after the calls that they answer; whatever asks from now on gets an error.
    fn end(&self, py: Python<'_>) {
        py.detach(|| self.0.end());
    }
}

/// A call that is to be answered once.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct UnitCall {
    asked: Arc<Asked>,
}

impl UnitCall {
    fn give(&self, py: Python<'_>, answer: Answer) {
        py.detach(|| self.asked.give(answer));
    }
}

#[pymethods]
impl UnitCall {
    /// The unit that is wanted.
    #[getter]
    fn unit(&self) -> u64 {
        self.asked.slice.unit
    }

    /// Which of its rows, and how many a slice has: `(first, end)`. None if all of them are wanted at once.
    #[getter]
    fn rows(&self) -> Option<(u32, u32)> {
        let Slice { rows, whole, .. } = &self.asked.slice;
        (!whole).then_some((rows.start, rows.end))
    }

    /// Answers with whatever is Arrow. What is wrong with it is raised, and the call isn't answered then.
    fn answer(&self, py: Python<'_>, table: &Bound<'_, PyAny>) -> PyResult<()> {
        let imported = guarded(py, || import(table))?;
        self.give(py, Ok(imported));
        Ok(())
    }

    /// Answers with an exception.
    fn fail(&self, py: Python<'_>, exception: Bound<'_, PyAny>) {
        let raised = PyErr::from_value(exception);
        let kind = match raised.is_instance_of::<PyMemoryError>(py) {
            true => ErrorKind::OutOfMemory,
            false => ErrorKind::Raised,
        };
        let reason = format!("read({}) raised {raised}", self.asked.slice.unit);
        let error = Error::new(kind, reason).with_cause(Arc::new(Raised::new(py, raised)));
        self.give(py, Err(error));
    }
}

impl Drop for UnitCall {
    fn drop(&mut self) {
        let mut answer = self.asked.answer.lock().unwrap_or_else(PoisonError::into_inner);
        // Somebody waits: taken answers are gone, and given ones are there.
        if answer.is_none() && Arc::strong_count(&self.asked) > 1 {
            *answer = Some(Err(Error::new(
                ErrorKind::Internal,
                "a call was dropped without an answer",
            )));
            self.asked.answered.notify_all();
        }
    }
}
