//! A sample of the rows of a CSV stream, drawn as they come.

use std::ffi::OsString;
use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, Result, path_text, try_collect, try_filled, try_reserve};
use fastpipe_csv::{CsvFile, CsvSource, Dialect, Header, Keep, KeptRows, RowStream};
use fastpipe_order::{Key, Reservoir};
use numpy::PyArray1;
use pyo3::prelude::*;
use pyo3::pybacked::PyBackedBytes;

use crate::arrays::array;
use crate::csv::{CsvDataset, LoweredDialect, dialect};
use crate::errors::IntoPy;
use crate::features::Lowered;
use crate::lookups::{Lookups, lifted};

/// A row that is kept.
struct Row {
    number: u64,
    offset: u64,
    text: Box<[u8]>,
}

/// The rows that are kept so far.
struct Kept {
    reservoir: Reservoir,
    /// The row that enters next, and its place.
    next: (u64, u64),
    rows: Vec<Row>,
    /// Bytes of their texts.
    bytes: usize,
    memory_limit: Option<u64>,
}

impl Kept {
    /// Bytes that are needed at the end, when texts are joined.
    fn check(&self, held: usize) -> Result<()> {
        let needed = 2 * self.bytes as u64 + (self.rows.len() * size_of::<Row>() + held) as u64;
        match self.memory_limit {
            Some(limit) if needed > limit => Err(Error::over_memory_limit(format!(
                "the {} rows that are kept so far take {needed} bytes, more than memory_limit={limit}: draw fewer rows, or raise \
                 the limit",
                self.rows.len()
            ))),
            _ => Ok(()),
        }
    }
}

impl Keep for Kept {
    fn next(&self) -> u64 {
        self.next.0
    }

    fn keep(&mut self, number: u64, offset: u64, text: &[u8]) -> Result<()> {
        let mut copy = try_filled(0, text.len(), "the rows that are kept")?;
        copy.copy_from_slice(text);
        let row = Row {
            number,
            offset,
            text: copy.into(),
        };
        self.bytes += row.text.len();
        let slot = self.next.1 as usize;
        if slot == self.rows.len() {
            try_reserve(&mut self.rows, 1, "the rows that are kept")?;
            self.rows.push(row);
        } else {
            self.bytes -= self.rows[slot].text.len();
            self.rows[slot] = row;
        }
        // Behind the last one that could be counted comes none.
        self.next = self.reservoir.next().unwrap_or((u64::MAX, 0));
        self.check(0)
    }
}

/// What a stream has come to.
struct State {
    stream: RowStream,
    kept: Kept,
    /// Whether its header was held against what is wanted of it.
    checked: bool,
}

/// Draws rows of a stream while its bytes are pushed.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct CsvReservoir {
    name: Arc<str>,
    dialect: Dialect,
    features: Vec<fastpipe_batch::Feature>,
    state: Mutex<Option<State>>,
}

impl CsvReservoir {
    /// Does something with the state. What failed has none any more.
    fn with<T>(&self, py: Python<'_>, part: impl FnOnce(&mut State) -> Result<T> + Send) -> PyResult<T>
    where
        T: Send,
    {
        let done = py.detach(|| {
            let mut locked = self.state.lock().unwrap_or_else(PoisonError::into_inner);
            let Some(mut state) = locked.take() else {
                return Err(Error::new(ErrorKind::Closed, "the stream has ended"));
            };
            let result = part(&mut state)?;
            *locked = Some(state);
            Ok(result)
        });
        done.py(py)
    }

    /// Holds a header against what is wanted, before all the rest is read for nothing.
    fn check(&self, header: &Header) -> Result<()> {
        let file = CsvFile {
            path: self.name.clone(),
            header: header.clone(),
            stretches: Vec::new(),
        };
        CsvSource::new(&self.features, &self.dialect, &[file]).map(drop)
    }
}

#[pymethods]
impl CsvReservoir {
    /// `features` are those that are read later; none if they are inferred.
    #[new]
    #[pyo3(signature = (name, dialect, features, rows, seed, memory_limit, lookups=None))]
    #[allow(clippy::too_many_arguments)] // Keywords in Python.
    fn new(
        name: OsString,
        dialect: LoweredDialect,
        features: Vec<(String, Lowered<'_>)>,
        rows: u64,
        seed: u64,
        memory_limit: Option<u64>,
        lookups: Option<Lookups<'_>>,
    ) -> PyResult<Self> {
        let dialect = self::dialect(dialect)?;
        let name: Arc<str> = path_text(&name).into();
        let mut reservoir = Reservoir::new(rows, Key { seed, epoch: 0 });
        let kept = Kept {
            next: reservoir.next().unwrap_or((u64::MAX, 0)),
            reservoir,
            rows: Vec::new(),
            bytes: 0,
            memory_limit,
        };
        let state = State {
            stream: RowStream::new(&name, &dialect),
            kept,
            checked: false,
        };
        Ok(CsvReservoir {
            name,
            dialect,
            features: lifted(features, lookups)?,
            state: Mutex::new(Some(state)),
        })
    }

    /// Passes over more bytes.
    fn push(&self, py: Python<'_>, bytes: PyBackedBytes) -> PyResult<()> {
        self.with(py, |state| {
            state.stream.push(&bytes, &mut state.kept)?;
            if let (false, Some(header)) = (state.checked, state.stream.header()) {
                self.check(header)?;
                state.checked = true;
            }
            state.kept.check(state.stream.held_bytes())
        })
    }

    /// Ends the stream. Returns how many rows it had.
    fn end(&self, py: Python<'_>) -> PyResult<u64> {
        self.with(py, |state| {
            state.stream.end(&mut state.kept)?;
            Ok(state.stream.rows())
        })
    }

    /// The rows that are kept, as a data set, and their numbers. They are handed out once.
    fn take<'py>(&self, py: Python<'py>) -> PyResult<(Py<CsvDataset>, Bound<'py, PyArray1<i64>>)> {
        let (header, rows, numbers) = self.with(py, |state| {
            let mut rows = std::mem::take(&mut state.kept.rows);
            rows.sort_unstable_by_key(|row| row.number);
            let numbers = try_collect(rows.iter().map(|row| row.number as i64), "the numbers of rows")?;
            let mut kept = KeptRows::default();
            kept.reserve(state.kept.bytes + 1)?;
            for row in rows {
                kept.push(&row.text, row.offset, Some(row.number))?;
            }
            let header = state.stream.header().cloned();
            let header = header.ok_or_else(|| Error::new(ErrorKind::Closed, "the stream hasn't ended"))?;
            Ok((header, kept, numbers))
        })?;
        let dataset = CsvDataset::kept(py, self.dialect.clone(), vec![(self.name.clone(), header, rows)])?;
        Ok((dataset, array(py, numbers)?))
    }
}
