//! The order of a data set's rows, and passes in that order.

use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_datasets::window_rows;
use fastpipe_engine::{BatchSource, Origin, Stream, VALID, check_order, check_state, unplanned};
use fastpipe_memory::machine_memory;
use fastpipe_order::{BatchPlan, Cursor, Kind, PlanError, Settings, State, StateError, Uneven};
use fastpipe_service::request::Request;
use fastpipe_wire::RemoteBatches;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::{PyIndexError, PyValueError};
use pyo3::prelude::*;

use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;
use crate::passes::batch_feed::BatchFeed;
use crate::passes::pass::Pass;
use crate::passes::pass_options::PassOptions;
use crate::passes::progress::Progress;
use crate::sources::data::Data;

/// An order of the rows of a data set.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Order {
    data: Py<Data>,
    order: Arc<fastpipe_order::Order>,
    /// Looks batches up: keeps what it has found of the epoch. Only locked with the GIL.
    lookup: Mutex<Option<Cursor>>,
}

#[pymethods]
impl Order {
    /// The order of these settings, which are JSON; `rows` are the numbers of a sample's rows, if it isn't drawn.
    #[new]
    #[pyo3(signature = (data, settings, rows=None))]
    fn new(py: Python<'_>, data: Py<Data>, settings: &str, rows: Option<PyReadonlyArray1<'_, i64>>) -> PyResult<Self> {
        let units = data.get().units().py(py)?;
        let mut settings = read(settings)?;
        settings.shuffle_buffer = window_rows(&settings);
        // Samples are read as they stand.
        if matches!(settings.kind, Kind::Window | Kind::Block) {
            data.get().source().check_random().py(py)?;
        }
        if rows.is_some() && data.get().bringer().is_some() {
            let reason = "rows can't be had from servers by their numbers; take them where the data is, and serve that";
            return Err(Error::new(ErrorKind::Unsupported, reason)).py(py);
        }
        let rows = rows
            .map(|rows| taken(&rows.as_array().to_vec(), units.total()))
            .transpose()?;
        let order = py
            .detach(|| match rows {
                Some(rows) => fastpipe_order::Order::of_rows(&units, settings, rows),
                None => fastpipe_order::Order::new(&units, settings),
            })
            .map_err(unplanned)
            .py(py)?;
        if !order.is_fair() && settings.uneven != Uneven::Allow {
            return Err(PyValueError::new_err(format!(
                "some of the {} ranks have no batch of their own, since there are only {} units; \
                 shard_by=\"batch\" shares the batches out instead, uneven=\"allow\" lets ranks have none",
                settings.ranks,
                units.len()
            )));
        }
        if settings.uneven == Uneven::Pad && data.get().source().facts().columns.iter().any(|c| &*c.name == VALID) {
            return Err(PyValueError::new_err(format!(
                "uneven=\"pad\" marks rows in a column {VALID:?}, and that is the name of a feature"
            )));
        }
        Ok(Order {
            data,
            order: Arc::new(order),
            lookup: Mutex::default(),
        })
    }

    /// Rows of a window, pool, buffer or sample.
    #[getter]
    fn shuffle_buffer(&self) -> u64 {
        self.order.settings().shuffle_buffer
    }

    /// Rows of an epoch that are in no batch of any rank.
    #[getter]
    fn left_out(&self) -> u64 {
        self.order.left_out()
    }

    /// Rows of the rank that has fewest, where ranks have units of their own; else None.
    #[getter]
    fn own_rows(&self) -> Option<u64> {
        self.order.own_rows()
    }

    /// Rows of an epoch of all ranks, with those of a last batch that is left out. Where ranks have units of their own,
    /// this rank's.
    #[getter]
    fn num_rows(&self) -> u64 {
        self.order.epoch_rows()
    }

    /// The rows of an epoch's sample, counted over all units, as they stand; None if it is an order of all rows.
    fn sample<'py>(&self, py: Python<'py>, epoch: u64) -> PyResult<Option<Bound<'py, PyArray1<i64>>>> {
        let rows = py.detach(|| self.order.sample(epoch)).map_err(unplanned).py(py)?;
        let rows = rows.map(|rows| rows.into_iter().map(|row| row as i64).collect());
        Ok(rows.map(|rows: Vec<i64>| PyArray1::from_vec(py, rows)))
    }

    /// Batches that this rank gets in an epoch.
    #[getter]
    fn steps(&self) -> u64 {
        self.order.steps()
    }

    /// Starts a pass at the start of an epoch, or at a state (`progress`), up to but without the epoch `end_epoch`.
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

    /// Whether `start` can go on from a state; an exception says why not.
    fn check(&self, py: Python<'_>, progress: Progress) -> PyResult<()> {
        self.resumed(py, &progress.into(), None).map(drop)
    }

    /// A pass of the batches `start` to `stop` of an epoch, or of the rest of one after a state (`progress`), counted
    /// from there. Order and batches may take the memory limit together.
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
            .ok_or_else(|| PyValueError::new_err("there is no batch in an empty range"))?;
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
                        "{} batches are left of the epoch, there is no batch {last}",
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

    /// Unit and record of a row of a batch. Of the order, not of the batch, `memory_limit` is what it may take.
    #[pyo3(signature = (epoch, step, row, memory_limit=None))]
    fn locate(
        &self,
        py: Python<'_>,
        epoch: u64,
        step: u64,
        row: usize,
        memory_limit: Option<u64>,
    ) -> PyResult<(u64, u32)> {
        let plan = self.plan(py, epoch, step, memory_limit)?;
        plan.content.at(row).ok_or_else(|| {
            let reason = format!("batch {step} has {} rows, there is no row {row}", plan.rows);
            PyIndexError::new_err(reason)
        })
    }

    /// For each row of a batch its unit, and its record there.
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
        let reason = format!("an epoch has {steps} batches, there is no batch {step}");
        Err(PyIndexError::new_err(reason))
    }

    /// What stands in a batch. Looks for Ctrl-C while that takes long.
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
        // One that failed holds no memory any more, and need not be kept.
        *self.lookup.lock().unwrap_or_else(PoisonError::into_inner) = Some(cursor);
        let missing = || Error::new(ErrorKind::Internal, "the order has no such batch");
        plan.ok_or_else(missing).py(py)
    }

    /// A pass of `total` batches, if that is known, from the place of a cursor.
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
        let (begun, options) = (data.begin(py, csr)?, options.engine);
        let batches: Box<dyn BatchSource> = match data.bringer() {
            None => {
                let start = || Stream::start(begun.source.clone(), cursor, options, memory.clone());
                Box::new(py.detach(start).py(py)?)
            }
            Some(bringer) => {
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
                let feed = BatchFeed::new(request, begun.source.clone(), &memory, settings.batch_size);
                let batches = Box::new(RemoteBatches(feed.feed().clone()));
                bringer.call1(py, (feed, settings.to_json(), progress, csr))?;
                batches
            }
        };
        let padded = self.order.settings().uneven == Uneven::Pad;
        let origin = Origin {
            order: self.order.clone(),
            options,
            memory,
            totals,
        };
        Pass::new(py, batches, begun, padded, total, origin, state)
    }
}

/// The numbers of rows, which must ascend and be those of rows that there are.
fn taken(rows: &[i64], total: u64) -> PyResult<Vec<u64>> {
    let ascend = rows.is_sorted() && rows.first().is_none_or(|&first| first >= 0);
    if !ascend || rows.last().is_some_and(|&last| last as u64 >= total) {
        let reason = format!("rows are numbers below {total}, in ascending order");
        return Err(PyValueError::new_err(reason));
    }
    Ok(rows.iter().map(|&row| row as u64).collect())
}

fn read(settings: &str) -> PyResult<Settings> {
    Settings::from_json(settings).map_err(|error| PyValueError::new_err(error.to_string()))
}

/// Whether these are the settings of an order, as JSON; an exception says what is wrong.
#[pyfunction]
pub(crate) fn check_settings(settings: &str) -> PyResult<()> {
    read(settings).map(drop)
}
