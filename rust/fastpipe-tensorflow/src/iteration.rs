//! An iteration over a dataset: its pass, and what becomes of it behind an error.
//!
//! Whoever ignores errors asks for the next batch until there is one, or none is left. So an error is told once. Behind
//! it the iteration goes on without the rest of the block that is damaged, if it may, else it is over.

use std::collections::{HashMap, VecDeque};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use fastpipe_batch::Error;
use fastpipe_engine::RunningPass;
use fastpipe_order::RemainingEpoch;

use crate::api::Failure;
use crate::outputs::Column;

/// What elements consist of, and where they come from.
pub struct Iteration {
    pub(crate) columns: Vec<Column>,
    /// Where values that can't be decoded are to be told of as tensorflow-io does: the shape of each feature in its
    /// notation.
    pub(crate) shapes: Option<HashMap<String, String>>,
    /// Whether it goes on behind damaged blocks. Its pass is then of one epoch.
    skips: bool,
    stage: Mutex<Stage>,
}

struct Stage {
    /// Told before anything else.
    failures: VecDeque<Failure>,
    /// None: it is over.
    pass: Option<Arc<RunningPass>>,
    /// What the pass goes through, once it isn't the whole epoch.
    rest: Option<RemainingEpoch>,
}

/// What comes next.
pub(crate) enum Turn {
    Fails(Failure),
    Draws(Arc<RunningPass>),
    Over,
}

impl Iteration {
    /// An iteration over a pass, which first reports `failures`. `shapes` is the shape of each feature in the notation
    /// of tensorflow-io, if errors use its words. With `skips` it continues after damaged blocks.
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

    /// One that is over once it has failed.
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

    /// A pass has failed: goes on behind what is damaged. Returns an error of that, which is told next.
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

    /// Lets a failure be told next.
    pub(crate) fn tell(&self, failure: Failure) {
        self.stage().failures.push_back(failure);
    }
}
