//! Constants of a pass: its source, options, threads and seed.

use std::sync::Arc;

use fastpipe_batch::{Access, Error, Pass, Source, UnitInfo};

use crate::options::Options;
use crate::workers::default_threads;

/// The arguments with which a pass was started.
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

    /// The maximum number of threads.
    pub(crate) fn threads(&self) -> usize {
        self.threads
    }

    /// Whether the records of a unit can be read in any order.
    pub(crate) fn is_random(&self) -> bool {
        self.random
    }

    /// Returns what is known about a unit before it is read.
    pub(crate) fn describe(&self, unit: u64) -> UnitInfo {
        self.source.describe(unit)
    }

    /// Adds the location of a unit to an error.
    pub(crate) fn locate(&self, unit: u64, error: Error) -> Error {
        self.source.locate(unit, error)
    }

    /// Returns the parameters for reading units in `epoch`. An open unit may take up to `most_bytes` bytes.
    pub(crate) fn pass(&self, epoch: u64, most_bytes: Option<u64>) -> Pass {
        Pass {
            seed: self.seed,
            epoch,
            most_bytes,
        }
    }
}
