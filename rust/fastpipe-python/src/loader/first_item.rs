//! The first item of a pass, from which the layout of later items is learned.
//!
//! Batches get the layout of the first item. If that item is much larger than the others, the rows of all batches
//! started in the meantime would also be too large. Therefore, if the batch would be large, the worker keeps the first
//! item until a second item shows whether it has the same layout.

use std::time::Duration;

use fastpipe_loader::{Claim, ControlBlock, nanos};
use pyo3::prelude::*;

/// The maximum size in bytes of a batch whose layout is based on a single item.
pub(super) const LARGE: usize = 8 << 20;

/// The maximum time for which an idle worker waits for a second item, and the interval at which it checks for one.
const PATIENCE: Duration = Duration::from_millis(100);
const LOOK: Duration = Duration::from_millis(2);

/// The layout that new batches use.
pub(super) enum First {
    /// The layout with this index.
    Is(u32),
    /// The layout of this item, if a second item has the same layout.
    Proposed,
    /// No layout: the item is stored outside of the slab.
    None,
}

/// An item that was made but has not been written to its batch.
pub(super) struct Kept<'py> {
    pub(super) claim: Claim,
    pub(super) row: u32,
    pub(super) item: Bound<'py, PyAny>,
    since: u64,
}

/// Keeps the first item until its layout is settled.
#[derive(Default)]
pub(super) struct FirstItem<'py> {
    kept: Option<Kept<'py>>,
    /// The number of rows of the current claim that were kept. Such a row is finished when it is written, not with the
    /// other rows.
    pub(super) rows: u32,
}

impl<'py> FirstItem<'py> {
    /// Whether an item is kept.
    pub(super) fn is_kept(&self) -> bool {
        self.kept.is_some()
    }

    /// Returns the kept item once its layout is settled, and stops keeping it.
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

    /// Replaces the kept item by a newer item of the same row. Returns false if the kept item is of another row.
    pub(super) fn keep_instead(&mut self, claim: &Claim, row: u32, item: &Bound<'py, PyAny>) -> bool {
        match &mut self.kept {
            Some(kept) if (kept.claim.slot, kept.row) == (claim.slot, row) => {
                kept.item = item.clone();
                true
            }
            _ => false,
        }
    }

    /// Waits for a second item as long as other workers are making items. Otherwise, settles the layout of the first
    /// item.
    pub(super) fn wait_for_second(&self, py: Python<'_>, block: &ControlBlock, maker: usize) {
        let waited = self.kept.as_ref().map_or(0, |kept| nanos().saturating_sub(kept.since));
        if block.others_make(maker) && u128::from(waited) < PATIENCE.as_nanos() {
            py.detach(|| block.wait_for_work(maker, LOOK));
        } else {
            block.settle_first_layout();
        }
    }
}
