//! Random generators that items draw from, seeded for each item, so that an item is the same whoever makes it.
//!
//! To seed the generators of Python, NumPy and PyTorch takes seven microseconds, longer than many an item. Most data
//! sets draw from none or one of them. So an item's generators are seeded before it is made only if items draw from
//! them: each is watched, by some bytes of its state that change with every draw. The first items are made with all
//! generators seeded; a generator that none of them drew from is then left alone. Should a later item draw from it
//! after all, the item is made once more, with the generator seeded, and so are all behind it.
#![allow(unsafe_code)]

use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};

use fastpipe_random::{Draws, Key, Purpose};
use pyo3::exceptions::{PyException, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyList;

/// Items that are made with all generators seeded, to see which of them they draw from.
const TRIED: u32 = 16;

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

/// A generator.
struct Generator {
    /// Called with a number.
    seed: Py<PyAny>,
    /// Called when it is left alone; `None` for nothing.
    leave: Option<Py<PyAny>>,
    /// The number of its seed among those of an item.
    which: u64,
    /// Its state's watched parts; none if it can't be watched.
    watched: Vec<Part>,
    /// Whether it is seeded for each item.
    seeds: AtomicBool,
    drawn: AtomicBool,
}

/// Four or eight bytes of a generator's state, and what they were.
struct Part {
    address: usize,
    wide: bool,
    seen: AtomicU64,
}

impl Part {
    #[inline]
    fn now(&self) -> u64 {
        let at = std::ptr::with_exposed_provenance_mut::<u8>(self.address);
        // SAFETY: `ItemGenerators::new` was promised that the generator's state lies there as long as this is used, and
        // saw that the address is a multiple of the length. Another thread may draw meanwhile from a generator that is
        // the process's: then this is what was there before or behind that.
        unsafe {
            match self.wide {
                true => AtomicU64::from_ptr(at.cast()).load(Ordering::Relaxed),
                false => AtomicU32::from_ptr(at.cast()).load(Ordering::Relaxed).into(),
            }
        }
    }
}

impl Generator {
    /// Whether it was drawn from since it was last looked at.
    #[inline]
    fn has_changed(&self) -> bool {
        self.watched
            .iter()
            .any(|part| part.now() != part.seen.load(Ordering::Relaxed))
    }

    /// Looks at it.
    #[inline]
    fn see(&self) {
        self.watched
            .iter()
            .for_each(|part| part.seen.store(part.now(), Ordering::Relaxed));
    }

    fn seeds(&self) -> bool {
        self.seeds.load(Ordering::Relaxed)
    }

    fn drawn(&self) -> bool {
        self.drawn.load(Ordering::Relaxed)
    }
}

/// What Python tells of a generator: see [`ItemGenerators::new`].
type Told = (Py<PyAny>, Option<Py<PyAny>>, u64, Vec<(usize, usize)>);

/// The generators of a process, or of a thread. Any thread may have it; one at a time makes items with it.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemGenerators {
    all: Vec<Generator>,
    /// Called before an item is made once more; `None` for nothing.
    again: Option<Py<PyAny>>,
    tried: AtomicU32,
}

#[pymethods]
impl ItemGenerators {
    /// Each is a function that seeds it; one that is called when it is left alone from now on, or `None`; the number
    /// (of four) of its seed among those of an item; and address and length of parts of its state that change with
    /// each draw, or none if nobody knows. `again` is called before an item is made once more.
    ///
    /// The caller promises that the parts can be read as long as this is used.
    #[new]
    #[pyo3(signature = (all, again=None))]
    fn new(all: Vec<Told>, again: Option<Py<PyAny>>) -> PyResult<Self> {
        let generator = |(seed, leave, which, watched): Told| {
            let part = |&(address, len): &(usize, usize)| match (address, len) {
                (1.., 4 | 8) if address.is_multiple_of(len) => Ok(Part {
                    address,
                    wide: len == 8,
                    seen: AtomicU64::new(0),
                }),
                _ => Err(PyValueError::new_err(
                    "parts of a generator's state have 4 or 8 bytes, at multiples of that",
                )),
            };
            Ok(Generator {
                seed,
                leave,
                which,
                watched: watched.iter().map(part).collect::<PyResult<_>>()?,
                seeds: AtomicBool::new(true),
                drawn: AtomicBool::new(false),
            })
        };
        Ok(ItemGenerators {
            all: all.into_iter().map(generator).collect::<PyResult<_>>()?,
            again,
            tried: AtomicU32::new(0),
        })
    }

    /// Whether some are seeded for items to come.
    fn seeds(&self) -> bool {
        self.all.iter().any(Generator::seeds)
    }

    /// Items of a data set, made one after the other in this thread: those with these indices, which are rows of a
    /// batch from `first` on.
    fn items<'py>(
        slf: &Bound<'py, Self>,
        dataset: &Bound<'py, PyAny>,
        indices: &Bound<'py, PyAny>,
        seed: u64,
        number: u64,
        first: u32,
    ) -> PyResult<Bound<'py, PyList>> {
        let found = PyList::empty(slf.py());
        let this = slf.get();
        this.see();
        for (row, index) in (first..).zip(indices.try_iter()?) {
            let index = index?;
            let item = this.make(slf.py(), seed, number, row, || dataset.get_item(&index))?;
            found.append(item)?;
        }
        Ok(found)
    }

    /// Others may have drawn from generators that aren't seeded for items. Returns from which.
    fn look_again(&self) -> Vec<bool> {
        let look = |generator: &Generator| {
            let changed = !generator.seeds() && generator.has_changed();
            if changed {
                generator.see();
            }
            changed
        };
        self.all.iter().map(look).collect()
    }

    /// Looks which generators were drawn from. Returns whether there is one that hadn't been seeded.
    #[inline]
    pub(crate) fn look(&self, py: Python<'_>) -> PyResult<bool> {
        let tried = self.tried.load(Ordering::Relaxed);
        let mut unseeded = false;
        for generator in &self.all {
            if generator.watched.is_empty() || (generator.seeds() && generator.drawn()) {
                continue;
            }
            if generator.has_changed() {
                generator.drawn.store(true, Ordering::Relaxed);
                generator.see();
                unseeded |= !generator.seeds.swap(true, Ordering::Relaxed);
            }
        }
        if tried < TRIED && !unseeded {
            self.tried.store(tried + 1, Ordering::Relaxed);
            if tried + 1 == TRIED {
                for generator in &self.all {
                    let seeds = generator.drawn() || generator.watched.is_empty();
                    generator.seeds.store(seeds, Ordering::Relaxed);
                    if let (false, Some(leave)) = (seeds, &generator.leave) {
                        leave.call0(py)?;
                    }
                }
            }
        }
        Ok(unseeded)
    }

    /// What a function makes of a batch, with seeds of the batch's own.
    fn call<'py>(
        &self,
        function: &Bound<'py, PyAny>,
        argument: &Bound<'py, PyAny>,
        seed: u64,
        number: u64,
    ) -> PyResult<Bound<'py, PyAny>> {
        self.see();
        self.make(function.py(), seed, number, BATCH, || function.call1((argument,)))
    }
}

/// The seed of an item, of 63 bits: which of four.
#[pyfunction]
pub(crate) fn item_seed(seed: u64, number: u64, row: u64, which: u64) -> u64 {
    seed_of(seed, number, row, which)
}

impl ItemGenerators {
    /// Looks at the generators that aren't seeded for items: others may have drawn from them.
    pub(crate) fn see(&self) {
        self.all
            .iter()
            .filter(|generator| !generator.seeds())
            .for_each(Generator::see);
    }

    /// Makes an item, with its own seeds for the generators that items draw from.
    #[inline]
    pub(crate) fn make<T>(
        &self,
        py: Python<'_>,
        seed: u64,
        number: u64,
        row: u32,
        make: impl Fn() -> PyResult<T>,
    ) -> PyResult<T> {
        loop {
            for generator in &self.all {
                if generator.seeds() {
                    let seed = seed_of(seed, number, row.into(), generator.which);
                    generator.seed.call1(py, (seed,))?;
                    generator.see();
                }
            }
            let made = make();
            if matches!(&made, Err(error) if !error.is_instance_of::<PyException>(py)) || !self.look(py)? {
                return made;
            }
            // It drew from a generator that wasn't seeded for it: once more, with the generator seeded.
            drop(made);
            if let Some(again) = &self.again {
                again.call0(py)?;
            }
        }
    }
}
