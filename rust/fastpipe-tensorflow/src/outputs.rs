//! Converts a batch into the outputs of a kernel.

use std::ffi::{c_int, c_void};
use std::slice;
use std::sync::Arc;

use fastpipe_batch::{BufferRange, ColumnSpec, DType, Form, Leaf, NestedForm, Slab, SparseForm, try_collect};
use fastpipe_engine::{Batch, VALID};

use crate::api::handle::{Context, Tensor};
use crate::api::{Api, Code, Failure, OwnStatus, STRING_SIZE, TF_BOOL, TF_INT64, TF_STRING};
use crate::coordinates::coordinates;

/// A column of an element.
pub enum Column {
    /// The column that marks valid rows. Other rows only fill up the batch.
    Valid,
    /// A column of the batch.
    Of {
        /// Index of the column in the batch.
        column: usize,
        /// Index of its first part.
        part: usize,
        /// Number of sparse columns before it.
        sparse: usize,
        /// If nested arrays are returned as coordinates: the shape of a row, with -1 for any length.
        coordinates: Option<Vec<i64>>,
    },
}

/// The name of a column. If its nested arrays are returned as coordinates, also the shape of a row.
pub type Wanted = (String, Option<Vec<i64>>);

/// Finds the columns of an element by name.
///
/// # Errors
///
/// If the batches lack a column.
pub fn columns(specs: &[ColumnSpec], wanted: Vec<Wanted>) -> Result<Vec<Column>, Failure> {
    let find = |(name, coordinates): Wanted| {
        let Some(column) = specs.iter().position(|spec| *spec.name == *name) else {
            let unknown = || Failure::new(Code::Internal, format!("the batches have no column {name:?}"));
            return (name == VALID).then_some(Column::Valid).ok_or_else(unknown);
        };
        let before = &specs[..column];
        Ok(Column::Of {
            column,
            part: before.iter().map(|spec| spec.parts().len()).sum(),
            sparse: before
                .iter()
                .filter(|spec| matches!(spec.form, Form::Sparse(_)))
                .count(),
            coordinates,
        })
    };
    wanted.into_iter().map(find).collect()
}

fn type_of(dtype: DType) -> c_int {
    match dtype {
        DType::F32 => 1,
        DType::F64 => 2,
        DType::F16 => 19,
        DType::I32 => 3,
        DType::U8 => 4,
        DType::I16 => 5,
        DType::I8 => 6,
        // TensorFlow has no type for times, so they are returned as integers.
        DType::I64 | DType::Datetime(_) | DType::Timedelta(_) => TF_INT64,
        DType::Bool => TF_BOOL,
        DType::U16 => 17,
        DType::U32 => 22,
        DType::U64 => 23,
    }
}

/// Fills the outputs of a kernel in order.
pub(crate) struct Outputs<'a> {
    api: &'a Api,
    context: *mut Context,
    status: OwnStatus<'a>,
    next: c_int,
    count: c_int,
    /// The memory of the batch. All tensors over it share ownership.
    slabs: Arc<Vec<Slab>>,
}

impl<'a> Outputs<'a> {
    /// # Safety
    ///
    /// `context` must belong to a kernel call that outlives this value.
    pub(crate) unsafe fn new(api: &'a Api, context: *mut Context) -> Self {
        // SAFETY: the caller guarantees that the context is valid.
        let count = unsafe { (api.outputs)(context) };
        Outputs {
            api,
            context,
            status: OwnStatus::new(api),
            next: 0,
            count,
            slabs: Arc::default(),
        }
    }

    /// Fills the outputs with the columns of a batch, in the order of the nodes of `fastpipe.tf._forms`.
    pub(crate) fn batch(mut self, specs: &[ColumnSpec], columns: &[Column], batch: Batch) -> Result<(), Failure> {
        let Batch {
            info,
            slabs,
            parts,
            dense_shapes,
        } = batch;
        self.slabs = Arc::new(slabs);
        for column in columns {
            let Column::Of {
                column,
                part,
                sparse,
                coordinates,
            } = column
            else {
                let valid = try_collect(
                    (0..info.rows).map(|row| u8::from(row < info.valid)),
                    "which rows are valid",
                );
                let valid = valid.map_err(|e| Failure::new(Code::Unknown, e.to_string()))?;
                self.copy(TF_BOOL, &[info.rows], &valid)?;
                continue;
            };
            let parts = &mut parts[*part..].iter().copied();
            match (&specs[*column].form, coordinates) {
                (Form::Nested(form), None) => self.nested(form, parts, info.rows)?,
                (Form::Nested(form), Some(shape)) => self.coordinates(form, parts, info.rows, shape)?,
                (Form::Sparse(form), _) => {
                    let shape = dense_shapes.get(*sparse).ok_or_else(fault)?;
                    self.sparse(form, parts, shape)?;
                }
            }
        }
        if self.next == self.count { Ok(()) } else { Err(fault()) }
    }

    fn nested(
        &mut self,
        form: &NestedForm,
        parts: &mut dyn Iterator<Item = BufferRange>,
        rows: usize,
    ) -> Result<(), Failure> {
        for level in 0..form.ragged {
            if form.masks[level] {
                let part = next(parts)?;
                self.share(DType::Bool, part, &[part.len])?;
            }
            let part = next(parts)?;
            self.share(DType::I64, part, &[part.len / size_of::<i64>()])?;
        }
        let mask = form.leaf_mask.map(|dims| Ok((next(parts)?, dims))).transpose()?;
        let first = next(parts)?;
        let n = if form.ragged == 0 {
            rows
        } else {
            count(form.leaf, first).checked_div(form.width()).unwrap_or(0)
        };
        let shape = |dims: &[usize]| [&[n], dims].concat();
        if let Some((part, dims)) = mask {
            self.share(DType::Bool, part, &shape(&form.shape[..dims]))?;
        }
        self.leaf(form.leaf, first, parts, &shape(&form.shape))
    }

    fn sparse(
        &mut self,
        form: &SparseForm,
        parts: &mut dyn Iterator<Item = BufferRange>,
        dense_shape: &[i64],
    ) -> Result<(), Failure> {
        if form.mask {
            let part = next(parts)?;
            self.share(DType::Bool, part, &[part.len])?;
        }
        let (indices, width) = (next(parts)?, form.coordinates());
        let entries = indices.len / (size_of::<i64>() * width);
        self.share(DType::I64, indices, &[entries, width])?;
        self.copy(TF_INT64, &[dense_shape.len()], dense_shape)?;
        let first = next(parts)?;
        self.leaf(form.leaf, first, parts, &[count(form.leaf, first)])
    }

    /// Outputs nested arrays as indices, dense shape and values.
    fn coordinates(
        &mut self,
        form: &NestedForm,
        parts: &mut dyn Iterator<Item = BufferRange>,
        rows: usize,
        shape: &[i64],
    ) -> Result<(), Failure> {
        if form.leaf_mask.is_some() || form.masks.contains(&true) {
            return Err(fault());
        }
        let levels: Vec<BufferRange> = (0..form.ragged).map(|_| next(parts)).collect::<Result<_, _>>()?;
        let slabs = self.slabs.clone();
        let offsets: Vec<&[i64]> = levels.iter().map(|&part| numbers(&slabs, part)).collect();
        let items = match offsets.last() {
            None => rows,
            Some(last) => usize::try_from(last.last().copied().unwrap_or(0)).map_err(|_| fault())?,
        };
        let (entries, rank) = (items * form.width(), 1 + shape.len());
        let mut found = None;
        self.allocate(TF_INT64, &[entries, rank], |indices| {
            found = coordinates(rows, &offsets, &form.shape, indices);
        })?;
        let mut sizes = found.ok_or_else(fault)?;
        sizes[0] = rows as i64;
        for (axis, &size) in shape.iter().enumerate() {
            match sizes.get_mut(axis + 1) {
                Some(found) if size < 0 => *found = (*found).max(0),
                Some(found) => *found = size,
                None => sizes.push(size),
            }
        }
        self.copy(TF_INT64, &[rank], &sizes)?;
        let first = next(parts)?;
        self.leaf(form.leaf, first, parts, &[entries])
    }

    fn leaf(
        &mut self,
        leaf: Leaf,
        first: BufferRange,
        parts: &mut dyn Iterator<Item = BufferRange>,
        shape: &[usize],
    ) -> Result<(), Failure> {
        match leaf {
            Leaf::Fixed(dtype) => self.share(dtype, first, shape),
            Leaf::Bytes { .. } => {
                let bytes = next(parts)?;
                self.strings(first, bytes, shape)
            }
        }
    }

    /// Outputs a tensor over a part of the batch's memory.
    fn share(&mut self, dtype: DType, part: BufferRange, shape: &[usize]) -> Result<(), Failure> {
        let size = product(shape)?.checked_mul(dtype.size()).ok_or_else(fault)?;
        let slab = self.slabs.get(part.slab).ok_or_else(fault)?;
        if size > part.len || part.offset.checked_add(part.len).is_none_or(|end| end > slab.len()) {
            return Err(fault());
        }
        let dims = dimensions(shape)?;
        // SAFETY: the part is within the slab (checked above), whose memory has `len` bytes.
        let data = unsafe { slab.as_ptr().add(part.offset) };
        let memory = Arc::into_raw(self.slabs.clone());
        // SAFETY: `dims` has `rank` sizes. Their product is `size` bytes of this type, which are within the part
        // (checked above). The engine has written them at a multiple of 64 bytes, so TensorFlow uses them without a
        // copy. No other tensor refers to them. They stay valid until `give_back` is called, which happens once: when
        // the last tensor over them is released, or if no tensor can be created.
        let tensor = unsafe {
            let rank = dims.len() as c_int;
            (self.api.new_tensor)(
                type_of(dtype),
                dims.as_ptr(),
                rank,
                data.cast(),
                size,
                give_back,
                memory.cast_mut().cast(),
            )
        };
        // SAFETY: the tensor was just created.
        unsafe { self.put(tensor) }
    }

    /// Outputs a tensor with a copy of the values.
    fn copy<T: Copy>(&mut self, dtype: c_int, shape: &[usize], values: &[T]) -> Result<(), Failure> {
        let mut fits = false;
        self.allocate(dtype, shape, |out: &mut [T]| {
            fits = out.len() == values.len();
            if fits {
                out.copy_from_slice(values);
            }
        })?;
        if fits { Ok(()) } else { Err(fault()) }
    }

    /// Outputs a tensor in TensorFlow's memory. It is zeroed, and `fill` then writes its elements.
    fn allocate<T: Copy>(&mut self, dtype: c_int, shape: &[usize], fill: impl FnOnce(&mut [T])) -> Result<(), Failure> {
        let elements = product(shape)?;
        let size = elements.checked_mul(size_of::<T>()).ok_or_else(fault)?;
        let tensor = self.allocated(dtype, shape, size)?;
        if elements > 0 {
            // SAFETY: the tensor has `size` bytes (checked by `allocated`), aligned to 64. Nothing else accesses them
            // while this kernel runs, and zeros are valid numbers. All types of callers (bytes for bools, i64) accept
            // any bits.
            unsafe {
                let data = (self.api.tensor_data)(tensor).cast::<T>();
                data.write_bytes(0, elements);
                fill(slice::from_raw_parts_mut(data, elements));
            }
        } else {
            fill(&mut []);
        }
        // SAFETY: `allocated` created it, and it is already an output.
        unsafe { (self.api.delete_tensor)(tensor) };
        Ok(())
    }

    fn strings(&mut self, offsets: BufferRange, bytes: BufferRange, shape: &[usize]) -> Result<(), Failure> {
        let elements = product(shape)?;
        let slabs = self.slabs.clone();
        let (offsets, bytes) = (numbers(&slabs, offsets), content(&slabs, bytes));
        if elements > 0 && offsets.len() != elements + 1 {
            return Err(fault());
        }
        let tensor = self.allocated(TF_STRING, shape, elements * STRING_SIZE)?;
        let mut whole = true;
        if elements > 0 {
            // SAFETY: the tensor was just created.
            let data = unsafe { (self.api.tensor_data)(tensor) };
            for (i, ends) in offsets.windows(2).enumerate() {
                let Some(text) = bytes.get(ends[0] as usize..ends[1] as usize) else {
                    whole = false;
                    break;
                };
                // SAFETY: TensorFlow has created `elements` empty strings of this size there (`allocated` compared the
                // bytes), and frees them with the tensor. Nothing else accesses the tensor yet. The text is copied.
                unsafe { (self.api.string_copy)(data.byte_add(i * STRING_SIZE), text.as_ptr().cast(), text.len()) };
            }
        }
        // SAFETY: `allocated` created it, and it is already an output.
        unsafe { (self.api.delete_tensor)(tensor) };
        if whole { Ok(()) } else { Err(fault()) }
    }

    /// Allocates the next output in TensorFlow's memory. The caller must delete the tensor.
    fn allocated(&mut self, dtype: c_int, shape: &[usize], size: usize) -> Result<*mut Tensor, Failure> {
        let (dims, index) = (dimensions(shape)?, self.index()?);
        let rank = dims.len() as c_int;
        // SAFETY: the context belongs to the current call, which has this output. `dims` has `rank` sizes.
        let tensor = unsafe {
            if (self.api.output_type)(self.context, index) != dtype {
                return Err(fault());
            }
            let status = self.status.as_ptr();
            (self.api.allocate_output)(self.context, index, dtype, dims.as_ptr(), rank, size, status)
        };
        self.status.result()?;
        // SAFETY: there was no error, so the tensor is valid.
        if unsafe { (self.api.tensor_bytes)(tensor) } != size {
            // SAFETY: as above, and nothing else deletes it.
            unsafe { (self.api.delete_tensor)(tensor) };
            return Err(Failure::new(
                Code::Internal,
                "this version of TensorFlow lays out tensors in a way that fastpipe doesn't know",
            ));
        }
        Ok(tensor)
    }

    /// Sets the next output to a tensor.
    ///
    /// # Safety
    ///
    /// `tensor` must be a tensor that the caller owns, or null.
    pub(crate) unsafe fn put(&mut self, tensor: *mut Tensor) -> Result<(), Failure> {
        if tensor.is_null() {
            return Err(Failure::new(
                Code::Internal,
                "TensorFlow did not create a tensor over a batch",
            ));
        }
        let index = self.index();
        if let Ok(index) = index {
            // SAFETY: the context belongs to the current call, which has this output. The tensor is valid.
            unsafe { (self.api.set_output)(self.context, index, tensor, self.status.as_ptr()) };
        }
        // SAFETY: this function owns it. TensorFlow has acquired its own reference by now, if it needs one.
        unsafe { (self.api.delete_tensor)(tensor) };
        index?;
        self.status.result()
    }

    /// Fills the remaining outputs with zeros. `shapes` contains the rank and then the dimensions of each output.
    pub(crate) fn nothing(mut self, mut shapes: &[i64]) -> Result<(), Failure> {
        while let Some((&rank, rest)) = shapes.split_first() {
            let (dims, rest) = usize::try_from(rank)
                .ok()
                .and_then(|rank| rest.split_at_checked(rank))
                .ok_or_else(fault)?;
            shapes = rest;
            let dims: Vec<usize> = dims.iter().map(|&size| size as usize).collect();
            // SAFETY: the context belongs to the current call.
            let dtype = unsafe { (self.api.output_type)(self.context, self.next) };
            let each = match dtype {
                TF_BOOL | 4 | 6 => 1,
                5 | 17 => 2,
                1 | 3 | 22 => 4,
                // Strings aren't written, because these outputs contain none.
                TF_STRING => STRING_SIZE,
                _ => 8,
            };
            let elements = product(&dims)?;
            if dtype == TF_STRING && elements > 0 {
                return Err(fault());
            }
            let size = elements.checked_mul(each).ok_or_else(fault)?;
            let tensor = self.allocated(dtype, &dims, size)?;
            // SAFETY: the tensor has `size` bytes (checked by `allocated`). Nothing else accesses them while this
            // kernel runs. It is already an output.
            unsafe {
                if size > 0 {
                    (self.api.tensor_data)(tensor).cast::<u8>().write_bytes(0, size);
                }
                (self.api.delete_tensor)(tensor);
            }
        }
        if self.next == self.count { Ok(()) } else { Err(fault()) }
    }

    fn index(&mut self) -> Result<c_int, Failure> {
        let index = self.next;
        self.next += 1;
        if index < self.count { Ok(index) } else { Err(fault()) }
    }
}

/// Drops a tensor's reference to the memory of the batch.
unsafe extern "C" fn give_back(_data: *mut c_void, _size: usize, memory: *mut c_void) {
    // SAFETY: `share` created it from an `Arc`, and TensorFlow calls this once.
    drop(unsafe { Arc::from_raw(memory.cast_const().cast::<Vec<Slab>>()) });
}

fn next(parts: &mut dyn Iterator<Item = BufferRange>) -> Result<BufferRange, Failure> {
    parts.next().ok_or_else(fault)
}

/// Number of values of a leaf, given its first part.
fn count(leaf: Leaf, first: BufferRange) -> usize {
    match leaf {
        Leaf::Fixed(dtype) => first.len / dtype.size(),
        Leaf::Bytes { .. } => (first.len / size_of::<i64>()).saturating_sub(1),
    }
}

/// Returns the bytes of a part. Tensors over them may exist, but nothing writes to them before the kernel returns.
fn content(slabs: &[Slab], part: BufferRange) -> &[u8] {
    let end = part.offset.checked_add(part.len);
    let found = slabs.get(part.slab).zip(end);
    found
        .and_then(|(slab, end)| slab.bytes().get(part.offset..end))
        .unwrap_or_default()
}

/// Returns the numbers of a part that contains i64.
fn numbers(slabs: &[Slab], part: BufferRange) -> &[i64] {
    // SAFETY: any bits are a valid i64. The part begins at a multiple of 64 bytes, and `align_to` skips unaligned
    // bytes.
    unsafe { content(slabs, part).align_to().1 }
}

fn product(shape: &[usize]) -> Result<usize, Failure> {
    shape
        .iter()
        .try_fold(1usize, |n, &size| n.checked_mul(size))
        .ok_or_else(fault)
}

fn dimensions(shape: &[usize]) -> Result<Vec<i64>, Failure> {
    shape
        .iter()
        .map(|&size| i64::try_from(size).map_err(|_| fault()))
        .collect()
}

#[cold]
fn fault() -> Failure {
    Failure::new(
        Code::Internal,
        "internal error: a batch doesn't match its element's spec; please report it",
    )
}
