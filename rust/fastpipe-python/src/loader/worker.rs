//! A worker's loop: claim rows, make their items, write them, and join batches.

use std::ops::Range;
use std::sync::Arc;
use std::time::Duration;

use fastpipe_loader::{Claim, ControlBlock, Done, Indices, JoinTimer, RowKind, StealableRows, nanos};
use pyo3::exceptions::{PyMemoryError, PyRuntimeError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyInt, PyList};

use super::batch::ItemBatch;
use super::consumer::ItemConsumer;
use super::first_item::{First, FirstItem};
use super::helper::Helper;
use super::layout::ItemLayout;
use super::place::Row;
use super::room::ItemRoom;
use super::seeds::{BATCH, Current};
use crate::arrays::shared_arena::opened;

/// The time that a worker waits before it checks whether its parent process still exists.
const PATIENCE: Duration = Duration::from_millis(200);

/// A worker: an item worker or a batch worker.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemWorker {
    pub(super) block: ControlBlock,
    /// The index among item workers or among batch workers.
    pub(super) number: usize,
    joins: bool,
    /// Whether the worker is a thread of the consumer's process.
    threaded: bool,
    pub(super) current: Arc<Current>,
}

/// The state that a worker keeps between claims.
pub(super) struct Loop<'a, 'py> {
    pub(super) worker: &'a ItemWorker,
    pub(super) helper: Helper<'py>,
    pub(super) room: Bound<'py, ItemRoom>,
    pub(super) layouts: Vec<Option<Py<ItemLayout>>>,
    /// The slot and turn of a batch whose indices are not integers, and its indices.
    indices: Option<(usize, u32, Bound<'py, PyList>)>,
    pub(super) first: FirstItem<'py>,
}

#[pymethods]
impl ItemWorker {
    /// Opens the memory with a file descriptor, or the memory of a consumer in this process. `number` is the index
    /// among item workers or batch workers.
    #[new]
    #[pyo3(signature = (memory, number, *, joins=false))]
    fn new(memory: &Bound<'_, PyAny>, number: usize, joins: bool) -> PyResult<Self> {
        let (block, threaded) = match memory.cast::<ItemConsumer>() {
            Ok(consumer) => (consumer.get().block().clone(), true),
            Err(_) => (ControlBlock::open(opened(memory.extract()?)?)?, false),
        };
        let most = if joins {
            block.batch_workers()
        } else {
            block.item_workers()
        };
        if number >= most {
            return Err(pyo3::exceptions::PyValueError::new_err(format!(
                "number must be below {most}"
            )));
        }
        Ok(ItemWorker {
            block,
            number,
            joins,
            threaded,
            current: Arc::default(),
        })
    }

    /// Works until the consumer stops the workers. Returns false if the process that started this one, with the ID
    /// `parent`, ended first.
    fn run(&self, py: Python<'_>, helper: &Bound<'_, PyAny>, parent: Option<u32>) -> PyResult<bool> {
        let mut all = Loop {
            worker: self,
            helper: Helper::new(helper)?,
            room: Bound::new(py, ItemRoom::new(self.block.clone()))?,
            layouts: Vec::new(),
            indices: None,
            first: FirstItem::default(),
        };
        let done = all.run(py, parent);
        self.block.note_end(self.at());
        done
    }

    /// Reports that the worker can't start. The batches that it would make or join fail. The method `fail` of `helper`
    /// writes the exception.
    fn refuse(
        &self,
        py: Python<'_>,
        helper: &Bound<'_, PyAny>,
        error: Bound<'_, PyAny>,
        parent: Option<u32>,
    ) -> PyResult<bool> {
        let room = Bound::new(py, ItemRoom::new(self.block.clone()))?;
        let fail = helper.getattr("fail")?;
        // If memory for the error is missing, the first batch reports it.
        if let Ok((offset, len)) = fail.call1((&error, &room)).and_then(|said| said.extract()) {
            self.block.note_refusal(offset, len);
        }
        while !self.block.stopped() {
            py.check_signals()?;
            if gone(parent) {
                return Ok(false);
            }
            if self.joins {
                match self.block.claim_join(self.number) {
                    Some(claim) => {
                        room.get().turn_to(&claim);
                        let found = fail.call1((&error, &room))?.extract()?;
                        self.block.set_row(claim.slot, 0, RowKind::Failed, found);
                        self.block.joined(self.at(), claim.slot, &JoinTimer::start());
                    }
                    None => py.detach(|| self.block.wait_for_joins(self.number, PATIENCE)),
                }
                continue;
            }
            match self.block.claim(self.number) {
                Some(claim) => {
                    room.get().turn_to(&claim);
                    let found = fail.call1((&error, &room))?.extract()?;
                    self.block.set_row(claim.slot, claim.first, RowKind::Failed, found);
                    self.block.finish(self.number, claim.slot, claim.end - claim.first);
                }
                None => py.detach(|| self.block.wait_for_work(self.number, PATIENCE)),
            }
        }
        self.block.note_end(self.at());
        Ok(true)
    }

    /// Returns one of the four 63-bit seeds of the item that is being made, selected by `which`.
    fn seed(&self, which: u64) -> u64 {
        self.current.seed(which)
    }

    /// A number that differs for all items that this worker makes.
    #[getter]
    fn item(&self) -> u64 {
        self.current.count()
    }
}

impl ItemWorker {
    /// Returns the index among all workers.
    fn at(&self) -> usize {
        self.number + if self.joins { self.block.item_workers() } else { 0 }
    }
}

/// Whether the process that started this one has ended.
fn gone(parent: Option<u32>) -> bool {
    #[cfg(unix)]
    return parent.is_some_and(|parent| parent != std::os::unix::process::parent_id());
    #[cfg(not(unix))]
    {
        let _ = parent;
        false
    }
}

impl<'py> Loop<'_, 'py> {
    fn run(&mut self, py: Python<'py>, parent: Option<u32>) -> PyResult<bool> {
        let ItemWorker { block, number, .. } = self.worker;
        while !block.stopped() {
            py.check_signals()?;
            if gone(parent) {
                return Ok(false);
            }
            if self.worker.joins {
                match block.claim_join(*number) {
                    Some(claim) => self.join(py, &claim)?,
                    None => py.detach(|| block.wait_for_joins(*number, PATIENCE)),
                }
                continue;
            }
            self.place_kept(py)?;
            match block.claim(*number).or_else(|| block.steal(*number)) {
                Some(claim) => self.claim(py, &claim)?,
                None if self.first.is_kept() => self.first.wait_for_second(py, block, *number),
                None => py.detach(|| block.wait_for_work(*number, PATIENCE)),
            }
        }
        Ok(true)
    }

    /// Makes the items of a claim.
    fn claim(&mut self, py: Python<'py>, claim: &Claim) -> PyResult<()> {
        self.room.get().turn_to(claim);
        self.first.rows = 0;
        if let Some(join) = self.helper.join_whole.clone() {
            return self.whole(py, claim, |this, whole| this.join_indices(whole, &join));
        }
        if claim.whole && claim.rows > 1 {
            return self.own(py, claim);
        }
        let mut held = self.worker.block.hold(self.worker.number, claim);
        let done = self
            .rows(py, claim, &mut held)
            .or_else(|error| self.fail(py, claim, claim.first, error));
        self.finish_to(py, claim, held.close())?;
        done
    }

    /// Finishes the rows of a claim before row `end`. The later rows belong to other workers.
    pub(super) fn finish_to(&mut self, py: Python<'py>, claim: &Claim, end: u32) -> PyResult<()> {
        self.finish(py, claim, end - claim.first - self.first.rows)
    }

    /// Finishes this many rows of a claim, and joins the batch if they were the last.
    pub(super) fn finish(&mut self, py: Python<'py>, claim: &Claim, rows: u32) -> PyResult<()> {
        let block = &self.worker.block;
        let timer = JoinTimer::start();
        if let Done::Join(slot) = block.finish(self.worker.number, claim.slot, rows) {
            let batch = block.batch_of(slot);
            self.join_since(py, &batch, &timer)?;
        }
        Ok(())
    }

    fn rows(&mut self, py: Python<'py>, claim: &Claim, held: &mut StealableRows<'_>) -> PyResult<()> {
        let ItemWorker { block, number, .. } = self.worker;
        let numbers = self.indices(py, claim)?;
        let mut begun = nanos();
        let (first, mut made) = (begun, 0);
        let mut placing = 0;
        for row in held {
            if block.stopped() || block.is_needless(claim.slot, row) {
                break;
            }
            let (index, plain) = self.index(py, claim, numbers, row)?;
            block.begin_item(*number, claim.number, row, plain, begun);
            let mut item = self.item(claim, row, &index);
            if item.is_err() && self.drawn()? {
                self.rows_again(py, claim, numbers, claim.first..row)?;
                item = self.item(claim, row, &index);
            }
            let between = nanos();
            block.end_item(*number, between.saturating_sub(begun));
            made += 1;
            let written = item.and_then(|item| self.write(py, claim, row, &item));
            if let Err(error) = written {
                self.fail(py, claim, row, error)?;
            }
            begun = nanos();
            placing += begun.saturating_sub(between);
        }
        block.note_placing(*number, placing, made);
        if let Some(each) = begun.saturating_sub(first).checked_div(made) {
            block.note_pace(each);
        }
        if self.drawn()? {
            self.rows_again(py, claim, numbers, claim.first..claim.first + made as u32)?;
        }
        Ok(())
    }

    /// Makes items of a claim again, and writes them to their rows, which aren't finished yet.
    fn rows_again(&mut self, py: Python<'py>, claim: &Claim, numbers: bool, rows: Range<u32>) -> PyResult<()> {
        for row in rows {
            let (index, _) = self.index(py, claim, numbers, row)?;
            let written =
                self.item(claim, row, &index)
                    .and_then(|item| match self.first.keep_instead(claim, row, &item) {
                        true => Ok(()),
                        false => self.write(py, claim, row, &item),
                    });
            if let Err(error) = written {
                self.fail(py, claim, row, error)?;
            }
        }
        Ok(())
    }

    /// Whether items since the last call drew from generators that weren't seeded for them.
    pub(super) fn drawn(&self) -> PyResult<bool> {
        match &self.helper.generators {
            Some(generators) => generators.drawn(),
            None => Ok(false),
        }
    }

    pub(super) fn item(&self, claim: &Claim, row: u32, index: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        self.worker.current.set(claim.seed, claim.number, row);
        match &self.helper.generators {
            Some(generators) => generators.item(&self.helper.dataset, index, (claim.seed, claim.number, row)),
            None => self.helper.dataset.get_item(index),
        }
    }

    /// Whether the indices of a batch are integers. Other indices are unpickled here.
    pub(super) fn indices(&mut self, py: Python<'py>, claim: &Claim) -> PyResult<bool> {
        match self.worker.block.indices(claim.slot) {
            Some(Indices::Numbers(_)) => Ok(true),
            Some(Indices::Blob(blob, _)) => {
                if !matches!(&self.indices, Some((slot, turn, _)) if (*slot, *turn) == (claim.slot, claim.turn)) {
                    let list = self
                        .helper
                        .indices
                        .call1((PyBytes::new(py, blob),))?
                        .cast_into::<PyList>()?;
                    self.indices = Some((claim.slot, claim.turn, list));
                }
                Ok(false)
            }
            None => Err(PyRuntimeError::new_err("a batch has no indices")),
        }
    }

    pub(super) fn index(
        &self,
        py: Python<'py>,
        claim: &Claim,
        numbers: bool,
        row: u32,
    ) -> PyResult<(Bound<'py, PyAny>, Option<i64>)> {
        if numbers && let Some(Indices::Numbers(all)) = self.worker.block.indices(claim.slot) {
            let index = all.get(row as usize).copied().unwrap_or_default();
            return Ok((PyInt::new(py, index).into_any(), Some(index)));
        }
        let (_, _, list) = self
            .indices
            .as_ref()
            .ok_or_else(|| PyRuntimeError::new_err("a batch has no indices"))?;
        Ok((list.get_item(row as usize)?, None))
    }

    /// Writes an item to its row, or keeps the item if it is the first item of all.
    pub(super) fn write(&mut self, py: Python<'py>, claim: &Claim, row: u32, item: &Bound<'py, PyAny>) -> PyResult<()> {
        let block = &self.worker.block;
        let mut known = match block.known_layout(claim.slot) {
            Some(layout) => Some(layout),
            None => block.layout().map(|layout| block.layout_of(claim.slot, layout)),
        };
        if known.is_none() {
            known = match self.first_layout(py, item, claim.rows as usize)? {
                First::Is(layout) => Some(block.layout_of(claim.slot, layout)),
                First::Proposed => {
                    self.first.keep(claim, row, item);
                    return Ok(());
                }
                First::None => None,
            };
        }
        if let Some(number) = known {
            // This must happen before the worker waits for a slab, because batches get their slabs in order.
            if self.first.is_kept() {
                self.place_kept(py)?;
                self.room.get().turn_to(claim);
            }
            let layout = self.layout(py, number)?;
            let layout = layout.get();
            let plan = layout.plan(claim.rows as usize)?;
            let find = || block.slab(claim.slot, claim.rows, plan.end);
            let slab = match block.slab_if_there(claim.slot, plan.end) {
                Some(slab) => Some(slab),
                None => py.detach(find),
            };
            let Some(slab) = slab else {
                // Memory ran out, or the batch was cancelled.
                return Ok(());
            };
            let at = Row {
                block,
                starts: &plan.starts,
                widths: &layout.widths,
                slab,
                row: row as usize,
                room: &self.room,
                pack: &self.helper.pack,
                threaded: self.worker.threaded,
            };
            if at.place(&layout.root, item)? {
                if !layout.in_place {
                    block.set_odd(claim.slot);
                }
                block.set_row(claim.slot, row, RowKind::Placed, (0, 0));
                return Ok(());
            }
            self.learn(py, item, number)?;
        }
        let cell = self.helper.pack.call1((item, &self.room))?.extract()?;
        block.set_row(claim.slot, row, RowKind::Odd, cell);
        Ok(())
    }

    /// Records that an item has failed. The worker continues after any exception. Ctrl-C is handled by the main
    /// program, and an item that tries to end the process (`sys.exit`) is reported as an error of its batch.
    pub(super) fn fail(&self, py: Python<'py>, claim: &Claim, row: u32, error: PyErr) -> PyResult<()> {
        // The exception value keeps its traceback.
        let value = error.into_value(py);
        let said = self
            .helper
            .fail
            .call1((value, &self.room))
            .and_then(|said| said.extract());
        // If memory for the exception is missing, the batch still fails.
        let cell = match said {
            Ok(cell) => cell,
            Err(failed) if failed.is_instance_of::<PyMemoryError>(py) => (0, 0),
            Err(failed) => {
                self.worker.block.set_row(claim.slot, row, RowKind::Failed, (0, 0));
                return Err(failed);
            }
        };
        self.worker.block.set_row(claim.slot, row, RowKind::Failed, cell);
        Ok(())
    }

    fn join(&mut self, py: Python<'py>, claim: &Claim) -> PyResult<()> {
        self.join_since(py, claim, &JoinTimer::start())
    }

    /// Joins the items of a batch.
    fn join_since(&mut self, py: Python<'py>, claim: &Claim, timer: &JoinTimer) -> PyResult<()> {
        let block = &self.worker.block;
        self.room.get().turn_to(claim);
        self.worker.current.set(claim.seed, claim.number, BATCH);
        let layout = block
            .known_layout(claim.slot)
            .map(|number| self.layout(py, number))
            .transpose()?;
        let run = || -> PyResult<(usize, usize)> {
            let batch = Bound::new(
                py,
                ItemBatch::new(py, block.clone(), claim.clone(), layout, self.room.clone().unbind())?,
            )?;
            self.helper.join.call1((batch, &self.room))?.extract()
        };
        let done = match run() {
            Ok(found) => {
                block.set_result(claim.slot, found);
                Ok(())
            }
            Err(error) => self.fail(py, claim, 0, error),
        };
        block.joined(self.worker.at(), claim.slot, timer);
        done
    }
}
