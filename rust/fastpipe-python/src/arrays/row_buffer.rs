//! The row buffer of `fastpipe.typing.Rebatcher`. It takes arrays and returns the arrays of batches.
//!
//! Python splits each array type into plain arrays, which are the parts of its column, and reassembles them. All work
//! that is proportional to the number of rows happens here, without the GIL.

use std::sync::{Arc, Mutex, PoisonError};

use fastpipe_batch::{Error, ErrorKind, OutOfBounds, Part, PartKind, Result, SlabPool, try_collect};
use fastpipe_engine::default_threads;
use fastpipe_order::Key;
use fastpipe_rebatch::{Array, BatchSize, Chunk, Ends, InOrder, RowLayout, Shuffled, Targets};
use numpy::{
    PyArray1, PyArrayDescr, PyArrayDescrMethods, PyArrayMethods, PyUntypedArray, PyUntypedArrayMethods, dtype,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::sync::MutexExt;
use pyo3::types::PyDict;

use crate::arrays::numpy_buffers::{Fresh, Kept, Pinned, bytes};
use crate::errors::{guarded, to_py};

/// Collects rows until they fill a batch.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct RowBuffer {
    layout: RowLayout,
    /// For each part, in the order of the columns, whether it contains lengths.
    is_lengths: Vec<bool>,
    /// The dtype and shape of an element, for each part with values.
    elements: Vec<(Py<PyArrayDescr>, Vec<usize>)>,
    /// The name of the column of each part, if all columns are plain arrays.
    arrays: Option<Vec<Py<PyAny>>>,
    batch_size: usize,
    drop_last: bool,
    /// Memory for returned arrays. Only the process that created the pool uses it: see [`SlabPool`].
    pool: Arc<SlabPool>,
    process: u32,
    state: Mutex<State>,
}

/// Arrays of at least this many bytes are allocated in slabs, so that page faults occur only once. NumPy's own
/// allocator caches smaller arrays, and does so faster.
const POOLED: usize = 128 << 10;
/// Number of free slabs to keep per part with values: for a batch that was just dropped, and the batch before it.
const FREE: usize = 2;

struct State {
    rows: Rows,
    chunk: Option<PushedChunk>,
    ended: bool,
}

enum Rows {
    InOrder(InOrder),
    Shuffled(Box<Shuffled>),
}

/// A chunk that was pushed. Its rows before `from` have been used.
struct PushedChunk {
    rows: usize,
    from: usize,
    ends: Ends,
    lengths: Vec<Vec<i64>>,
    values: Vec<Pinned>,
}

impl Rows {
    fn retained_parts(&self) -> &[usize] {
        match self {
            Rows::InOrder(_) => &[],
            Rows::Shuffled(rows) => rows.retained_parts(),
        }
    }

    fn retain(&mut self, rows: usize, retained: Vec<Box<dyn Array>>) -> Result<()> {
        match self {
            Rows::InOrder(_) => Ok(()),
            Rows::Shuffled(all) => all.retain(rows, retained),
        }
    }

    fn advance(&mut self, chunk: Option<&Chunk<'_>>, from: &mut usize, ended: bool) -> Result<Option<BatchSize>> {
        match self {
            Rows::InOrder(rows) => rows.advance(chunk, from, ended),
            Rows::Shuffled(rows) => rows.advance(chunk, from, ended),
        }
    }

    fn copy(
        &mut self,
        chunk: Option<&Chunk<'_>>,
        from: &mut usize,
        ready: &BatchSize,
        targets: Targets<'_>,
    ) -> Result<()> {
        match self {
            Rows::InOrder(rows) => rows.copy(chunk, from, ready, targets),
            Rows::Shuffled(rows) => rows.copy(ready, targets),
        }
    }
}

/// A part of a column, as described by Python. Its depth is the number of `Lengths` before it.
#[derive(FromPyObject)]
enum PartOf<'py> {
    /// This many lengths for each item at this depth.
    Lengths(usize),
    /// The dtype and shape of each item at this depth.
    Values((Bound<'py, PyArrayDescr>, Vec<usize>)),
}

type Offsets<'py> = Vec<Bound<'py, PyArray1<i64>>>;
type Values<'py> = Vec<Bound<'py, PyUntypedArray>>;

#[pymethods]
impl RowBuffer {
    /// `columns` contains the parts of each column, from the outermost to the innermost. `key` contains the seed and
    /// the epoch. `arrays` contains the column names if each column is a plain array, which is its only part.
    #[new]
    #[pyo3(signature = (columns, *, batch_size, shuffle_buffer, key, drop_last, copy, arrays=None))]
    fn new(
        columns: Vec<Vec<PartOf<'_>>>,
        batch_size: u32,
        shuffle_buffer: u32,
        key: (u64, u64),
        drop_last: bool,
        copy: bool,
        arrays: Option<Vec<Py<PyAny>>>,
    ) -> PyResult<Self> {
        let (mut is_lengths, mut elements) = (Vec::new(), Vec::new());
        let mut all: Vec<Vec<Part>> = Vec::with_capacity(columns.len());
        for column in columns {
            let mut parts = Vec::with_capacity(column.len());
            for part in column {
                is_lengths.push(matches!(part, PartOf::Lengths(_)));
                parts.push(match part {
                    PartOf::Lengths(width) => (PartKind::Lengths, width),
                    PartOf::Values((dtype, shape)) => {
                        let width = width(&dtype, &shape)?;
                        elements.push((dtype.unbind(), shape));
                        (PartKind::Bytes, width)
                    }
                });
            }
            all.push(Part::nested(parts));
        }
        let layout = RowLayout::new(&all).map_err(|e| PyValueError::new_err(e.to_string()))?;
        let plain = |names: &Vec<_>| {
            names.len() == all.len()
                && all
                    .iter()
                    .all(|parts| parts.len() == 1 && parts[0].kind == PartKind::Bytes)
        };
        if !arrays.as_ref().is_none_or(plain) {
            return Err(PyValueError::new_err(
                "a column that is an array must have exactly one part, with values",
            ));
        }
        let (batch_size, span, threads) = (batch_size as usize, u64::from(shuffle_buffer), default_threads());
        let rows = if shuffle_buffer == 0 {
            Rows::InOrder(InOrder::new(layout.clone(), batch_size, threads))
        } else {
            let (seed, epoch) = key;
            let shuffled = Shuffled::new(layout.clone(), batch_size, span, Key { seed, epoch }, threads, copy);
            let shuffled =
                shuffled.map_err(|_| PyValueError::new_err("shuffle_buffer and batch_size are too large"))?;
            Rows::Shuffled(Box::new(shuffled))
        };
        let state = State {
            rows,
            chunk: None,
            ended: false,
        };
        Ok(RowBuffer {
            pool: SlabPool::new(FREE * layout.values().len()),
            process: std::process::id(),
            layout,
            is_lengths,
            elements,
            arrays,
            batch_size,
            drop_last,
            state: Mutex::new(state),
        })
    }

    /// Adds rows after `next` returned None. `parts` contains the parts of all columns in order. Lengths are
    /// one-dimensional int64 arrays.
    fn push(&self, py: Python<'_>, rows: usize, parts: Vec<Bound<'_, PyUntypedArray>>) -> PyResult<()> {
        let differ = || PyValueError::new_err("the parts must match the first rows in number, dtype and shape");
        let (mut lengths, mut values) = (Vec::new(), Vec::new());
        if parts.len() != self.is_lengths.len() {
            return Err(differ());
        }
        for (part, &is_lengths) in parts.into_iter().zip(&self.is_lengths) {
            if is_lengths {
                let part = part.into_any().cast_into::<PyArray1<i64>>().map_err(|_| differ())?;
                let copied = try_collect(part.try_readonly()?.as_array().iter().copied(), "lengths of rows");
                lengths.push(copied.map_err(|e| internal(py, e))?);
            } else {
                values.push(part);
            }
        }
        if !(0..).zip(&values).all(|(i, array)| self.is_like(i, array)) {
            return Err(differ());
        }
        guarded(py, || self.hand_in(py, rows, lengths, values))
    }

    /// Adds rows as `push` does, if all columns are arrays that need no preparation. Otherwise returns False and does
    /// nothing. The caller must then split the batch into parts, which also reports what is wrong with the batch.
    fn push_arrays(&self, batch: &Bound<'_, PyAny>) -> PyResult<bool> {
        let py = batch.py();
        let (Some(names), Ok(batch)) = (&self.arrays, batch.cast_exact::<PyDict>()) else {
            return Ok(false);
        };
        if batch.len() != names.len() {
            return Ok(false);
        }
        let mut rows = None;
        let mut values = Vec::with_capacity(names.len());
        for (i, name) in names.iter().enumerate() {
            let Some(array) = batch.get_item(name)? else {
                return Ok(false);
            };
            let Ok(array) = array.cast_into_exact::<PyUntypedArray>() else {
                return Ok(false);
            };
            if !self.is_like(i, &array) || *rows.get_or_insert(array.shape()[0]) != array.shape()[0] {
                return Ok(false);
            }
            values.push(array);
        }
        if let Some(rows) = rows.filter(|&rows| rows > 0) {
            guarded(py, || self.hand_in(py, rows, Vec::new(), values))?;
        }
        Ok(true)
    }

    /// Returns the next batch like `next`, as a dict by column name. All columns must be arrays.
    fn next_arrays<'py>(&self, py: Python<'py>) -> PyResult<Option<Bound<'py, PyDict>>> {
        let Some(names) = &self.arrays else {
            return Err(PyValueError::new_err("not all columns are arrays"));
        };
        let Some((_, _, values)) = guarded(py, || self.take(py))? else {
            return Ok(None);
        };
        guarded(py, || {
            let batch = PyDict::new(py);
            for (name, array) in names.iter().zip(values) {
                batch.set_item(name, array)?;
            }
            Ok(Some(batch))
        })
    }

    /// Declares that no more rows will be pushed.
    fn finish(&self, py: Python<'_>) {
        self.state
            .lock_py_attached(py)
            .unwrap_or_else(PoisonError::into_inner)
            .ended = true;
    }

    /// Returns the next batch: its number of rows, and its parts in the order of `push`, with offsets instead of
    /// lengths. None if more rows are needed or no rows are left.
    fn next<'py>(&self, py: Python<'py>) -> PyResult<Option<(usize, Values<'py>)>> {
        let Some((rows, offsets, values)) = guarded(py, || self.take(py))? else {
            return Ok(None);
        };
        let offsets = offsets.into_iter().map(|array| array.as_untyped().clone());
        let (mut offsets, mut values) = (offsets, values.into_iter());
        let parts = self.is_lengths.iter();
        let parts = parts.filter_map(|&is_lengths| if is_lengths { offsets.next() } else { values.next() });
        Ok(Some((rows, parts.collect())))
    }

    /// Memory of the rows that wait for a batch, in bytes.
    #[getter]
    fn nbytes(&self, py: Python<'_>) -> usize {
        let state = self.state.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        match &state.rows {
            Rows::InOrder(rows) => rows.nbytes(),
            Rows::Shuffled(rows) => rows.nbytes(),
        }
    }
}

impl RowBuffer {
    fn take<'py>(&self, py: Python<'py>) -> PyResult<Option<(usize, Offsets<'py>, Values<'py>)>> {
        let mut guard = self.state.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        let State { rows, chunk, ended } = &mut *guard;
        let ended = *ended;
        let view = chunk
            .as_ref()
            .map(|pushed| pushed.chunk(py, &self.layout))
            .transpose()?;
        let mut from = chunk.as_ref().map_or(0, |pushed| pushed.from);
        let ready = py
            .detach(|| rows.advance(view.as_ref(), &mut from, ended))
            .map_err(|e| internal(py, e))?;
        let ready = ready.filter(|ready| ready.rows == self.batch_size || !self.drop_last);
        let batch = match ready {
            None => None,
            Some(ready) => {
                let (offsets, mut values) = self.allocate(py, &ready)?;
                let mut writable: Vec<_> = offsets.iter().map(PyArrayMethods::readwrite).collect();
                let targets = Targets {
                    offsets: writable
                        .iter_mut()
                        .map(|array| array.as_slice_mut())
                        .collect::<Result<_, _>>()?,
                    values: values.iter_mut().map(Fresh::bytes_mut).collect(),
                };
                py.detach(|| rows.copy(view.as_ref(), &mut from, &ready, targets))
                    .map_err(|e| internal(py, e))?;
                drop(writable);
                Some((ready.rows, offsets, values.into_iter().map(Fresh::into_array).collect()))
            }
        };
        drop(view);
        if let Some(pushed) = chunk {
            pushed.from = from;
        }
        chunk.take_if(|pushed| pushed.from == pushed.rows);
        Ok(batch)
    }
}

/// Returns the size of an element of this shape in bytes.
fn width(dtype: &Bound<'_, PyArrayDescr>, shape: &[usize]) -> PyResult<usize> {
    if dtype.has_object() || dtype.itemsize() == 0 {
        return Err(PyValueError::new_err(format!("rows of {dtype} can't be copied")));
    }
    let bytes = shape
        .iter()
        .try_fold(dtype.itemsize(), |bytes, &size| bytes.checked_mul(size));
    bytes.ok_or_else(|| PyValueError::new_err("rows are too large"))
}

fn internal(py: Python<'_>, error: Error) -> PyErr {
    match error.kind() {
        ErrorKind::OutOfMemory => to_py(py, &error),
        _ => PyValueError::new_err(error.to_string()),
    }
}

fn out_of_bounds(out: OutOfBounds) -> PyErr {
    PyValueError::new_err(out.to_string())
}

impl PushedChunk {
    fn chunk<'a>(&'a self, py: Python<'a>, layout: &RowLayout) -> PyResult<Chunk<'a>> {
        let lengths = self.lengths.iter().map(Vec::as_slice).collect();
        // The arrays are checked each time, so that a change after `push` is also rejected.
        let values = self.values.iter().map(|array| bytes(array.bind(py)).ok_or(OutOfBounds));
        let values = values.collect::<Result<_, _>>().map_err(out_of_bounds)?;
        Chunk::new(layout, self.rows, &self.ends, lengths, values).map_err(out_of_bounds)
    }
}

impl RowBuffer {
    /// Whether an array can be used as the `i`-th part with values without preparation.
    fn is_like(&self, i: usize, array: &Bound<'_, PyUntypedArray>) -> bool {
        let (dtype, shape) = &self.elements[i];
        array.ndim() == shape.len() + 1
            && array.shape()[1..] == **shape
            && array.is_c_contiguous()
            && array.dtype().is_equiv_to(dtype.bind(array.py()))
    }

    /// Takes ownership of parts that have been checked, except for the lengths.
    fn hand_in(
        &self,
        py: Python<'_>,
        rows: usize,
        lengths: Vec<Vec<i64>>,
        values: Vec<Bound<'_, PyUntypedArray>>,
    ) -> PyResult<()> {
        let ends = py
            .detach(|| Ends::new(&self.layout, rows, &lengths))
            .map_err(|e| internal(py, e))?;
        let mut state = self.state.lock_py_attached(py).unwrap_or_else(PoisonError::into_inner);
        if state.chunk.is_some() || state.ended {
            return Err(PyValueError::new_err("rows were pushed before they were requested"));
        }
        let retained = state.rows.retained_parts().iter().map(|&i| Kept::new(&values[i]));
        let retained =
            retained.map(|kept| Ok(Box::new(kept?.ok_or_else(|| out_of_bounds(OutOfBounds))?) as Box<dyn Array>));
        let retained: Vec<_> = retained.collect::<PyResult<_>>()?;
        let pushed = PushedChunk {
            rows,
            from: 0,
            ends,
            lengths,
            values: values.iter().map(Pinned::new).collect::<PyResult<_>>()?,
        };
        pushed.chunk(py, &self.layout)?;
        state.rows.retain(rows, retained).map_err(|e| internal(py, e))?;
        state.chunk = Some(pushed);
        Ok(())
    }

    /// Allocates the arrays of a batch. Their contents are not yet written.
    fn allocate<'py>(&self, py: Python<'py>, ready: &BatchSize) -> PyResult<(Offsets<'py>, Vec<Fresh<'py>>)> {
        let offsets = self.layout.lengths().iter();
        let integers = dtype::<i64>(py);
        let offsets = offsets.map(|part| {
            let len = ready.elements[part.level]
                .checked_mul(part.width)
                .and_then(|n| n.checked_add(1));
            let array = Fresh::zeros(&integers, &[len.ok_or_else(|| out_of_bounds(OutOfBounds))?])?.into_array();
            Ok(array.into_any().cast_into::<PyArray1<i64>>()?)
        });
        let values = self
            .layout
            .values()
            .iter()
            .zip(&self.elements)
            .map(|(part, (dtype, shape))| {
                let shape: Vec<usize> = std::iter::once(ready.elements[part.level])
                    .chain(shape.iter().copied())
                    .collect();
                let bytes = ready.elements[part.level] * part.width;
                let pooled = bytes >= POOLED && self.process == std::process::id();
                match pooled.then(|| self.pool.take(bytes)) {
                    Some(Ok(slab)) => Fresh::over(slab, dtype.bind(py), &shape),
                    // If memory runs out, NumPy raises the error.
                    _ => Fresh::new(dtype.bind(py), &shape),
                }
            });
        Ok((offsets.collect::<PyResult<_>>()?, values.collect::<PyResult<_>>()?))
    }
}
