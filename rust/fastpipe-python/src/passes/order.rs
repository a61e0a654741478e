//! The order of a dataset's rows, and passes in that order.

use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_datasets::window_rows;
use fastpipe_engine::{BatchSource, Origin, Stream, Tolerant, VALID, check_order, check_state, unplanned};
use fastpipe_memory::machine_memory;
use fastpipe_order::{BatchPlan, Cursor, Kind, PlanError, Settings, State, StateError, Uneven};
use fastpipe_service::request::Request;
use fastpipe_wire::RemoteBatches;
use numpy::PyArray1;
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;
use crate::passes::batch_feed::BatchFeed;
use crate::passes::lost_units::LostUnits;
use crate::passes::pass::Pass;
use crate::passes::pass_options::PassOptions;
use crate::passes::progress::Progress;
use crate::sources::data::Data;

/// An order of the rows of a dataset.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Order {
    data: Py<Data>,
    order: Arc<fastpipe_order::Order>,
    /// The cursor of the last lookup, which keeps what it computed for the epoch. Only locked while holding the GIL.
    lookup: Mutex<Option<Cursor>>,
}

#[pymethods]
impl Order {
    /// Creates the order described by `settings`, which is JSON. Sequential order is the sequence of the dataset.
    #[new]
    fn new(py: Python<'_>, data: Py<Data>, settings: &str) -> PyResult<Self> {
        let units = data.get().units().py(py)?;
        let mut settings = read(settings)?;
        settings.shuffle_buffer = window_rows(&settings);
        let sequence = data.get().sequence().filter(|_| settings.kind == Kind::Sequential);
        // Samples are read in storage order.
        if matches!(settings.kind, Kind::Window | Kind::Block) || sequence.is_some() {
            data.get().source().check_random().py(py)?;
        }
        let (mixture, packing) = (data.get().mixture().cloned(), data.get().packing());
        if packing.is_some() {
            // Groups take rows of several units, in any sequence.
            data.get().source().check_random().py(py)?;
        }
        let counted_rows = data.get().produced().and_then(|remote| remote.counted_rows);
        if mixture.is_some() != (settings.kind == Kind::Mixture) && counted_rows.is_none() {
            let reason = "a mixture has the order of its readers: choose the order of these, and mix them again";
            return Err(Error::new(ErrorKind::Unsupported, reason)).py(py);
        }
        let order = py
            .detach(|| match (mixture, counted_rows, packing, sequence) {
                (Some(mixture), ..) => fastpipe_order::Order::of_mixture(&units, settings, mixture),
                (_, Some(rows), ..) => fastpipe_order::Order::of_count(&units, settings, rows),
                (_, _, Some(packing), _) => fastpipe_order::Order::of_packing(packing, settings),
                (_, _, _, Some(rows)) => fastpipe_order::Order::of_rows(&units, settings, rows.clone()),
                _ => fastpipe_order::Order::new(&units, settings),
            })
            .map_err(unplanned)
            .py(py)?;
        let settings = order.settings();
        if !order.is_fair() && settings.on_uneven != Uneven::Allow {
            return Err(PyValueError::new_err(format!(
                "some of the {} ranks would have no batches, since there are only {} units: \
                 set shard_by=\"batch\" to distribute batches, or on_uneven=\"allow\" to allow ranks without batches",
                settings.ranks,
                units.len()
            )));
        }
        if settings.on_uneven == Uneven::Pad && data.get().source().facts().columns.iter().any(|c| &*c.name == VALID) {
            return Err(PyValueError::new_err(format!(
                "on_uneven=\"pad\" adds a column {VALID:?}, but a feature already has that name: rename the feature"
            )));
        }
        Ok(Order {
            data,
            order: Arc::new(order),
            lookup: Mutex::default(),
        })
    }

    /// The settings of the order as JSON, like those it was created with.
    #[getter]
    fn text(&self) -> String {
        self.order.settings().to_json()
    }

    /// The size of a window, pool, buffer or sample, in rows.
    #[getter]
    fn shuffle_buffer(&self) -> u64 {
        self.order.settings().shuffle_buffer
    }

    /// The number of rows of an epoch that no batch of any rank contains.
    #[getter]
    fn left_out(&self) -> u64 {
        self.order.left_out()
    }

    /// The number of rows of the rank with the fewest rows if each rank has its own units; otherwise None.
    #[getter]
    fn own_rows(&self) -> Option<u64> {
        self.order.own_rows()
    }

    /// The number of rows in an epoch over all ranks, including a last batch that is left out. If each rank has its own
    /// units, only the rows of this rank are counted.
    #[getter]
    fn num_rows(&self) -> u64 {
        self.order.epoch_rows()
    }

    /// Returns the rows of an epoch's sample in storage order, as indices over all units. None for an order of all
    /// rows.
    fn sample<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        check_order(&self.order, None, false).py(py)?;
        let rows = py.detach(|| self.order.sample(epoch)).map_err(unplanned).py(py)?;
        let rows = rows.map(|rows| rows.into_iter().map(|row| row as i64).collect());
        Ok(rows.map(|rows: Vec<i64>| PyArray1::from_vec(py, rows)))
    }

    /// The number of batches that this rank gets in an epoch.
    #[getter]
    fn steps(&self) -> u64 {
        self.order.steps()
    }

    /// Returns the step, among all steps of an epoch, of the batch with this index among the batches of this rank.
    fn step_at(&self, index: u64) -> u64 {
        self.order.left_out_steps().step(index)
    }

    /// Starts a pass at the start of an epoch or at a state (`progress`). The pass ends before the epoch `end_epoch`.
    #[pyo3(signature = (options, epoch, end_epoch=None, progress=None))]
    fn start(
        &self,
        py: Python<'_>,
        mut options: PassOptions,
        epoch: u64,
        end_epoch: Option<u64>,
        progress: Option<Progress>,
    ) -> PyResult<Pass> {
        let mut cursor = match progress {
            None => self.order.epoch(epoch).map_err(unplanned).py(py)?,
            Some(progress) => self.resumed(py, &progress.into(), options.engine.memory_limit)?,
        };
        let state = py.detach(|| cursor.state()).map_err(unplanned).py(py)?;
        options.engine.end_epoch = end_epoch;
        let total = end_epoch.map(|end| match end.checked_sub(cursor.current_epoch()) {
            None | Some(0) => 0,
            Some(epochs) => cursor.left() + (epochs - 1).saturating_mul(self.order.steps()),
        });
        self.pass(py, cursor, &options, total, state)
    }

    /// Checks whether `start` can resume from a state. Raises an exception that gives the reason if it can't.
    fn check(&self, py: Python<'_>, progress: Progress) -> PyResult<()> {
        self.resumed(py, &progress.into(), None).map(drop)
    }

    /// Returns a pass over the batches `start` to `stop - 1` of an epoch, or of the rest of an epoch after a state
    /// (`progress`), counted from there. The memory limit applies to the order and the batches together.
    #[pyo3(signature = (options, epoch, start, stop, progress=None))]
    fn batches(
        &self,
        py: Python<'_>,
        mut options: PassOptions,
        epoch: u64,
        start: u64,
        stop: u64,
        progress: Option<Progress>,
    ) -> PyResult<Pass> {
        let half = || machine_memory().filter(|_| options.bounded).map(|bytes| bytes / 2);
        let memory_limit = options.engine.memory_limit.or_else(half);
        let last = stop
            .checked_sub(1)
            .filter(|&last| last >= start)
            .ok_or_else(|| PyValueError::new_err("the range of batches is empty"))?;
        self.check_step(last)?;
        let cursor = match progress {
            None => {
                check_order(&self.order, memory_limit, start > 0).py(py)?;
                let mut cursor = self.order.epoch(epoch).map_err(unplanned).py(py)?;
                py.detach(|| cursor.seek(start)).map_err(unplanned).py(py)?;
                cursor
            }
            Some(progress) => {
                let mut cursor = self.resumed(py, &progress.into(), memory_limit)?;
                if last >= cursor.left() {
                    let reason = format!(
                        "batch {last} does not exist: {} batches of the epoch are left",
                        cursor.left()
                    );
                    return Err(PyIndexError::new_err(reason));
                }
                cursor.pass_over(start);
                cursor
            }
        };
        let number = stop - start;
        options.engine.memory_limit = memory_limit.filter(|_| options.bounded || number > 1);
        options.engine.limit = Some(number);
        self.pass(py, cursor, &options, Some(number), State::default())
    }

    /// Whether rows of the order are groups of rows.
    #[getter]
    fn is_grouped(&self) -> bool {
        self.order.rows_per_group().is_some()
    }

    /// Returns the unit and the record of a row of a batch, or of each row of a group. `memory_limit` limits the memory
    /// of the order, not of the batch.
    #[pyo3(signature = (epoch, step, row, memory_limit=None))]
    fn locate(
        &self,
        py: Python<'_>,
        epoch: u64,
        step: u64,
        row: usize,
        memory_limit: Option<u64>,
    ) -> PyResult<Vec<(u64, u32)>> {
        let plan = self.plan(py, epoch, step, memory_limit)?;
        let sizes = &plan.groups.sizes;
        let (rows, slots) = match sizes.get(row) {
            _ if sizes.is_empty() => (plan.rows as usize, row..row.saturating_add(1)),
            size => {
                let start: u32 = sizes.iter().take(row).sum();
                (
                    sizes.len(),
                    start as usize..(start + size.copied().unwrap_or(0)) as usize,
                )
            }
        };
        if row >= rows {
            let reason = format!("row {row} does not exist: batch {step} has {rows} rows");
            return Err(PyIndexError::new_err(reason));
        }
        Ok(slots.filter_map(|slot| plan.content.at(slot)).collect())
    }

    /// Returns the index of a batch of this rank among the batches of all ranks in an epoch.
    fn index(&self, step: u64) -> PyResult<u64> {
        self.check_step(step)?;
        Ok(self.order.index(step))
    }

    /// Returns two arrays with the unit of each row of a batch and its record in the unit.
    #[allow(clippy::type_complexity)] // Two arrays.
    fn rows<'py>(
        &self,
        py: Python<'py>,
        epoch: u64,
        step: u64,
    ) -> PyResult<(Bound<'py, PyArray1<u64>>, Bound<'py, PyArray1<u32>>)> {
        let plan = self.plan(py, epoch, step, None)?;
        let (mut units, mut records) = (Vec::new(), Vec::new());
        let rows = plan.rows as usize;
        let refused = |_| PlanError::OutOfMemory {
            bytes: rows.saturating_mul(size_of::<(u64, u32)>()),
        };
        let room = units
            .try_reserve_exact(rows)
            .and_then(|()| records.try_reserve_exact(rows));
        room.map_err(refused).map_err(unplanned).py(py)?;
        for (unit, record) in (0..rows).filter_map(|slot| plan.content.at(slot)) {
            units.push(unit);
            records.push(record);
        }
        Ok((array(py, units)?, array(py, records)?))
    }
}

impl Order {
    /// Returns the order without its dataset.
    pub(crate) fn planned(&self) -> &Arc<fastpipe_order::Order> {
        &self.order
    }

    /// Returns the dataset whose rows are ordered.
    pub(crate) fn data(&self) -> &Py<Data> {
        &self.data
    }

    fn resumed(&self, py: Python<'_>, state: &State, memory_limit: Option<u64>) -> PyResult<Cursor> {
        check_state(&self.order, state, memory_limit).py(py)?;
        match py.detach(|| self.order.resume(state)) {
            Err(StateError::Plan(error)) => Err(unplanned(error)).py(py),
            resumed => resumed.map_err(|e| PyValueError::new_err(e.to_string())),
        }
    }

    fn check_step(&self, step: u64) -> PyResult<()> {
        let steps = self.order.steps();
        if step < steps {
            return Ok(());
        }
        let reason = format!("batch {step} does not exist: an epoch has {steps} batches");
        Err(PyIndexError::new_err(reason))
    }

    /// Returns the contents of a batch. Checks for Ctrl-C during long computations.
    fn plan(&self, py: Python<'_>, epoch: u64, step: u64, memory_limit: Option<u64>) -> PyResult<BatchPlan> {
        self.check_step(step)?;
        check_order(&self.order, memory_limit, step > 0).py(py)?;
        let kept = self.lookup.lock().unwrap_or_else(PoisonError::into_inner).take();
        let mut cursor = match kept {
            Some(cursor) if cursor.current_epoch() == epoch => cursor,
            _ => self.order.epoch(epoch).map_err(unplanned).py(py)?,
        };
        let mut interrupt = None;
        let mut stop = || {
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_some()
        };
        let plan = py.detach(|| {
            cursor.seek(step)?;
            cursor.next_unless(&mut stop).transpose()
        });
        if let Some(interrupt) = interrupt {
            return Err(interrupt);
        }
        let plan = plan.map_err(unplanned).py(py)?;
        // A cursor that failed has released its memory and is not kept.
        *self.lookup.lock().unwrap_or_else(PoisonError::into_inner) = Some(cursor);
        let missing = || Error::new(ErrorKind::Internal, "the order does not contain this batch");
        plan.ok_or_else(missing).py(py)
    }

    /// Returns a pass from the position of a cursor. `total` is its number of batches, if it has an end.
    fn pass(
        &self,
        py: Python<'_>,
        mut cursor: Cursor,
        options: &PassOptions,
        total: Option<u64>,
        state: State,
    ) -> PyResult<Pass> {
        let (data, csr) = (self.data.get(), options.csr);
        let memory = match &options.memory {
            Some(memory) => memory.get().of(py, data.source())?,
            None => data.memory(),
        };
        let totals = options.totals.as_ref().map(|totals| totals.get().counted.clone());
        let (begun, counted, options) = (data.begin(py, csr)?, options.lost.as_ref(), options.engine);
        let (mut lost, mut fills) = (None, false);
        let batches: Box<dyn BatchSource> = match data.produced() {
            None => {
                let mut source = begun.source.clone();
                if let Some(counted) = counted {
                    let known: Vec<u64> = counted.call_method0(py, "whole_units")?.extract(py)?;
                    fills = counted.getattr(py, "fills")?.extract(py)?;
                    let tolerant = Tolerant::new(source, known, fills);
                    source = Arc::new(tolerant.clone());
                    lost = Some(LostUnits::new(tolerant, counted.clone_ref(py)));
                }
                let start = || Stream::start(source, cursor, options, memory.clone());
                Box::new(py.detach(start).py(py)?)
            }
            Some(remote) => {
                let plain = cursor.is_plain();
                let progress = match plain {
                    true => None,
                    false => Some(Progress::from(&py.detach(|| cursor.state()).map_err(unplanned).py(py)?)),
                };
                let settings = self.order.settings();
                let request = Request {
                    epoch: cursor.current_epoch(),
                    step: if plain { cursor.taken() } else { 0 },
                    left: cursor.left(),
                    steps: self.order.steps(),
                    total: total.or(options.limit),
                    group: 1,
                    prefetch: options.prefetch.map(|prefetch| prefetch as u64),
                    memory_limit: options.memory_limit,
                    ticket: String::new(),
                    progress: None,
                };
                let (source, most_rows) = (begun.source.clone(), settings.batch_size);
                let feed = BatchFeed::new(request, source, &memory, most_rows, remote.grouped);
                let batches = Box::new(RemoteBatches(feed.feed().clone()));
                remote.start.call1(py, (feed, settings.to_json(), progress, csr))?;
                batches
            }
        };
        let padded = fills || self.order.settings().on_uneven == Uneven::Pad;
        let origin = Origin {
            order: self.order.clone(),
            options,
            memory,
            totals,
        };
        Ok(Pass::new(py, batches, begun, padded, total, origin, state)?.with_lost(lost))
    }
}

fn read(settings: &str) -> PyResult<Settings> {
    Settings::from_json(settings).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Checks the settings of an order, given as JSON. Raises an exception that says what is wrong with them.
#[pyfunction]
pub(crate) fn check_settings(settings: &str) -> PyResult<()> {
    read(settings).map(drop)
}
