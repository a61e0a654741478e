//! Seeds of items, and what seeds the generators of a worker's process with them (`ItemGenerators` of
//! `python/fastpipe/torch/loader/_seeds.py`).

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_random::{Draws, Key, Purpose};
use pyo3::prelude::*;

/// Stands for the row of an item where a batch as a whole is made.
pub(super) const BATCH: u32 = u32::MAX;

/// Which item is being made, for whoever asks for its seed.
#[derive(Debug, Default)]
pub(crate) struct Current {
    seed: AtomicU64,
    number: AtomicU64,
    row: AtomicU64,
    /// Items so far: two in a row may have the same numbers, in two passes.
    count: AtomicU64,
}

impl Current {
    pub(crate) fn set(&self, seed: u64, number: u64, row: u32) {
        self.seed.store(seed, Ordering::Relaxed);
        self.number.store(number, Ordering::Relaxed);
        self.row.store(row.into(), Ordering::Relaxed);
        self.count
            .store(self.count.load(Ordering::Relaxed) + 1, Ordering::Relaxed);
    }

    /// Tells items from each other.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// A seed for the item. Each `which` of four has another.
    pub(crate) fn seed(&self, which: u64) -> u64 {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        seed_of(get(&self.seed), get(&self.number), get(&self.row), which)
    }
}

/// Of 63 bits, which every generator takes.
fn seed_of(seed: u64, number: u64, row: u64, which: u64) -> u64 {
    Draws::new(Key { seed, epoch: 0 }, Purpose::Items, number).word(row * 4 + which % 4) >> 1
}

/// The seed of an item, of 63 bits: which of four.
#[pyfunction]
pub(crate) fn item_seed(seed: u64, number: u64, row: u64, which: u64) -> u64 {
    seed_of(seed, number, row, which)
}

/// The generators of a worker's process.
pub(super) struct ItemGenerators<'py> {
    all: Bound<'py, PyAny>,
    item: Bound<'py, PyAny>,
    drawn: Bound<'py, PyAny>,
    /// Whether some are seeded for each item.
    seeding: Cell<bool>,
}

impl<'py> ItemGenerators<'py> {
    pub(super) fn new(all: Bound<'py, PyAny>) -> PyResult<Self> {
        Ok(ItemGenerators {
            item: all.getattr("item")?,
            drawn: all.getattr("drawn")?,
            seeding: Cell::new(all.getattr("seeding")?.is_truthy()?),
            all,
        })
    }

    /// An item of a data set, which draws from seeded generators.
    #[inline]
    pub(super) fn item(
        &self,
        dataset: &Bound<'py, PyAny>,
        index: &Bound<'py, PyAny>,
        (seed, number, row): (u64, u64, u32),
    ) -> PyResult<Bound<'py, PyAny>> {
        match self.seeding.get() {
            true => self.item.call1((dataset, index, seed, number, row)),
            false => dataset.get_item(index),
        }
    }

    /// Whether items since the last call drew from generators that weren't seeded for them. They are from now on, and
    /// those items are to be made again.
    pub(super) fn drawn(&self) -> PyResult<bool> {
        let drawn = self.drawn.call0()?.is_truthy()?;
        if drawn || self.seeding.get() {
            self.seeding.set(self.all.getattr("seeding")?.is_truthy()?);
        }
        Ok(drawn)
    }
}
