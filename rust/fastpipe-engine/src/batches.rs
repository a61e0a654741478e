//! The interface between admission and the two kinds of batches: batches of runs and batches of picks.

use std::sync::Arc;

use fastpipe_batch::Result;

use crate::batch::BatchInfo;
use crate::budget::Reserved;

/// The memory that a batch will take.
pub(crate) struct Need {
    /// The class of its first unit.
    pub(crate) class: u32,
    /// Bytes besides its rows: units that end in this batch, and fetched bytes.
    pub(crate) more: u64,
    /// Bytes of units that are opened for this batch and used after it.
    pub(crate) units: u64,
}

/// The expected time of a batch.
#[derive(Default)]
pub(crate) struct Cost {
    /// Nanoseconds that the batch takes.
    pub(crate) cost: u64,
    /// Nanoseconds that the rest of its longest unit takes, in this batch and later ones.
    pub(crate) longest: u64,
}

/// Batches whose rows are described by a `C`.
pub(crate) trait Batches<C> {
    /// State about units that is kept from one batch to the next.
    type Kept;

    /// Returns the memory that a batch will take.
    fn needed(&self, kept: &Self::Kept, epoch: u64, content: &C) -> Need;

    /// Prepares the units of batch `number` before the batch is started. Returns false if memory for its units is
    /// short.
    fn prepare(self: &Arc<Self>, kept: &mut Self::Kept, epoch: u64, number: u64, content: &C) -> bool;

    /// Starts batch `number`.
    fn start(
        self: &Arc<Self>,
        kept: &mut Self::Kept,
        number: u64,
        info: BatchInfo,
        content: C,
        reserved: Reserved,
    ) -> Result<Cost>;
}
