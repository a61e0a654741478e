//! The first item of all: what is known of others by it.
//!
//! Batches are laid out as the first item is. But it may be much larger than the others, and so would be the rows of
//! all batches that were begun meanwhile. So where its batch would be large, a second item says whether it has the same
//! layout, and until then the worker keeps the first one.

use std::time::Duration;

use fastpipe_loader::{Claim, ControlBlock, nanos};
use pyo3::prelude::*;

/// Bytes of a batch that may be laid out as one item is.
pub(super) const LARGE: usize = 8 << 20;

/// How long a worker that has nothing else to do waits for a second item, at most, and how often it looks.
const PATIENCE: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(2);

/// The layout that batches begin with.
pub(super) enum First {
    /// It is this one.
    Is(u32),
    /// It is that of this item, if another one has it too.
    Proposed,
    /// There is none: the item lies beside its slab.
    None,
}

/// An item that was made, and isn't written yet.
pub(super) struct Kept<'py> {
    pub(super) claim: Claim,
    pub(super) row: u32,
    pub(super) item: Bound<'py, PyAny>,
    since: u64,
}

/// The first item of all, until its layout is settled.
#[derive(Default)]
pub(super) struct FirstItem<'py> {
    kept: Option<Kept<'py>>,
    /// Rows of the claim at hand that were kept: each is finished once it is written, and not with the others.
    pub(super) rows: u32,
}

impl<'py> FirstItem<'py> {
    /// Whether it is kept.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// The item, once its layout is settled: it is kept no longer.
    pub(super) fn take_settled(&mut self, block: &ControlBlock) -> Option<Kept<'py>> {
        if self.kept.is_none() || block.layout().is_none() {
            return None;
        }
        self.kept.take()
    }

    /// Keeps the first item.
    pub(super) fn keep(&mut self, claim: &Claim, row: u32, item: &Bound<'py, PyAny>) {
        self.rows += 1;
        self.kept = Some(Kept {
            claim: claim.clone(),
            row,
            item: item.clone(),
            since: nanos(),
        });
    }

    /// Keeps this item in place of the one that was kept, if that is of the same row. Returns whether it is.
    pub(super) fn keep_instead(&mut self, claim: &Claim, row: u32, item: &Bound<'py, PyAny>) -> bool {
        match &mut self.kept {
            Some(kept) if (kept.claim.slot, kept.row) == (claim.slot, row) => {
                kept.item = item.clone();
                true
            }
            _ => false,
        }
    }

    /// Waits for a second item, as long as others make some; else the first one has to do.
    pub(super) fn wait_for_second(&self, py: Python<'_>, block: &ControlBlock, maker: usize) {
        let waited = self.kept.as_ref().map_or(0, |kept| nanos().saturating_sub(kept.since));
        if block.others_make(maker) && u128::from(waited) < PATIENCE.as_nanos() {
            py.detach(|| block.wait_for_work(maker, LOOK));
        } else {
            block.settle_first_layout();
        }
    }
}
