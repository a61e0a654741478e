//! Seeds of items. The generators of a worker process are seeded with them by `ItemGenerators` in
//! `python/fastpipe/torch/loader/_seeds.py`.

use std::cell::Cell;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_random::{Draws, Key, Purpose};
use pyo3::prelude::*;

/// Used instead of an item's row when a whole batch is made.
pub(super) const BATCH: u32 = u32::MAX;

/// The item that is being made. Callers ask this for the item's seed.
#[derive(Debug, Default)]
pub(crate) struct Current {
    seed: AtomicU64,
    number: AtomicU64,
    row: AtomicU64,
    /// The number of items so far. It distinguishes items of two passes that have the same batch and row.
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

    /// A number that identifies the current item in this process.
    pub(crate) fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Returns a seed of the item. There are four different seeds, selected by `which`.
    pub(crate) fn seed(&self, which: u64) -> u64 {
        let get = |number: &AtomicU64| number.load(Ordering::Relaxed);
        seed_of(get(&self.seed), get(&self.number), get(&self.row), which)
    }
}

/// Returns a seed of 63 bits, which every generator accepts.
fn seed_of(seed: u64, number: u64, row: u64, which: u64) -> u64 {
    Draws::new(Key { seed, epoch: 0 }, Purpose::Items, number).word(row * 4 + which % 4) >> 1
}

/// Returns one of the four 63-bit seeds of an item, selected by `which`.
#[pyfunction]
pub(crate) fn item_seed(seed: u64, number: u64, row: u64, which: u64) -> u64 {
    seed_of(seed, number, row, which)
}

/// The random generators of a worker process.
pub(super) struct ItemGenerators<'py> {
    all: Bound<'py, PyAny>,
    item: Bound<'py, PyAny>,
    drawn: Bound<'py, PyAny>,
    /// Whether any generators are seeded for each item.
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

    /// Returns an item of a dataset, which is made with seeded generators.
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

    /// Returns whether items since the last call drew from generators that weren't seeded for them. If so, these
    /// generators are seeded from now on, and the caller must make these items again.
    pub(super) fn drawn(&self) -> PyResult<bool> {
        let drawn = self.drawn.call0()?.is_truthy()?;
        if drawn || self.seeding.get() {
            self.seeding.set(self.all.getattr("seeding")?.is_truthy()?);
        }
        Ok(drawn)
    }
}
