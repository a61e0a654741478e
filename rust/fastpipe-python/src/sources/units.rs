//! Units that Python reads, as a dataset.

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

/// A placeholder reader of units, for code outside of passes.
struct Unread(UnitName);

impl ReadUnit for Unread {
    fn at_once(&self) -> usize {
        1
    }

    fn name(&self, unit: u64) -> String {
        (self.0)(unit)
    }

    fn read(&self, _slice: &Slice, _cancelled: &dyn Fn() -> bool) -> Answer {
        Err(Error::new(ErrorKind::Internal, "units can only be read in a pass"))
    }
}

/// Returns a function for the names of units. The name is the index of the unit if Python can't be called or fails.
fn named(name: Py<PyAny>) -> UnitName {
    Arc::new(move |unit| {
        let asked = Python::try_attach(|py| name.call1(py, (unit,))?.extract::<String>(py));
        match asked {
            Some(Ok(name)) => name,
            _ => unit.to_string(),
        }
    })
}

/// State for passes that read units through Python.
struct Reading {
    source: Arc<UnitsSource<Unread>>,
    name: UnitName,
    /// Starts threads that answer calls. It is called with a `UnitCalls` for each thread, and returns how many started.
    start: Py<PyAny>,
    at_once: usize,
    /// Only locked while holding the GIL, so that no other thread can hold it when a process forks.
    calls: Mutex<Option<Arc<fastpipe_columns::UnitCalls>>>,
}

impl Reading {
    /// Returns the source of a pass.
    fn begin(&self, py: Python<'_>) -> PyResult<PassSource> {
        let mut kept = self.calls.lock().unwrap_or_else(PoisonError::into_inner);
        let calls = match &*kept {
            Some(calls) if calls.are_ours() => calls.clone(),
            _ => kept.insert(fastpipe_columns::UnitCalls::new(self.at_once)).clone(),
        };
        drop(kept);
        let (lease, entries) = calls.enter();
        let missing = entries.len();
        if missing > 0 {
            // Ctrl-C may interrupt Python after a thread has started. The objects are dropped with their threads, or at
            // once without a thread.
            let queues: Vec<UnitCalls> = entries.into_iter().map(UnitCalls).collect();
            let started: usize = self.start.call1(py, (queues,))?.extract(py)?;
            if started == 0 && missing == self.at_once {
                return Err(PyRuntimeError::new_err("could not start a thread to read units"));
            }
        }
        let asking = UnitAsker::new(calls, self.name.clone());
        Ok(PassSource {
            source: Arc::new(self.source.with_reader(asking)),
            lease: Some(Arc::new(lease)),
        })
    }
}

/// Units that Python reads. A callable returns each unit as Arrow data.
#[pyclass(frozen, extends = Data, module = "fastpipe._fastpipe")]
pub(crate) struct UnitsDataset {
    source: Arc<UnitsSource<Unread>>,
    features: Vec<Feature>,
}

#[pymethods]
impl UnitsDataset {
    /// Creates units with a schema. `sizes` contains the rows of each unit, and the bytes of each unit if they are
    /// known. `calls` contains a function for the names of units, a function that starts threads to answer calls, and
    /// their maximum number. With `slice_bytes`, a unit of more than twice this size is read in slices. `dictionaries`
    /// maps the paths of dictionary columns to their categories.
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

    /// Returns the name, kind, shape, dtype, nulls and scale of each feature.
    fn features(&self) -> Vec<Described> {
        self.features.iter().map(describe).collect()
    }

    /// Returns the categories of each feature that consists of dictionary codes.
    fn categories(&self) -> Vec<(String, Vec<String>)> {
        listed(self.source.categories())
    }

    /// Returns the columns that are read from units.
    fn used(&self) -> Vec<String> {
        self.source.used().map(str::to_owned).collect()
    }

    /// Returns the unit to which row `record` of the engine's unit `unit` belongs, and the index of the row in it.
    fn row_of(&self, unit: u64, record: u64) -> (u64, u64) {
        let slice = self.source.slice(unit);
        (slice.unit, u64::from(slice.rows.start) + record)
    }

    /// Returns the estimated average size of a row in bytes.
    fn row_bytes(&self) -> u64 {
        self.source.row_bytes()
    }
}
