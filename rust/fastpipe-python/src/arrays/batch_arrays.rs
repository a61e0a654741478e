//! Batches as NumPy arrays over the engine's memory.
//!
//! Arrays view the slabs of a batch without copying. Each array has the batch's [`Memory`] as its base. The slabs
//! therefore stay alive as long as any array over them, and then return to their pool.
#![allow(unsafe_code)]

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::slice::Iter;

use fastpipe_batch::{BufferRange, ColumnSpec, DType, Form, Leaf, NestedForm, SparseForm, SparseLayout, TimeUnit};
use fastpipe_engine::{Batch, BatchInfo, VALID, panicked};
use fastpipe_rebatch::Byte;
use numpy::datetime::units::{Days, Microseconds, Milliseconds, Nanoseconds, Seconds};
use numpy::datetime::{Datetime, Timedelta};
use numpy::{Element, PyArray1, PyArrayMethods, dtype};
use pyo3::exceptions::{PyImportError, PyKeyboardInterrupt};
use pyo3::prelude::*;
use pyo3::sync::PyOnceLock;
use pyo3::types::{PyDict, PyTuple, PyType};

use crate::arrays::numpy_buffers::{Fresh, Memory, view};
use crate::errors::guarded;

/// Loads NumPy and its C API. The numpy crate would load them on first use, which runs Python code that Ctrl-C may
/// interrupt, and the crate panics if that fails. Here a failure raises an ordinary exception.
pub(crate) fn load_numpy(py: Python<'_>) -> PyResult<()> {
    py.import("numpy")?;
    let loaded = catch_unwind(AssertUnwindSafe(|| {
        // This loads the array API and the API with which the crate tracks borrowed arrays.
        Fresh::zeros(&dtype::<i64>(py), &[1])?
            .into_array()
            .cast::<PyArray1<i64>>()?
            .try_readonly()?;
        Ok(())
    }));
    loaded.unwrap_or_else(|panic| {
        let error = panicked(&*panic);
        Err(match error.reason() {
            reason if reason.contains("KeyboardInterrupt") => PyKeyboardInterrupt::new_err(()),
            _ => PyImportError::new_err(format!("NumPy can't be used: {error}")),
        })
    })
}

/// Moves a list into an array without copying it. Raises `MemoryError` if Python can't allocate the array object.
pub(crate) fn array<T: Element>(py: Python<'_>, list: Vec<T>) -> PyResult<Bound<'_, PyArray1<T>>> {
    guarded(py, || Ok(PyArray1::from_vec(py, list)))
}

/// The array types of batches, from `fastpipe.batch`.
struct Forms {
    ragged: Py<PyType>,
    strings: Py<PyType>,
    masked: Py<PyType>,
    sparse: Py<PyType>,
    csr: Py<PyType>,
}

fn forms(py: Python<'_>) -> PyResult<&Forms> {
    static FORMS: PyOnceLock<Forms> = PyOnceLock::new();
    FORMS.get_or_try_init(py, || {
        let module = py.import("fastpipe.batch")?;
        let class = |name: &str| Ok::<_, PyErr>(module.getattr(name)?.cast_into::<PyType>()?.unbind());
        Ok(Forms {
            ragged: class("Ragged")?,
            strings: class("Strings")?,
            masked: class("Masked")?,
            sparse: class("Sparse")?,
            csr: class("SparseCSR")?,
        })
    })
}

/// The array with the number of rows of each group, uint32 [groups].
const GROUP_SIZES: &str = "group_sizes";

/// The array with the first element of each row that belongs to its group, uint32 [rows].
const GROUP_STARTS: &str = "group_starts";

/// Returns a batch as a dict from feature names to NumPy arrays or other array types. `padded` adds an array that marks
/// the valid rows, or the valid groups. If rows are groups, two arrays describe these.
pub(crate) fn to_dict<'py>(
    py: Python<'py>,
    columns: &[ColumnSpec],
    batch: Batch,
    padded: bool,
) -> PyResult<Bound<'py, PyDict>> {
    let filled: Vec<usize> = batch.info.filled_slots().collect();
    let BatchInfo {
        rows, valid, groups, ..
    } = batch.info;
    let memory = Bound::new(py, Memory::of_all(batch.slabs))?;
    let mut builder = Builder {
        py,
        forms: forms(py)?,
        memory,
        rows,
        parts: batch.parts.iter(),
        dense_shapes: batch.dense_shapes.iter(),
    };
    let dict = PyDict::new(py);
    for column in columns {
        let value = match &column.form {
            Form::Nested(form) => builder.nested(form)?,
            Form::Sparse(form) => builder.sparse(form)?,
        };
        dict.set_item(&*column.name, value)?;
    }
    if padded {
        let rows = if groups.sizes.is_empty() {
            rows
        } else {
            groups.sizes.len()
        };
        let mut flags = Fresh::zeros(&dtype::<bool>(py), &[rows])?;
        flags.bytes_mut()[..valid.min(rows)].fill(Byte::new(1));
        filled.iter().for_each(|&slot| flags.bytes_mut()[slot] = Byte::new(0));
        dict.set_item(VALID, flags.into_array())?;
    }
    if !groups.sizes.is_empty() {
        dict.set_item(GROUP_SIZES, array(py, groups.sizes)?)?;
        dict.set_item(GROUP_STARTS, array(py, groups.starts)?)?;
    }
    Ok(dict)
}

/// Converts the parts of a batch, in the order of the columns.
struct Builder<'py, 'b> {
    py: Python<'py>,
    forms: &'b Forms,
    memory: Bound<'py, Memory>,
    rows: usize,
    parts: Iter<'b, BufferRange>,
    dense_shapes: Iter<'b, Vec<i64>>,
}

type Object<'py> = Bound<'py, PyAny>;

impl<'py> Builder<'py, '_> {
    fn next(&mut self) -> BufferRange {
        // Every part has a range. If a range were missing, the array would be empty.
        self.parts.next().copied().unwrap_or(BufferRange {
            slab: 0,
            offset: 0,
            len: 0,
        })
    }

    fn array_of<T: Element>(&self, part: BufferRange, shape: &[usize]) -> PyResult<Object<'py>> {
        let bytes = shape.iter().try_fold(size_of::<T>(), |n, &size| n.checked_mul(size));
        // The array must never extend past the part, even if the shape does.
        let fits = bytes.is_some_and(|n| n <= part.len);
        let shape = if fits { shape } else { &[0][..] };
        let slab = self.memory.get().slab(part.slab);
        // SAFETY: the engine placed the part within its slab, at a multiple of 64 bytes, and wrote all of it. The array
        // fits into the part (checked above). Every bit pattern of a number is valid, and bools are written as 0 or 1.
        // The slab stays in place until `memory`, the base of the array, is freed. Parts don't overlap, so no other
        // array of the batch covers the same bytes. The arrays of `Memory::pieces` do, as views do in NumPy.
        let array = unsafe {
            let start = slab.as_ptr().add(part.offset);
            view(&dtype::<T>(self.py), shape, start, self.memory.clone().into_any())?
        };
        Ok(array.into_any())
    }

    fn array(&self, dtype: DType, part: BufferRange, shape: &[usize]) -> PyResult<Object<'py>> {
        match dtype {
            DType::Bool => self.array_of::<bool>(part, shape),
            DType::I8 => self.array_of::<i8>(part, shape),
            DType::I16 => self.array_of::<i16>(part, shape),
            DType::I32 => self.array_of::<i32>(part, shape),
            DType::I64 => self.array_of::<i64>(part, shape),
            DType::U8 => self.array_of::<u8>(part, shape),
            DType::U16 => self.array_of::<u16>(part, shape),
            DType::U32 => self.array_of::<u32>(part, shape),
            DType::U64 => self.array_of::<u64>(part, shape),
            DType::F16 => self.array_of::<half::f16>(part, shape),
            DType::F32 => self.array_of::<f32>(part, shape),
            DType::F64 => self.array_of::<f64>(part, shape),
            DType::Datetime(TimeUnit::Days) => self.array_of::<Datetime<Days>>(part, shape),
            DType::Datetime(TimeUnit::Seconds) => self.array_of::<Datetime<Seconds>>(part, shape),
            DType::Datetime(TimeUnit::Milliseconds) => self.array_of::<Datetime<Milliseconds>>(part, shape),
            DType::Datetime(TimeUnit::Microseconds) => self.array_of::<Datetime<Microseconds>>(part, shape),
            DType::Datetime(TimeUnit::Nanoseconds) => self.array_of::<Datetime<Nanoseconds>>(part, shape),
            DType::Timedelta(TimeUnit::Days) => self.array_of::<Timedelta<Days>>(part, shape),
            DType::Timedelta(TimeUnit::Seconds) => self.array_of::<Timedelta<Seconds>>(part, shape),
            DType::Timedelta(TimeUnit::Milliseconds) => self.array_of::<Timedelta<Milliseconds>>(part, shape),
            DType::Timedelta(TimeUnit::Microseconds) => self.array_of::<Timedelta<Microseconds>>(part, shape),
            DType::Timedelta(TimeUnit::Nanoseconds) => self.array_of::<Timedelta<Nanoseconds>>(part, shape),
        }
    }

    fn offsets(&self, part: BufferRange) -> PyResult<Object<'py>> {
        self.array_of::<i64>(part, &[part.len / 8])
    }

    fn masked(&self, values: Object<'py>, valid: Object<'py>) -> PyResult<Object<'py>> {
        self.forms.masked.bind(self.py).call1((values, valid))
    }

    /// Returns values of shape `[n, *shape]`, and `n`. If `rows` is given, `n` is `rows`; otherwise it follows from the
    /// size of the part.
    fn leaf(&mut self, leaf: Leaf, shape: &[usize], rows: Option<usize>) -> PyResult<(Object<'py>, usize)> {
        let width: usize = shape.iter().product();
        let part = self.next();
        let count = |elements: usize| rows.unwrap_or(elements.checked_div(width).unwrap_or(0));
        match leaf {
            Leaf::Fixed(dtype) => {
                let n = count(part.len / dtype.size());
                Ok((self.array(dtype, part, &with(n, shape))?, n))
            }
            Leaf::Bytes { utf8 } => {
                let bytes = self.next();
                let n = count((part.len / 8).saturating_sub(1));
                let values = self.array_of::<u8>(bytes, &[bytes.len])?;
                let shape = PyTuple::new(self.py, with(n, shape))?;
                let strings = self
                    .forms
                    .strings
                    .bind(self.py)
                    .call1((values, self.offsets(part)?, shape, !utf8))?;
                Ok((strings, n))
            }
        }
    }

    fn nested(&mut self, form: &NestedForm) -> PyResult<Object<'py>> {
        let levels: Vec<_> = (0..form.ragged)
            .map(|level| {
                let mask = form.masks[level].then(|| self.next());
                (mask, self.next())
            })
            .collect();
        let mask = form.leaf_mask.map(|dims| (self.next(), dims));
        let rows = (form.ragged == 0).then_some(self.rows);
        let (mut node, n) = self.leaf(form.leaf, &form.shape, rows)?;
        if let Some((part, dims)) = mask {
            let valid = self.array_of::<bool>(part, &with(n, &form.shape[..dims]))?;
            node = self.masked(node, valid)?;
        }
        for (mask, lengths) in levels.into_iter().rev() {
            node = self.forms.ragged.bind(self.py).call1((node, self.offsets(lengths)?))?;
            if let Some(part) = mask {
                node = self.masked(node, self.array_of::<bool>(part, &[part.len])?)?;
            }
        }
        Ok(node)
    }

    fn sparse(&mut self, form: &SparseForm) -> PyResult<Object<'py>> {
        let mask = form.mask.then(|| self.next());
        let offsets = (form.layout == SparseLayout::Csr).then(|| self.next());
        let coordinates = self.next();
        let width = form.coordinates();
        let entries = coordinates.len / (8 * width);
        let (values, _) = self.leaf(form.leaf, &[], None)?;
        let no_shape = Vec::new();
        let dense_shape = numbers(self.py, self.dense_shapes.next().unwrap_or(&no_shape))?;
        let node = match offsets {
            None => {
                let indices = self.array_of::<i64>(coordinates, &[entries, width])?;
                self.forms.sparse.bind(self.py).call1((indices, values, dense_shape))?
            }
            Some(offsets) => {
                let shape = [entries, width];
                let indices = self.array_of::<i64>(coordinates, if width == 1 { &shape[..1] } else { &shape })?;
                self.forms
                    .csr
                    .bind(self.py)
                    .call1((self.offsets(offsets)?, indices, values, dense_shape))?
            }
        };
        match mask {
            Some(part) => self.masked(node, self.array_of::<bool>(part, &[part.len])?),
            None => Ok(node),
        }
    }
}

/// Returns a new array that owns its memory.
fn numbers<'py>(py: Python<'py>, numbers: &[i64]) -> PyResult<Object<'py>> {
    let mut array = Fresh::zeros(&dtype::<i64>(py), &[numbers.len()])?;
    for (to, number) in array.bytes_mut().as_chunks_mut::<8>().0.iter_mut().zip(numbers) {
        *to = number.to_ne_bytes().map(Byte::new);
    }
    Ok(array.into_array().into_any())
}

fn with(n: usize, shape: &[usize]) -> Vec<usize> {
    std::iter::once(n).chain(shape.iter().copied()).collect()
}
