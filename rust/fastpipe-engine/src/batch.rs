//! What the engine hands over.

use fastpipe_batch::Slab;
use fastpipe_order::State;

/// The name under which batches say which of their rows are valid.
pub const VALID: &str = "valid";

/// Where a part of a batch lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BufferRange {
    /// Which of [`Batch::slabs`].
    pub slab: usize,
    /// First byte.
    pub offset: usize,
    /// Number of bytes.
    pub len: usize,
}

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
