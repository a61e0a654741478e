//! What stays the same for a whole pass: its source, and how it runs.

use std::sync::Arc;

use fastpipe_batch::{Access, Error, Pass, Source, UnitInfo};

use crate::options::Options;
use crate::workers::default_threads;

/// What a pass was started with.
pub(crate) struct PassConfig {
    source: Arc<dyn Source>,
    options: Options,
    threads: usize,
    seed: u64,
    random: bool,
}

impl PassConfig {
    pub(crate) fn new(source: Arc<dyn Source>, options: Options, seed: u64) -> PassConfig {
        let share = || default_threads() / options.sharers.max(1);
        PassConfig {
            threads: options.num_threads.unwrap_or_else(share).max(1),
            random: source.facts().access == Access::Random,
            source,
            options,
            seed,
        }
    }

    pub(crate) fn source(&self) -> &dyn Source {
        &*self.source
    }

    pub(crate) fn options(&self) -> &Options {
        &self.options
    }

    /// Threads that may be used at most.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether any record of a unit can be read at once.
    pub(crate) fn is_random(&self) -> bool {
        self.random
    }

    /// What is known of a unit before it is read.
    pub(crate) fn describe(&self, unit: u64) -> UnitInfo {
        self.source.describe(unit)
    }

    /// Adds to an error where a unit lies.
    pub(crate) fn locate(&self, unit: u64, error: Error) -> Error {
        self.source.locate(unit, error)
    }

    /// Which reading of the data an epoch is, for units that may take this many bytes when they are open.
    pub(crate) fn pass(&self, epoch: u64, most_bytes: Option<u64>) -> Pass {
        Pass {
            seed: self.seed,
            epoch,
            most_bytes,
        }
    }
}
