//! Which rows stand in which batch.
//!
//! The order of samples is a pure function: which rows stand in batch `t` depends on the numbers of rows in the units, and
//! on the order and its parameters, never on data, files, threads or what was read before. This crate therefore has no
//! data, no I/O and no threads, and depends on nothing of ours.
//!
//! An order answers one question, "what is batch `t`?", with a list of [`Run`]s: stretches of consecutive records of one
//! unit, and the slots they go to.
#![forbid(unsafe_code)]

mod fisher_yates;
mod random;
mod sequential;

pub use fisher_yates::FisherYates;
pub use random::{Draws, Key, Purpose, below, philox};
pub use sequential::{Sequential, TooLong};

/// Consecutive records of one unit that go to consecutive slots of a batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Run {
    /// The unit.
    pub unit: u64,
    /// Its first record.
    pub record: u32,
    /// The first slot.
    pub slot: u32,
    /// How many.
    pub rows: u32,
}

/// What stands in one batch.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchPlan {
    /// The batch's number within its epoch.
    pub step: u64,
    /// Number of rows.
    pub rows: u32,
    /// Where they come from, by ascending slot.
    pub runs: Vec<Run>,
}
