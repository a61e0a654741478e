//! An iteration over a dataset: its pass, and how it continues after an error.
//!
//! A program that ignores errors asks for the next batch until it gets one or the end. So each error is reported once.
//! If the iteration may skip damage, it then continues without the rest of the damaged block. Otherwise it ends.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::Error;
use fastpipe_engine::RunningPass;
use fastpipe_order::RemainingEpoch;

use crate::api::Failure;
use crate::outputs::Column;

/// The columns of elements, and the pass that yields them.
pub struct Iteration {
    pub(crate) columns: Vec<Column>,
    /// The shape of each feature in the notation of tensorflow-io, if decoding errors use its words.
    pub(crate) shapes: Option<HashMap<String, String>>,
    /// Whether the iteration continues after damaged blocks. Its pass then covers one epoch.
    skips: bool,
    stage: Mutex<Stage>,
}

struct Stage {
    /// Errors to report before the next batch.
    failures: VecDeque<Failure>,
    /// `None` after the end.
    pass: Option<Arc<RunningPass>>,
    /// The rows that the pass yields, once they are less than the whole epoch.
    rest: Option<RemainingEpoch>,
}

/// The next event of an iteration.
pub(crate) enum Turn {
    Fails(Failure),
    Draws(Arc<RunningPass>),
    Over,
}

impl Iteration {
    /// Creates an iteration over a pass, which first reports `failures`. `shapes` is the shape of each feature in the
    /// notation of tensorflow-io, if errors use its words. With `skips`, it continues after damaged blocks.
    pub fn new(
        pass: Option<Arc<RunningPass>>,
        columns: Vec<Column>,
        shapes: Option<HashMap<String, String>>,
        failures: VecDeque<Failure>,
        skips: bool,
    ) -> Self {
        Iteration {
            columns,
            shapes,
            skips,
            stage: Mutex::new(Stage {
                failures,
                pass,
                rest: None,
            }),
        }
    }

    /// Creates an iteration that ends after it has reported a failure.
    pub fn failed(failure: Failure) -> Self {
        Iteration::new(None, Vec::new(), None, [failure].into(), false)
    }

    fn stage(&self) -> MutexGuard<'_, Stage> {
        self.stage.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(crate) fn turn(&self) -> Turn {
        let mut stage = self.stage();
        match (stage.failures.pop_front(), &stage.pass) {
            (Some(failure), _) => Turn::Fails(failure),
            (None, Some(pass)) => Turn::Draws(pass.clone()),
            (None, None) => Turn::Over,
        }
    }

    /// Handles an error of a pass: continues after the damaged block, if allowed. Returns an error if that fails.
    pub(crate) fn leave(&self, pass: &Arc<RunningPass>, error: &Error) -> Result<(), Error> {
        let mut stage = self.stage();
        if !stage.pass.as_ref().is_some_and(|current| Arc::ptr_eq(current, pass)) {
            // Another thread has seen the same error.
            return Ok(());
        }
        stage.pass = None;
        let Some(unit) = error.unit().filter(|_| self.skips && error.kind().is_damage()) else {
            return Ok(());
        };
        let rest = stage.rest.take().unwrap_or_else(|| RemainingEpoch::of(pass.epoch()));
        let (pass, rest) = pass.without(&rest, unit)?;
        (stage.pass, stage.rest) = (Some(pass), Some(rest));
        Ok(())
    }

    /// Queues a failure to be reported next.
    pub(crate) fn tell(&self, failure: Failure) {
        self.stage().failures.push_back(failure);
    }
}
