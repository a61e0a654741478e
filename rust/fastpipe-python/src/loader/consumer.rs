//! The consumer's side: starts batches, waits for them, and takes them.

use std::sync::Arc;
use std::time::{Duration, Instant};

use fastpipe_loader::{Activity, Consumer, ControlBlock, Failure, Indices, Joining, Options, Slab, State, WorkerView};
use fastpipe_memory::{PageLocks, SharedMemory};
use pyo3::exceptions::{PyRuntimeError, PyValueError};
use pyo3::intern;
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict, PyInt, PyList};

use super::layout::ItemLayout;
use super::memory::ItemMemory;
use super::room::no_memory;
use crate::arrays::shared_slabs::as_much_as_can_be;

/// The maximum time for which a wait delays Ctrl-C.
const PATIENCE: Duration = Duration::from_millis(20);

/// The consumer of batches that workers make.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ItemConsumer {
    consumer: Arc<Consumer>,
}

/// Options from Python's `ItemConsumerOptions`.
#[derive(FromPyObject)]
struct ItemConsumerOptions {
    makers: usize,
    joiners: usize,
    slots: usize,
    joining: u32,
    whole: bool,
    turns: bool,
    ahead: usize,
    slack: usize,
    most: u64,
    shared: bool,
}

/// How the memory of a batch is allocated.
#[derive(FromPyObject)]
enum BatchMemory<'py> {
    /// The layout, with its index, determines the size.
    Layout((u32, PyRef<'py, ItemLayout>)),
    /// Without a layout. If true, `plan` provides one later; otherwise a worker allocates the memory.
    Later(bool),
}

/// A delivered batch: its memory, rows, layout, the offset of the slab, and the offset and length of the joined result.
type TakenBatch<'py> = (Bound<'py, ItemMemory>, usize, u32, usize, Option<(usize, usize)>);

#[pymethods]
impl ItemConsumer {
    /// Allocates memory for batches.
    #[new]
    fn new(options: ItemConsumerOptions) -> PyResult<Self> {
        let (ahead, slack) = (options.ahead, options.slack);
        if options.makers == 0 || options.slots == 0 {
            return Err(PyValueError::new_err("there must be at least one worker and one slot"));
        }
        let memory = as_much_as_can_be(|space| match options.shared {
            true => for_processes(space),
            false => SharedMemory::private(space),
        })?;
        let options = Options {
            item_workers: options.makers,
            batch_workers: options.joiners,
            slots: options.slots,
            joining: match options.joining {
                0 => Joining::InPlace,
                1 => Joining::ByMakers,
                _ => Joining::ByJoiners,
            },
            whole: options.whole,
            turns: options.turns,
            most: options.most,
        };
        Ok(ItemConsumer {
            consumer: Consumer::new(memory, &options, ahead, slack)?,
        })
    }

    /// The file descriptor of the memory, for worker processes. None if the workers are threads.
    #[getter]
    fn file(&self) -> Option<i32> {
        #[cfg(target_os = "linux")]
        {
            use std::os::fd::AsRawFd;
            self.block().arena().memory().file().map(|file| file.as_raw_fd())
        }
        #[cfg(not(target_os = "linux"))]
        None
    }

    /// Sets the object that locks the pages of batches. `unlock(address)` removes a lock before the memory is released,
    /// and returns whether it succeeded. From now on, `reuse` must be called, and only one thread at a time may use
    /// this object. `close()` is called before the memory is unmapped.
    fn set_page_locks(&self, locks: Py<PyAny>) {
        self.consumer.set_page_locks(Box::new(Locks(locks)));
    }

    /// The number of batches whose memory was returned since the page locks were set.
    fn returned(&self) -> u64 {
        self.consumer.returned()
    }

    /// Reuses the memory of the first `count` batches that were returned.
    fn reuse(&self, count: u64) {
        self.consumer.reuse(count);
    }

    /// Whether another batch can be started now.
    fn can_begin(&self) -> bool {
        self.consumer.can_begin()
    }

    /// Whether there is slack for one more batch with this layout and number of rows. `layout` is None for batches that
    /// one worker makes as a whole. There is slack only after the first of these batches is complete.
    fn has_slack(&self, layout: Option<PyRef<'_, ItemLayout>>, rows: usize) -> PyResult<bool> {
        let sizes = layout.map(|layout| self.sizes(&layout, rows)).transpose()?;
        Ok(self.consumer.slabs().has_slack(sizes.map(|(bytes, _)| bytes)))
    }

    /// Starts a batch and returns it. `indices` is a list. `pickle` converts the list to bytes unless all indices are
    /// integers. `layout` is a pair of the layout's index and the layout, or a bool: whether `plan` later determines
    /// the memory of the batch. `owner` is the index of the only item worker that may make the batch.
    #[pyo3(signature = (indices, pickle, number, seed, layout, owner=None))]
    #[allow(clippy::too_many_arguments, reason = "the arguments are those of one batch")]
    fn begin(
        &self,
        py: Python<'_>,
        indices: &Bound<'_, PyList>,
        pickle: &Bound<'_, PyAny>,
        number: u64,
        seed: u64,
        layout: BatchMemory<'_>,
        owner: Option<usize>,
    ) -> PyResult<u64> {
        if owner.is_some_and(|owner| owner >= self.block().item_workers()) {
            return Err(PyValueError::new_err("owner must be the index of an item worker"));
        }
        let rows = indices.len();
        let slab = match layout {
            BatchMemory::Layout((number, layout)) => {
                let (bytes, for_rows) = self.sizes(&layout, rows)?;
                Slab::Of {
                    layout: number,
                    bytes,
                    for_rows,
                }
            }
            BatchMemory::Later(true) => Slab::Later,
            BatchMemory::Later(false) => Slab::ByMaker,
        };
        let begun = match numbers(indices) {
            Some(numbers) => self
                .consumer
                .begin_for(owner, number, seed, &Indices::Numbers(&numbers), slab),
            None => {
                let blob = pickle.call1((indices,))?.cast_into::<PyBytes>()?;
                self.consumer
                    .begin_for(owner, number, seed, &Indices::Blob(blob.as_bytes(), rows), slab)
            }
        };
        begun.map_err(|refused| no_memory(py, &refused))
    }

    /// Returns the earliest batch that needs a call of `plan`, with its layout. Batches without their own layout have
    /// `layout`.
    fn unplanned(&self, layout: u32) -> Option<(u64, u32)> {
        let batch = self.consumer.slabs().unplanned()?;
        Some((batch, self.consumer.slabs().layout_of(batch, layout)))
    }

    /// Determines how much memory a batch needs.
    fn plan(&self, batch: u64, layout: PyRef<'_, ItemLayout>) -> PyResult<()> {
        let (bytes, for_rows) = self.sizes(&layout, self.consumer.rows(batch))?;
        self.consumer.slabs().plan(batch, bytes, for_rows);
        Ok(())
    }

    /// Waits up to `seconds` until a batch is ready, or until any started batch is ready if `batch` is None. Returns
    /// whether `batch` is ready.
    fn wait(&self, py: Python<'_>, batch: Option<u64>, seconds: f64) -> PyResult<bool> {
        let ready = |batch: u64| self.consumer.state(batch) == State::Ready;
        if let Some(batch) = batch {
            if ready(batch) {
                return Ok(true);
            }
            self.consumer.slabs().need(batch);
        }
        let most = Duration::try_from_secs_f64(seconds.max(0.0)).unwrap_or(Duration::MAX);
        let begin = Instant::now();
        loop {
            let left = most.saturating_sub(begin.elapsed());
            py.detach(|| self.consumer.wait(batch, left.min(PATIENCE)));
            if batch.is_some_and(ready) {
                return Ok(true);
            }
            py.check_signals()?;
            if batch.is_none() || begin.elapsed() >= most {
                return Ok(false);
            }
        }
    }

    /// Ensures that a batch gets its memory, even if the consumer holds other batches.
    fn need(&self, batch: u64) {
        self.consumer.slabs().need(batch);
    }

    /// Whether a batch can be taken.
    fn ready(&self, batch: u64) -> bool {
        self.consumer.state(batch) == State::Ready
    }

    /// Takes a batch that is ready. If the batch has failed, the result describes the error: ("row", memory, row,
    /// offset, length) or ("memory", wanted, held, most, errno).
    fn take<'py>(&self, py: Python<'py>, batch: u64) -> PyResult<Outcome<'py>> {
        if self.consumer.state(batch) != State::Ready {
            return Err(PyRuntimeError::new_err("the batch is not ready"));
        }
        match self.consumer.take(batch) {
            Ok(taken) => {
                let memory = Bound::new(py, ItemMemory::new(self.block().clone(), Some(taken.lent)))?;
                let slab = taken.slab.map_or(0, |(offset, _)| offset);
                Ok(Outcome::Taken((memory, taken.rows, taken.layout, slab, taken.result)))
            }
            Err((Failure::Row { row, offset, len }, lent)) => {
                let memory = Bound::new(py, ItemMemory::new(self.block().clone(), Some(lent)))?;
                Ok(Outcome::Row(("row", memory, row, offset, len)))
            }
            Err((
                Failure::Memory {
                    wanted,
                    held,
                    most,
                    errno,
                },
                _lent,
            )) => Ok(Outcome::Memory(("memory", wanted, held, most, errno))),
        }
    }

    /// Cancels batches: workers make no more of their rows. The caller must still wait for the batches and take them.
    fn cancel(&self, batches: Vec<u64>) {
        self.consumer.cancel(batches);
    }

    /// The number of item workers that wait because they have nothing to do.
    fn idle(&self) -> usize {
        self.consumer.idle()
    }

    /// The number of rows of a batch that aren't finished.
    fn left(&self, batch: u64) -> u32 {
        self.consumer.left(batch)
    }

    /// Whether all workers have started.
    fn has_begun(&self) -> bool {
        self.block().has_begun()
    }

    /// Returns the error of the first worker that couldn't start, as memory, offset and length. None if no worker has
    /// failed to start.
    fn refusal<'py>(&self, py: Python<'py>) -> PyResult<Option<(Bound<'py, ItemMemory>, usize, usize)>> {
        let Some((offset, len)) = self.block().refusal() else {
            return Ok(None);
        };
        let memory = Bound::new(py, ItemMemory::new(self.block().clone(), None))?;
        Ok(Some((memory, offset, len)))
    }

    /// Stops all workers.
    fn stop(&self) {
        self.block().stop();
    }

    /// Returns the index and the description of the layout that new batches use. None before a layout is settled.
    fn layout<'py>(&self, py: Python<'py>) -> Option<(u32, Bound<'py, PyBytes>)> {
        let layout = self.block().layout()?;
        Some((layout, self.description(py, layout)?))
    }

    /// Returns the description of a layout.
    fn description<'py>(&self, py: Python<'py>, layout: u32) -> Option<Bound<'py, PyBytes>> {
        let (offset, len) = self.block().description(layout)?;
        let memory = ItemMemory::new(self.block().clone(), None);
        memory.copied(py, offset, len).ok()
    }

    /// Registers a layout that was learned earlier, unless a layout is already known.
    fn tell(&self, py: Python<'_>, description: &[u8]) -> PyResult<()> {
        let told = self.block().tell_of(description);
        told.map_err(|refused| no_memory(py, &refused))
    }

    /// Bytes of memory that is in use or kept for reuse.
    #[getter]
    fn held(&self) -> u64 {
        self.consumer.held()
    }

    /// Sets the maximum memory of batches in bytes.
    fn set_most(&self, most: u64) {
        self.block().arena().set_most(most);
    }

    /// Returns the state of each worker, item workers first.
    fn views<'py>(&self, py: Python<'py>) -> PyResult<Vec<Bound<'py, PyDict>>> {
        self.block().views().iter().map(|view| told(py, view)).collect()
    }
}

/// The object that locks the pages of batches.
struct Locks(Py<PyAny>);

impl PageLocks for Locks {
    fn unlock(&self, address: usize) -> bool {
        Python::attach(|py| {
            let unlocked = self.0.call_method1(py, intern!(py, "unlock"), (address,));
            unlocked
                .and_then(|unlocked| unlocked.extract(py))
                .unwrap_or_else(|error| {
                    error.write_unraisable(py, Some(self.0.bind(py)));
                    false
                })
        })
    }
}

impl Drop for Locks {
    fn drop(&mut self) {
        // At the end of the program, the system removes the locks.
        Python::try_attach(|py| {
            if let Err(error) = self.0.call_method0(py, intern!(py, "close")) {
                error.write_unraisable(py, Some(self.0.bind(py)));
            }
        });
    }
}

/// Creates shared memory with an address space of `space` bytes. A worker maps it in addition to the memory that it
/// inherits from this process. The checks ensure that both processes keep some address space (`ulimit -v`) for other
/// things.
fn for_processes(space: usize) -> std::io::Result<SharedMemory> {
    let memory = SharedMemory::create(space)?;
    #[cfg(target_os = "linux")]
    {
        let again = || {
            SharedMemory::open(
                memory
                    .file()
                    .ok_or(std::io::ErrorKind::Unsupported)?
                    .try_clone_to_owned()?,
            )
        };
        let _others = [again()?, again()?, again()?];
    }
    Ok(memory)
}

/// The result of `take`.
#[derive(IntoPyObject)]
enum Outcome<'py> {
    Taken(TakenBatch<'py>),
    Row((&'static str, Bound<'py, ItemMemory>, u32, usize, usize)),
    Memory((&'static str, u64, u64, u64, Option<i32>)),
}

impl ItemConsumer {
    pub(crate) fn block(&self) -> &ControlBlock {
        self.consumer.block()
    }

    /// Returns the size of a slab in bytes, and how many of these bytes the rows occupy.
    fn sizes(&self, layout: &ItemLayout, rows: usize) -> PyResult<(usize, usize)> {
        let end = layout.plan(rows)?.end;
        Ok((end.saturating_add(rows.saturating_mul(self.block().tail())), end))
    }
}

/// Returns the integers of a list. `None` if any element is of another class, including classes derived from int.
fn numbers(list: &Bound<'_, PyList>) -> Option<Vec<i64>> {
    let mut found = Vec::with_capacity(list.len());
    for item in list.iter() {
        found.push(item.cast_exact::<PyInt>().ok()?.extract().ok()?);
    }
    Some(found)
}

fn told<'py>(py: Python<'py>, view: &WorkerView) -> PyResult<Bound<'py, PyDict>> {
    let dict = PyDict::new(py);
    let activity = match view.activity {
        Activity::Starting => "starting",
        Activity::Waiting => "waiting",
        Activity::Making => "making",
        Activity::Joining => "joining",
        Activity::Ended => "ended",
    };
    let index = |index: i64| (index != i64::MIN).then_some(index);
    let seconds = |nanos: u64| nanos as f64 / 1e9;
    dict.set_item("activity", activity)?;
    dict.set_item("batch", view.batch)?;
    dict.set_item("row", view.row)?;
    dict.set_item("index", index(view.index))?;
    dict.set_item("for", seconds(view.for_nanos))?;
    dict.set_item("items", view.items)?;
    dict.set_item("making", seconds(view.making))?;
    dict.set_item("placing", seconds(view.placing))?;
    dict.set_item("joining", seconds(view.joining))?;
    dict.set_item("waiting", seconds(view.waiting))?;
    let slowest = view
        .slowest
        .iter()
        .map(|slow| (seconds(slow.nanos), index(slow.index), slow.batch, slow.row));
    dict.set_item("slowest", slowest.collect::<Vec<_>>())?;
    Ok(dict)
}
