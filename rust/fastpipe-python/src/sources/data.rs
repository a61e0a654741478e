//! What orders and passes need of a data set, whatever its source.

use std::collections::HashMap;
use std::ops::Range;
use std::sync::{Arc, Mutex, OnceLock, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Source, UnitRange, partitions, try_collect};
use fastpipe_datasets::default_window;
use fastpipe_engine::{Memory, PassSource, unplanned};
use fastpipe_order::{Units, UnitsError};
use fastpipe_wire::write_columns;
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::types::PyCapsule;

use crate::arrays::arrow_schema::arrow_schema;
use crate::arrays::batch_arrays::array;
use crate::errors::IntoPy;

/// A data set: units of rows. Its subclasses know what they are units of.
#[pyclass(frozen, subclass, module = "fastpipe._fastpipe")]
pub(crate) struct Data {
    source: Arc<dyn Source>,
    /// Makes the source of a pass, where each pass has its own.
    begin: Option<Begin>,
    /// Has the batches of a pass brought, where others make them.
    remote: Option<Py<PyAny>>,
    /// Units before large ones were cut; `None` if none was.
    uncut: Option<u64>,
    rows: OnceLock<Arc<Units>>,
    /// Shared by all passes. Only locked with the GIL, so that no other thread can hold it when a process forks.
    memory: Mutex<Option<Arc<Memory>>>,
}

/// Makes the source of a pass.
pub(crate) type Begin = Box<dyn Fn(Python<'_>) -> PyResult<PassSource> + Send + Sync>;

impl Data {
    pub(crate) fn new(source: Arc<dyn Source>) -> Self {
        Data {
            source,
            begin: None,
            remote: None,
            uncut: None,
            rows: OnceLock::new(),
            memory: Mutex::default(),
        }
    }

    /// Of a source whose passes have their own, and of which large units may have been cut.
    pub(crate) fn with_passes(source: Arc<dyn Source>, begin: Begin, uncut: u64) -> Self {
        Data {
            begin: Some(begin),
            uncut: Some(uncut),
            ..Data::new(source)
        }
    }

    /// Of batches that others make, which `start` has brought.
    pub(crate) fn remote(source: Arc<dyn Source>, uncut: Option<u64>, start: Py<PyAny>) -> Self {
        Data {
            remote: Some(start),
            uncut,
            ..Data::new(source)
        }
    }

    /// What has the batches of a pass brought, where others make them.
    pub(crate) fn bringer(&self) -> Option<&Py<PyAny>> {
        self.remote.as_ref()
    }

    /// The source of a new pass; with `csr` its sparse columns are in that layout.
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

    pub(crate) fn source(&self) -> &Arc<dyn Source> {
        &self.source
    }

    /// The numbers of rows that orders are made from.
    pub(crate) fn units(&self) -> Result<Arc<Units>, Error> {
        if let Some(units) = self.rows.get() {
            return Ok(units.clone());
        }
        let units = Units::new(self.rows()).map_err(|error| match error {
            UnitsError::Plan(error) => unplanned(error),
            UnitsError::TooLong => Error::new(ErrorKind::Limit, error.to_string()),
        })?;
        Ok(self.rows.get_or_init(|| Arc::new(units)).clone())
    }

    /// The memory of passes before, if this process made it.
    pub(crate) fn memory(&self) -> Arc<Memory> {
        let mut kept = self.memory.lock().unwrap_or_else(PoisonError::into_inner);
        match &*kept {
            Some(memory) if memory.is_ours() => memory.clone(),
            _ => kept.insert(Memory::new(&self.source.facts().columns)).clone(),
        }
    }

    /// Rows of each unit.
    fn rows(&self) -> impl Iterator<Item = u32> {
        (0..self.source.units()).map(|unit| self.source.describe(unit).rows)
    }
}

#[pymethods]
impl Data {
    /// Rows of a window, a pool or a buffer of no given size.
    fn default_buffer(&self, py: Python<'_>, batch_size: u64) -> PyResult<u64> {
        Ok(default_window(&*self.units().py(py)?, self.uncut, batch_size))
    }

    /// Rows of all units.
    #[getter]
    fn num_rows(&self) -> u64 {
        self.rows().map(u64::from).sum()
    }

    /// The schema of Arrow batches, as a capsule; `padded` if they say which of their rows are valid.
    fn arrow_schema<'py>(
        &self,
        py: Python<'py>,
        padded: bool,
        metadata: HashMap<String, String>,
    ) -> PyResult<Bound<'py, PyCapsule>> {
        arrow_schema(py, &self.source.facts().columns, padded, metadata)
    }

    /// Its columns as text, for others; with `csr` sparse columns in that layout, None if there are none or the source
    /// has no such layout.
    #[pyo3(signature = (*, csr=false))]
    fn columns_text(&self, csr: bool) -> Option<String> {
        if !csr {
            return Some(write_columns(&self.source.facts().columns));
        }
        let source = self.source.in_csr().ok().flatten()?;
        Some(write_columns(&source.facts().columns))
    }

    /// Why its units can't be read in any order; None if they can.
    fn in_sequence(&self) -> Option<String> {
        self.source.check_random().err().map(|error| error.reason().to_string())
    }

    /// Units before large ones were cut; None if none was.
    #[getter]
    fn uncut(&self) -> Option<u64> {
        self.uncut
    }

    /// Where stretches of units that cost about the same begin and end, at most `count`, with the rows of each.
    fn stretches(&self, py: Python<'_>, count: u64) -> Vec<(u64, u64, u64)> {
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

    /// The units from one up to another as a data set.
    fn stretch(slf: &Bound<'_, Self>, start: u64, end: u64) -> PyResult<Py<Data>> {
        let (py, whole) = (slf.py(), slf.get());
        if whole.remote.is_some() {
            let reason = "batches that others make can't be had of a part of their data; let them serve a reader of it";
            return Err(Error::new(ErrorKind::Unsupported, reason)).py(py);
        }
        let source: Arc<dyn Source> = Arc::new(UnitRange::new(whole.source.clone(), start..end));
        let (units, all) = (source.units(), whole.source.units().max(1));
        let mut data = Data::new(source);
        data.uncut = whole.uncut.map(|uncut| (uncut * units).div_ceil(all));
        if whole.begin.is_some() {
            let whole = slf.clone().unbind();
            data.begin = Some(Box::new(move |py| {
                let begun = whole.get().begin(py, false)?;
                Ok(PassSource {
                    source: Arc::new(UnitRange::new(begun.source, start..end)),
                    lease: begun.lease,
                })
            }));
        }
        Py::new(py, data)
    }

    /// Rows of each unit.
    fn unit_rows<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyArray1<u32>>> {
        array(py, try_collect(self.rows(), "the rows of each unit").py(py)?)
    }
}
