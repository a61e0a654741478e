//! Batches that one worker makes as a whole.

use fastpipe_loader::{Claim, StealableRows, nanos};
use pyo3::prelude::*;
use pyo3::types::PyList;

use super::batch::ItemBatch;
use super::seeds::BATCH;
use super::worker::{ItemWorker, Loop};

/// A claim of all rows of a batch, and whether their indices are integers.
pub(super) struct WholeClaim<'a> {
    claim: &'a Claim,
    numbers: bool,
}

impl<'py> Loop<'_, 'py> {
    /// Makes a batch as a whole. `run` writes the result.
    pub(super) fn whole(
        &mut self,
        py: Python<'py>,
        claim: &Claim,
        run: impl FnOnce(&Self, WholeClaim<'_>) -> PyResult<(usize, usize)>,
    ) -> PyResult<()> {
        let block = &self.worker.block;
        let found = self.indices(py, claim).and_then(|numbers| {
            self.worker.current.set(claim.seed, claim.number, BATCH);
            // The slab can be overwritten from now on. The result is stored in it.
            block.clear(claim.slot);
            run(self, WholeClaim { claim, numbers })
        });
        let done = match found {
            Ok(found) => {
                block.set_result(claim.slot, found);
                Ok(())
            }
            Err(error) => self.fail(py, claim, 0, error),
        };
        block.finish_whole(claim.slot);
        done
    }

    /// Makes a batch of the dataset's result for all its indices at once.
    pub(super) fn join_indices(&self, whole: WholeClaim<'_>, join: &Bound<'py, PyAny>) -> PyResult<(usize, usize)> {
        let WholeClaim { claim, numbers } = whole;
        let (ItemWorker { block, number, .. }, py) = (self.worker, self.room.py());
        let indices = (0..claim.rows).map(|row| self.index(py, claim, numbers, row));
        let (indices, plain): (Vec<_>, Vec<_>) = indices.collect::<PyResult<Vec<_>>>()?.into_iter().unzip();
        let begun = nanos();
        block.begin_item(*number, claim.number, 0, plain.first().copied().flatten(), begun);
        let batch = ItemBatch::new(py, block.clone(), claim.clone(), None, self.room.clone().unbind())?;
        let arguments = (PyList::new(py, indices)?, &self.room, batch);
        let found = join.call1(arguments).and_then(|found| found.extract());
        block.end_item(*number, nanos().saturating_sub(begun));
        found
    }

    /// Makes all items of a batch and joins them. The items are not written to the slab, unless an item takes so long
    /// that other workers make some items. In that case they are written for the worker that joins the batch.
    pub(super) fn own(&mut self, py: Python<'py>, claim: &Claim) -> PyResult<()> {
        let block = &self.worker.block;
        let mut held = block.hold(self.worker.number, claim);
        let mut items = Vec::new();
        let made = self.items(py, claim, &mut held, &mut items);
        let end = held.close();
        if end == claim.rows {
            return self.whole(py, claim, |this, _| {
                made?;
                this.join_own(claim, items)
            });
        }
        let begun = nanos();
        let written = items.len() as u64;
        let mut done = Ok(());
        for (row, item) in (claim.first..).zip(items) {
            if let Err(error) = self.write(py, claim, row, &item) {
                done = done.and(self.fail(py, claim, row, error));
            }
        }
        block.note_placing(self.worker.number, nanos().saturating_sub(begun), written);
        if let Err(error) = made {
            done = done.and(self.fail(py, claim, claim.first + written as u32, error));
        }
        self.finish_to(py, claim, end)?;
        done
    }

    /// Makes items until one fails.
    fn items(
        &mut self,
        py: Python<'py>,
        claim: &Claim,
        held: &mut StealableRows<'_>,
        items: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let block = &self.worker.block;
        let numbers = self.indices(py, claim)?;
        let begun = nanos();
        let mut last = begun;
        for row in held {
            let (index, plain) = self.index(py, claim, numbers, row)?;
            block.begin_item(self.worker.number, claim.number, row, plain, last);
            let mut item = self.item(claim, row, &index);
            if item.is_err() && self.drawn()? {
                self.items_again(py, claim, numbers, items)?;
                item = self.item(claim, row, &index);
            }
            items.push(item?);
            let now = nanos();
            block.end_item(self.worker.number, now.saturating_sub(last));
            last = now;
        }
        if let Some(each) = last.saturating_sub(begun).checked_div(items.len() as u64) {
            block.note_pace(each);
        }
        match self.drawn()? {
            true => self.items_again(py, claim, numbers, items),
            false => Ok(()),
        }
    }

    /// Makes the first items of a batch again, until one fails.
    fn items_again(
        &self,
        py: Python<'py>,
        claim: &Claim,
        numbers: bool,
        items: &mut Vec<Bound<'py, PyAny>>,
    ) -> PyResult<()> {
        let rows = claim.first..claim.first + items.len() as u32;
        items.clear();
        for row in rows {
            let (index, _) = self.index(py, claim, numbers, row)?;
            items.push(self.item(claim, row, &index)?);
        }
        Ok(())
    }

    /// Joins a batch of items that this worker has made.
    fn join_own(&self, claim: &Claim, items: Vec<Bound<'py, PyAny>>) -> PyResult<(usize, usize)> {
        let (block, py) = (&self.worker.block, self.room.py());
        let items = PyList::new(py, items)?;
        let timer = block.begin_joining(self.worker.number);
        let found = self
            .helper
            .join_own
            .call1((items, &self.room, claim.seed, claim.number));
        block.note_joining(self.worker.number, &timer);
        found?.extract()
    }
}
