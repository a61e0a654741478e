//! Batches of one kind, as who admits them sees them: those of runs, and those of picks.

use std::sync::Arc;

use fastpipe_batch::Result;

use crate::batch::BatchInfo;
use crate::budget::Reserved;

/// What a batch will take.
pub(crate) struct Need {
    /// The class of its units, or of the first of them.
    pub(crate) class: u32,
    /// Bytes of units that end in it, besides its rows.
    pub(crate) more: u64,
    /// Bytes of units that are opened for it and outlast it.
    pub(crate) units: u64,
}

/// What a batch is expected to cost.
#[derive(Default)]
pub(crate) struct Cost {
    /// Nanoseconds that it takes.
    pub(crate) cost: u64,
    /// Nanoseconds that the rest of the longest of its units takes, in this batch and those behind it.
    pub(crate) longest: u64,
}

/// Batches whose rows are a `C`.
pub(crate) trait Batches<C> {
    /// What is kept of units from one batch to the next.
    type Kept;

    /// What a batch will take.
    fn needed(&self, kept: &Self::Kept, epoch: u64, content: &C) -> Need;

    /// Makes ready what batch `number` needs, before it is begun. False if there is no room for more of that.
    fn prepare(self: &Arc<Self>, kept: &mut Self::Kept, epoch: u64, number: u64, content: &C) -> bool;

    /// Begins batch `number`.
    fn start(
        self: &Arc<Self>,
        kept: &mut Self::Kept,
        number: u64,
        info: BatchInfo,
        content: C,
        reserved: Reserved,
    ) -> Result<Cost>;
}
