//! How workers agree on layouts of items.

use fastpipe_loader::LastLayout;
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use super::first_item::{First, Kept, LARGE};
use super::layout::ItemLayout;
use super::memory::{outside, written};
use super::room::no_memory;
use super::worker::Loop;

impl<'py> Loop<'_, 'py> {
    /// Determines the layout that new batches use. The item is one of the first items.
    pub(super) fn first_layout(&mut self, py: Python<'py>, item: &Bound<'py, PyAny>, rows: usize) -> PyResult<First> {
        let block = &self.worker.block;
        loop {
            if let Some(layout) = block.layout() {
                return Ok(First::Is(layout));
            }
            let known = block.last_layout();
            match self.describe(py, item, known)? {
                Some(LastLayout::Own(layout)) if known == 0 => {
                    if self.layout(py, layout)?.get().plan(rows)?.end > LARGE {
                        return Ok(First::Proposed);
                    }
                    block.settle_first_layout();
                }
                // The layout is based on two items, or it is another worker's layout, which must be compared with this
                // item.
                Some(_) => {}
                None if known == 0 => return Ok(First::None),
                None => block.settle_first_layout(),
            }
        }
    }

    /// Writes the kept item, once its layout is settled.
    pub(super) fn place_kept(&mut self, py: Python<'py>) -> PyResult<()> {
        let block = &self.worker.block;
        let Some(Kept { claim, row, item, .. }) = self.first.take_settled(block) else {
            return Ok(());
        };
        self.room.get().turn_to(&claim);
        if !block.is_needless(claim.slot, row)
            && let Err(error) = self.write(py, &claim, row, &item)
        {
            self.fail(py, &claim, row, error)?;
        }
        self.finish(py, &claim, 1)
    }

    /// Proposes a layout for items like one that didn't fit layout `known`, if that is still the latest layout.
    pub(super) fn learn(&self, py: Python<'py>, item: &Bound<'py, PyAny>, known: u32) -> PyResult<()> {
        if self.worker.block.layout() == Some(known) {
            self.describe(py, item, known)?;
        }
        Ok(())
    }

    /// Proposes a layout that fits an item and the items of layout `known`. Returns `None` if `known` already fits, or
    /// if no layout can fit.
    fn describe(&self, py: Python<'py>, item: &Bound<'py, PyAny>, known: u32) -> PyResult<Option<LastLayout>> {
        let block = &self.worker.block;
        let before = match block.description(known) {
            Some((offset, len)) => Some(self.bytes(py, offset, len)?),
            None => None,
        };
        let description = self.helper.describe.call1((item, before))?;
        if description.is_none() {
            return Ok(None);
        }
        let description = description.cast_into::<PyBytes>()?;
        let told = block.tell(self.worker.number, known, description.as_bytes());
        told.map_err(|refused| no_memory(py, &refused))
    }

    fn bytes(&self, py: Python<'py>, offset: usize, len: usize) -> PyResult<Bound<'py, PyBytes>> {
        Ok(PyBytes::new(py, written(&self.worker.block, offset, len)?))
    }

    /// Returns the layout with this index.
    pub(super) fn layout(&mut self, py: Python<'py>, number: u32) -> PyResult<Py<ItemLayout>> {
        let at = number as usize;
        if let Some(Some(layout)) = self.layouts.get(at) {
            return Ok(layout.clone_ref(py));
        }
        let (offset, len) = self.worker.block.description(number).ok_or_else(outside)?;
        let description = self.bytes(py, offset, len)?;
        let layout = self
            .helper
            .layout
            .call1((description,))?
            .cast_into::<ItemLayout>()?
            .unbind();
        if self.layouts.len() <= at {
            self.layouts.resize_with(at + 1, || None);
        }
        self.layouts[at] = Some(layout.clone_ref(py));
        Ok(layout)
    }
}
