//! The first item of all: what is known of others by it.
//!
//! Batches are laid out as the first item is. But it may be much larger than the others, and so would be the rows of
//! all batches that were begun meanwhile. So where its batch would be large, a second item says whether it has the same
//! layout, and until then the worker keeps the first one.

use std::time::Duration;

use fastpipe_items::{Claim, LastLayout, nanos};
use pyo3::prelude::*;

use super::worker::Loop;

/// Bytes of a batch that may be laid out as one item is.
const LARGE: usize = 8 << 20;

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
    claim: Claim,
    row: u32,
    item: Bound<'py, PyAny>,
    since: u64,
}

impl<'py> Loop<'_, 'py> {
    /// The layout that batches begin with, of which this item is one of the first.
    pub(super) fn first_layout(&mut self, py: Python<'py>, item: &Bound<'py, PyAny>, rows: usize) -> PyResult<First> {
        let board = &self.worker.board;
        loop {
            if let Some(layout) = board.layout() {
                return Ok(First::Is(layout));
            }
            let known = board.last_layout();
            match self.describe(py, item, known)? {
                Some(LastLayout::Own(layout)) if known == 0 => {
                    if self.layout(py, layout)?.get().plan(rows)?.end > LARGE {
                        return Ok(First::Proposed);
                    }
                    board.settle_first_layout();
                }
                // Of two items; or another worker's, which this one is to be held against.
                Some(_) => {}
                None if known == 0 => return Ok(First::None),
                None => board.settle_first_layout(),
            }
        }
    }

    /// Keeps the first item.
    pub(super) fn keep(&mut self, claim: &Claim, row: u32, item: &Bound<'py, PyAny>) {
        self.kept_rows += 1;
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

    /// Writes the item that was kept, once its layout is settled.
    pub(super) fn place_kept(&mut self, py: Python<'py>) -> PyResult<()> {
        let board = &self.worker.board;
        if self.kept.is_none() || board.layout().is_none() {
            return Ok(());
        }
        let Some(Kept { claim, row, item, .. }) = self.kept.take() else {
            return Ok(());
        };
        self.room.get().turn_to(&claim);
        if !board.is_needless(claim.slot, row)
            && let Err(error) = self.write(py, &claim, row, &item)
        {
            self.fail(py, &claim, row, error)?;
        }
        self.finish(py, &claim, 1)
    }

    /// Waits for a second item, as long as others make some; else the first one has to do.
    pub(super) fn wait_for_second(&self, py: Python<'py>) {
        let board = &self.worker.board;
        let waited = self.kept.as_ref().map_or(0, |kept| nanos().saturating_sub(kept.since));
        if board.others_make(self.worker.number) && u128::from(waited) < PATIENCE.as_nanos() {
            py.detach(|| board.wait_for_work(self.worker.number, LOOK));
        } else {
            board.settle_first_layout();
        }
    }
}
