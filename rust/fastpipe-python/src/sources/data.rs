//! The interface of datasets that orders and passes use, independent of the source.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Selected, Selection, Source, Union, UnitRange, partitions, try_collect};
use fastpipe_datasets::default_window;
use fastpipe_engine::{Memory, PassSource, unplanned};
use fastpipe_order::{Grouping, Mixture, Packing, PackingError, Units, UnitsError};
use fastpipe_wire::write_columns;
use numpy::{PyArray1, PyReadonlyArray1};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::arrays::arrow_schema::arrow_schema;
use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;

/// A dataset: units of rows. Each subclass implements one kind of source.
#[pyclass(frozen, subclass, module = "fastpipe._fastpipe")]
pub(crate) struct Data {
    source: Arc<dyn Source>,
    /// Creates the source of a pass, if each pass has its own.
    begin: Option<Begin>,
    /// Set if servers produce the batches.
    remote: Option<Remote>,
    /// The number of units before large units were split, or `None` if none was.
    uncut: Option<u64>,
    /// The rows of another dataset that this one consists of, or `None` if it is not a selection.
    selection: Option<Arc<Selection>>,
    /// The order of the rows and the source, if this is a mixture of other datasets.
    mixed: Option<Mixed>,
    /// The groups that are the rows of orders, or `None` if rows aren't grouped.
    packing: Option<Arc<Packing>>,
    /// The rows in the sequence of passes without shuffling, or `None` if it is the sequence of the units.
    sequence: Option<Arc<Vec<u64>>>,
    rows: OnceLock<Arc<Units>>,
    /// The sum over all units, of which there may be millions. Each state has it.
    num_rows: OnceLock<u64>,
    /// Shared by all passes. Only locked while holding the GIL, so that no other thread can hold it when a process
    /// forks.
    memory: Mutex<Option<Arc<Memory>>>,
}

/// A dataset whose batches servers produce.
pub(crate) struct Remote {
    /// Starts to receive the batches of a pass.
    pub(crate) start: Py<PyAny>,
    /// The number of rows in an epoch, if only servers can plan its batches.
    pub(crate) counted_rows: Option<u64>,
    /// Whether rows of orders are groups of rows.
    pub(crate) grouped: bool,
}

/// The parts of a mixture.
pub(crate) struct Mixed {
    pub(crate) mixture: Arc<Mixture>,
    pub(crate) union: Arc<Union>,
}

/// Creates the source of a pass.
pub(crate) type Begin = Box<dyn Fn(Python<'_>) -> PyResult<PassSource> + Send + Sync>;

impl Data {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Data {
            source,
            begin: None,
            remote: None,
            uncut: None,
            selection: None,
            mixed: None,
            packing: None,
            sequence: None,
            rows: OnceLock::new(),
            num_rows: OnceLock::new(),
            memory: Mutex::default(),
        }
    }

    /// Creates a dataset whose passes each have their own source. `uncut` is the number of units before large ones were
    /// split.
    pub(crate) fn with_passes(source: Arc<dyn Source>, begin: Begin, uncut: u64) -> Self {
        Data {
            begin: Some(begin),
            uncut: Some(uncut),
            ..Data::new(source)
        }
    }

    /// Creates a dataset whose batches servers produce.
    pub(crate) fn remote(source: Arc<dyn Source>, uncut: Option<u64>, remote: Remote) -> Self {
        Data {
            remote: Some(remote),
            uncut,
            ..Data::new(source)
        }
    }

    /// Creates the dataset of a mixture. `begin` creates the source of a pass, if each pass has its own.
    pub(crate) fn of_mixture(source: Arc<dyn Source>, begin: Option<Begin>, mixed: Mixed) -> Self {
        Data {
            begin,
            mixed: Some(mixed),
            ..Data::new(source)
        }
    }

    /// Returns the order of the rows, if this is a mixture.
    pub(crate) fn mixture(&self) -> Option<&Arc<Mixture>> {
        self.mixed.as_ref().map(|mixed| &mixed.mixture)
    }

    /// Returns the groups that are the rows of orders, if rows are grouped.
    pub(crate) fn packing(&self) -> Option<&Arc<Packing>> {
        self.packing.as_ref()
    }

    /// Checks that rows can be selected.
    fn check_selectable(&self) -> Result<(), Error> {
        let reason = if self.remote.is_some() {
            "servers do not support selections of rows: serve a reader of the selection instead"
        } else if self.packing.is_some() {
            "groups of rows can't be selected: select rows, and then group them"
        } else {
            return Ok(());
        };
        Err(Error::new(ErrorKind::Unsupported, reason))
    }

    fn mixed(&self) -> Result<&Mixed, Error> {
        let missing = || Error::new(ErrorKind::Internal, "a dataset is not a mixture");
        self.mixed.as_ref().ok_or_else(missing)
    }

    /// Whether each pass has its own source.
    pub(crate) fn begins(&self) -> bool {
        self.begin.is_some()
    }

    /// Returns how servers produce the batches, if they do.
    pub(crate) fn produced(&self) -> Option<&Remote> {
        self.remote.as_ref()
    }

    /// Returns the source of a new pass. `csr` selects the CSR layout for sparse columns.
    pub(crate) fn begin(&self, py: Python<'_>, csr: bool) -> PyResult<PassSource> {
        let whole = || PassSource {
            source: self.source.clone(),
            lease: None,
        };
        let mut begun = self.begin.as_ref().map_or_else(|| Ok(whole()), |begin| begin(py))?;
        if csr && let Some(source) = begun.source.in_csr().py(py)? {
            begun.source = source;
        }
        Ok(begun)
    }

    /// Returns the rows in the sequence of passes without shuffling, if it isn't the sequence of the units.
    pub(crate) fn sequence(&self) -> Option<&Arc<Vec<u64>>> {
        self.sequence.as_ref()
    }

    pub(crate) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// Returns the row counts of units, from which orders are built.
    pub(crate) fn units(&self) -> Result<Arc<Units>, Error> {
        if let Some(units) = self.rows.get() {
            return Ok(units.clone());
        }
        if let Some(packing) = &self.packing {
            return Ok(packing.sections().clone());
        }
        let units = Units::new(self.rows()).map_err(|error| match error {
            UnitsError::Plan(error) => unplanned(error),
            UnitsError::TooLong => Error::new(ErrorKind::Limit, error.to_string()),
        })?;
        Ok(self.rows.get_or_init(|| Arc::new(units)).clone())
    }

    /// Returns the memory of earlier passes, if this process created it.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        let mut kept = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(memory) if memory.is_ours() => memory.clone(),
            _ => kept.insert(Memory::new(&self.source.facts().columns)).clone(),
        }
    }

    /// Creates a dataset of a source that `derive` makes of the source of `whole`. If each pass over `whole` has its
    /// own source, `derive` is also applied to these.
    fn derived(
        whole: &Bound<'_, Self>,
        source: Arc<dyn Source>,
        derive: impl Fn(Arc<dyn Source>) -> Result<Arc<dyn Source>, Error> + Send + Sync + 'static,
    ) -> Self {
        let mut data = Data::new(source);
        if whole.get().begin.is_some() {
            let whole = whole.clone().unbind();
            data.begin = Some(Box::new(move |py| {
                let begun = whole.get().begin(py, false)?;
                Ok(PassSource {
                    source: derive(begun.source).py(py)?,
                    lease: begun.lease,
                })
            }));
        }
        data
    }

    /// Creates a dataset of the rows that `select` returns. `sequence` is their sequence without shuffling.
    fn selected(
        whole: &Bound<'_, Self>,
        sequence: Option<Vec<u64>>,
        select: impl FnOnce(&Data) -> Result<Selection, Error> + Send,
    ) -> PyResult<Py<Data>> {
        let (py, all) = (whole.py(), whole.get());
        all.check_selectable().py(py)?;
        let selection = Arc::new(py.detach(|| select(all)).py(py)?);
        let source = Selected::new(all.source.clone(), selection.clone()).py(py)?;
        let selected = selection.clone();
        let mut data = Data::derived(whole, Arc::new(source), move |source| {
            Ok(Arc::new(Selected::new(source, selected.clone())?))
        });
        // It has the units of the whole dataset.
        data.memory = Mutex::new(Some(all.memory()));
        data.uncut = all.uncut;
        data.selection = Some(selection);
        data.sequence = sequence.map(Arc::new);
        Py::new(py, data)
    }

    /// Returns the number of rows of each unit.
    fn rows(&self) -> impl Iterator<Item = u32> + Clone {
        (0..self.source.units()).map(|unit| self.source.describe(unit).rows)
    }
}

#[pymethods]
impl Data {
    /// Returns the default size of a window, pool or buffer in rows.
    fn default_buffer(&self, py: Python<'_>, batch_size: u64) -> PyResult<u64> {
        Ok(default_window(&*self.units().py(py)?, self.uncut, batch_size))
    }

    /// The number of rows of all units, or the number of their groups.
    #[getter]
    fn num_rows(&self) -> u64 {
        match &self.packing {
            Some(packing) => packing.sections().total(),
            None => *self.num_rows.get_or_init(|| self.rows().map(u64::from).sum()),
        }
    }

    /// Returns the schema of Arrow batches as a capsule. `padded` adds the column that marks valid rows.
    fn arrow_schema<'py>(
        &self,
        py: Python<'py>,
        padded: bool,
        metadata: HashMap<String, String>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        arrow_schema(py, &self.source.facts().columns, padded, metadata)
    }

    /// Returns the columns as text, for other processes. With `csr`, sparse columns have the CSR layout. None without
    /// sparse columns, or if the source doesn't support that layout.
    #[pyo3(signature = (*, csr=false))]
    fn columns_text(&self, csr: bool) -> Option<String> {
        if !csr {
            return Some(write_columns(&self.source.facts().columns));
        }
        let source = self.source.in_csr().ok().flatten()?;
        Some(write_columns(&source.facts().columns))
    }

    /// Returns why units can't be read in any order, or None if they can.
    fn in_sequence(&self) -> Option<String> {
        self.source.check_random().err().map(|error| error.reason().to_string())
    }

    /// The rows in the sequence of passes without shuffling, as indices over all units. None if it is the sequence of
    /// the units.
    #[getter]
    fn rows_in_sequence<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyArray1<u64>>>> {
        let rows = self
            .sequence()
            .map(|rows| try_collect(rows.iter().copied(), "the sequence of rows"));
        rows.transpose().py(py)?.map(|rows| array(py, rows)).transpose()
    }

    /// The sizes and modification times, in nanoseconds since 1970, that the files had when their units were found.
    /// Empty if the source doesn't record them.
    #[getter]
    fn stamps(&self) -> Vec<(u64, i128)> {
        let stamps = &self.source.facts().stamps;
        stamps.iter().map(|stamp| (stamp.size, stamp.modified)).collect()
    }

    /// The number of units before large units were split, or None if none was.
    #[getter]
    fn uncut(&self) -> Option<u64> {
        self.uncut
    }

    /// Divides the units into at most `count` ranges of about equal cost. Returns the start, end and number of rows of
    /// each.
    fn partitions(&self, py: Python<'_>, count: u64) -> Vec<(u64, u64, u64)> {
        py.detach(|| {
            let rows = |range: &Range<u64>| {
                range
                    .clone()
                    .map(|unit| u64::from(self.source.describe(unit).rows))
                    .sum()
            };
            let found = partitions(&*self.source, count.max(1));
            found
                .iter()
                .map(|range| (range.start, range.end, rows(range)))
                .collect()
        })
    }

    /// Returns the units `start` to `end - 1` as a dataset.
    fn partition(slf: &Bound<'_, Self>, start: u64, end: u64) -> PyResult<Py<Data>> {
        let (py, whole) = (slf.py(), slf.get());
        if whole.remote.is_some() {
            let reason = "servers do not support partitions of a dataset: serve a reader of the partition instead";
            return Err(Error::new(ErrorKind::Unsupported, reason)).py(py);
        }
        whole.check_selectable().py(py)?;
        let source: Arc<dyn Source> = Arc::new(UnitRange::new(whole.source.clone(), start..end));
        let (units, all) = (source.units(), whole.source.units().max(1));
        let mut data = Data::derived(slf, source, move |source| {
            Ok(Arc::new(UnitRange::new(source, start..end)))
        });
        data.uncut = whole.uncut.map(|uncut| (uncut * units).div_ceil(all));
        if let Some(sequence) = whole.sequence() {
            let before: u64 = whole.rows().take(start as usize).map(u64::from).sum();
            let rows = before..before + data.num_rows();
            let own = sequence.iter().filter(|row| rows.contains(row)).map(|row| row - before);
            data.sequence = Some(Arc::new(try_collect(own, "the sequence of rows").py(py)?));
        }
        Py::new(py, data)
    }

    /// Returns the selected rows as a dataset. `bits` has a bit for each row, the first in the lowest bit of the first
    /// byte.
    fn select(slf: &Bound<'_, Self>, bits: PyReadonlyArray1<'_, u8>) -> PyResult<Py<Data>> {
        let bits = bits.as_slice()?;
        Data::selected(slf, None, |whole| Selection::new(bits, whole.rows()))
    }

    /// Returns rows by index as a dataset. `rows` ascend, and may be repeated. `sequence` has the position of each row
    /// of a pass without shuffling among them, if they don't have the sequence of `rows`.
    #[pyo3(signature = (rows, sequence=None))]
    fn take(
        slf: &Bound<'_, Self>,
        rows: PyReadonlyArray1<'_, u64>,
        sequence: Option<PyReadonlyArray1<'_, u64>>,
    ) -> PyResult<Py<Data>> {
        let rows = rows.as_slice()?;
        let sequence = sequence.as_ref().map(|sequence| sequence.as_slice()).transpose()?;
        if sequence.is_some_and(|places| places.len() != rows.len() || places.iter().any(|&at| at >= rows.len() as u64))
        {
            return Err(PyValueError::new_err("the sequence has other rows"));
        }
        let sequence = sequence.map(|places| try_collect(places.iter().copied(), "the sequence of rows"));
        let sequence = sequence.transpose().py(slf.py())?;
        Data::selected(slf, sequence, |whole| Selection::of_rows(rows, whole.rows()))
    }

    /// Returns the rows in groups of at most `elements` elements as a dataset, whose rows are the groups. `lengths` has
    /// the number of elements of each row. Of a longer row, the first elements count; with `split`, the others are
    /// further pieces. With `most_rows`, a group has at most that many rows of similar lengths, and at most `elements`
    /// elements after padding. Rows are grouped within windows of at least `window` rows.
    #[pyo3(signature = (lengths, elements, window, *, split=false, most_rows=None))]
    fn grouped(
        slf: &Bound<'_, Self>,
        lengths: PyReadonlyArray1<'_, u32>,
        elements: u64,
        window: u32,
        split: bool,
        most_rows: Option<u32>,
    ) -> PyResult<Py<Data>> {
        let (py, all) = (slf.py(), slf.get());
        all.check_selectable().py(py)?;
        let lengths = try_collect(lengths.as_slice()?.iter().copied(), "the lengths of rows").py(py)?;
        let grouping = match most_rows {
            Some(rows) => Grouping::Alike { rows, elements },
            None => Grouping::Pack {
                capacity: u32::try_from(elements).unwrap_or(u32::MAX),
                split,
            },
        };
        let (units, mut interrupt) = (all.units().py(py)?, None);
        let mut stop = || {
            interrupt = Python::attach(|py| py.check_signals()).err();
            interrupt.is_some()
        };
        let packing = py.detach(|| Packing::new(&units, lengths, grouping, window, &mut stop));
        if let Some(interrupt) = interrupt {
            return Err(interrupt);
        }
        let packing = packing.map_err(|error| match error {
            PackingError::Plan(error) => unplanned(error),
            PackingError::TooLong => Error::new(ErrorKind::Limit, error.to_string()),
            PackingError::Lengths => Error::new(ErrorKind::Internal, error.to_string()),
        });
        let mut data = Data::derived(slf, all.source.clone(), Ok);
        data.memory = Mutex::new(Some(all.memory()));
        data.packing = Some(Arc::new(packing.py(py)?));
        Py::new(py, data)
    }

    /// The number of rows, or of pieces of rows, of all groups. None if rows aren't grouped.
    #[getter]
    fn grouped_rows(&self) -> Option<u64> {
        self.packing.as_ref().map(|packing| packing.items())
    }

    /// Returns the record of the whole dataset's unit that a record of a selection is.
    fn selected_record(&self, py: Python<'_>, unit: u64, record: u32) -> PyResult<u32> {
        let Some(selection) = &self.selection else {
            return Ok(record);
        };
        let found = selection.record(unit, record).ok_or_else(|| {
            let reason = format!("record {record} of unit {unit} is not selected");
            Error::new(ErrorKind::Internal, reason)
        });
        found.py(py)
    }

    /// Returns the reader of a mixture from which a unit comes, and the unit's index in the reader's dataset.
    fn mixed_unit(&self, py: Python<'_>, unit: u64) -> PyResult<(usize, u64)> {
        let (member, _, own) = self.mixed().py(py)?.union.find(unit);
        Ok((member, own))
    }

    /// Returns the number of rows that an epoch of a mixture has from each reader.
    fn mixed_rows(&self, py: Python<'_>) -> PyResult<Vec<u64>> {
        self.mixed().py(py)?.mixture.counts().map_err(unplanned).py(py)
    }

    /// Returns the number of rows of each unit of an order. These are groups if rows are grouped.
    fn order_units<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        let units = self.units().py(py)?;
        let rows = (0..units.len()).map(|unit| units.rows(unit));
        array(py, try_collect(rows, "the rows of each unit").py(py)?)
    }

    /// Returns the number of rows of each unit.
    fn unit_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        array(py, try_collect(self.rows(), "the rows of each unit").py(py)?)
    }
}
