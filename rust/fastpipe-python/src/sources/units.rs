//! Units that Python reads as a data set.

use std::collections::HashMap;
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Feature};
use fastpipe_columns::{Answer, ReadUnit, Slice, UnitAsker, UnitName, UnitsSource, infer_all, with_forms};
use fastpipe_engine::PassSource;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::arrays::arrow_import::import_schema;
use crate::errors::{IntoPy, guarded};
use crate::sources::data::Data;
use crate::sources::unit_calls::UnitCalls;
use crate::specs::features::{Described, describe, listed};
use crate::specs::wanted::Wanted;

/// Stands where no pass reads.
struct Unread(UnitName);

impl ReadUnit for Unread {
    fn at_once(&self) -> usize {
        1
    }

    fn name(&self, unit: u64) -> String {
        (self.0)(unit)
    }

    fn read(&self, _slice: &Slice, _cancelled: &dyn Fn() -> bool) -> Answer {
        Err(Error::new(ErrorKind::Internal, "units are read by passes"))
    }
}

/// What a source calls a unit; its number if it can't be asked, or doesn't say.
fn named(name: Py<PyAny>) -> UnitName {
    Arc::new(move |unit| {
        let asked = Python::try_attach(|py| name.call1(py, (unit,))?.extract::<String>(py));
        match asked {
            Some(Ok(name)) => name,
            _ => unit.to_string(),
        }
    })
}

/// What passes need of Python.
struct Reading {
    source: Arc<UnitsSource<Unread>>,
    name: UnitName,
    /// Starts threads that answer: is called with a `UnitCalls` and their number, and returns how many there are.
    start: Py<PyAny>,
    at_once: usize,
    /// Only locked with the GIL, so that no other thread can hold it when a process forks.
    calls: Mutex<Option<Arc<fastpipe_columns::UnitCalls>>>,
}

impl Reading {
    /// The source of a pass.
    fn begin(&self, py: Python<'_>) -> PyResult<PassSource> {
        let mut kept = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = match &*kept {
            Some(calls) if calls.are_ours() => calls.clone(),
            _ => kept.insert(fastpipe_columns::UnitCalls::new(self.at_once)).clone(),
        };
        drop(kept);
        let (lease, missing) = calls.enter();
        if missing > 0 {
            let started = self
                .start
                .call1(py, (UnitCalls(calls.clone()), missing))
                .and_then(|started| started.extract::<usize>(py));
            let started = started.inspect_err(|_| calls.without(missing))?;
            calls.without(missing - started.min(missing));
            if started == 0 && missing == self.at_once {
                return Err(PyRuntimeError::new_err("no thread could be started that reads units"));
            }
        }
        let asking = UnitAsker::new(calls, self.name.clone());
        Ok(PassSource {
            source: Arc::new(self.source.with_reader(asking)),
            lease: Some(Arc::new(lease)),
        })
    }
}

/// Units that Python reads: whatever a callable returns that is Arrow.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct UnitsDataset {
    source: Arc<UnitsSource<Unread>>,
    features: Vec<Feature>,
}

#[pymethods]
impl UnitsDataset {
    /// Units of a schema. `sizes` are the rows of each, and the bytes of each if they are known. `calls` are what a
    /// unit is called, how threads are started that answer calls, and how many of them at most. With `slice_bytes`, a
    /// unit that takes more than twice as much is read a slice at a time. `dictionaries` says what codes of
    /// dictionaries stand for, by the paths of their columns.
    #[new]
    fn new(
        py: Python<'_>,
        schema: &Bound<'_, PyAny>,
        wanted: Wanted,
        sizes: (Vec<u32>, Option<Vec<u64>>),
        calls: (Py<PyAny>, Py<PyAny>, usize),
        slice_bytes: Option<u64>,
        dictionaries: HashMap<String, Vec<String>>,
    ) -> PyResult<PyClassInitializer<Self>> {
        let schema = guarded(py, || import_schema(schema))?;
        let features = match wanted {
            Wanted::Features(features) => with_forms(&schema, &features),
            Wanted::Columns(columns) => infer_all(&schema, columns.as_deref()),
        };
        let features = features.py(py)?;
        let ((rows, bytes), (name, start, at_once)) = (sizes, calls);
        let name = named(name);
        let unread = Unread(name.clone());
        let source = UnitsSource::new(&schema, &features, rows, bytes, slice_bytes, &dictionaries, unread).py(py)?;
        let source = Arc::new(source);
        let reading = Reading {
            source: source.clone(),
            name,
            start,
            at_once: at_once.max(1),
            calls: Mutex::default(),
        };
        let dataset = UnitsDataset {
            source: source.clone(),
            features,
        };
        let uncut = source.uncut();
        let data = Data::with_passes(source, Box::new(move |py| reading.begin(py)), uncut);
        Ok(PyClassInitializer::from(data).add_subclass(dataset))
    }

    /// Name, kind, shape, dtype and nulls of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// For each feature that is codes of a dictionary, what they stand for.
    fn symbols(&self) -> Vec<(String, Vec<String>)> {
        listed(self.source.symbols())
    }

    /// The columns that units are read for.
    fn used(&self) -> Vec<String> {
        self.source.used().map(str::to_owned).collect()
    }

    /// The unit that row `record` of the engine's unit `unit` is of, and its row there.
    fn row_of(&self, unit: u64, record: u64) -> (u64, u64) {
        let slice = self.source.slice(unit);
        (slice.unit, u64::from(slice.rows.start) + record)
    }

    /// Bytes that rows are taken to have, one with another.
    fn row_bytes(&self) -> u64 {
        self.source.row_bytes()
    }
}
