//! What the engine hands over.

use fastpipe_batch::{Assembled, BufferRange, Slab};
use fastpipe_order::State;

/// The name under which batches say which of their rows are valid.
pub const VALID: &str = "valid";

/// Which batch it is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct BatchInfo {
    /// The epoch.
    pub epoch: u64,
    /// The rank's step within the epoch.
    pub step: u64,
    /// Number of rows.
    pub rows: usize,
    /// How many of them, from the first, are not there to fill the batch up.
    pub valid: usize,
    /// What is left behind it.
    pub after: State,
}

/// A batch: its memory, and where each part of each column lies in it. Lengths have become offsets.
pub struct Batch {
    /// Which one.
    pub info: BatchInfo,
    /// The memory: first that of placed parts, then that of all others.
    pub slabs: Vec<Slab>,
    /// Where each part lies, in the order of the columns and of their parts.
    pub parts: Vec<BufferRange>,
    /// For each sparse column, in order, its dense shape with the rows first.
    pub dense_shapes: Vec<Vec<i64>>,
}

impl Batch {
    /// A batch of assembled columns.
    pub(crate) fn new(info: BatchInfo, assembled: Assembled) -> Self {
        Batch {
            info,
            slabs: assembled.slabs,
            parts: assembled.parts,
            dense_shapes: assembled.dense_shapes,
        }
    }
}

impl From<Assembled> for Batch {
    /// A batch of no pass: all of its rows are valid.
    fn from(assembled: Assembled) -> Self {
        let info = BatchInfo {
            rows: assembled.rows,
            valid: assembled.rows,
            ..BatchInfo::default()
        };
        Batch::new(info, assembled)
    }
}
