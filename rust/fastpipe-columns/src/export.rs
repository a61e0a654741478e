//! Exports batches as Arrow record batches that share their memory.
//!
//! Most parts of a batch already have Arrow's layout (numbers, offsets, bytes of strings), so their buffers are passed
//! without a copy. Four kinds of data have another layout and are copied:
//!
//! - bools and masks, which Arrow packs into bits,
//! - indices of sparse columns with several dimensions, which Arrow stores in one array per dimension,
//! - dates, which Arrow counts in 32 bits,
//! - integers that represent decimals, which Arrow stores in 128 or 256 bits.
//!
//! The type of a column depends on its [`ColumnSpec`] but not on the masks. Masks depend on the files, and a schema
//! must not. So each level is nullable.
#![allow(unsafe_code)] // One block: validating data that the engine has just made takes as long as all other work.

use std::collections::{HashMap, HashSet};
use std::sync::Arc;

use arrow_array::{ArrayRef, RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, NullBuffer, i256};
use arrow_data::ArrayData;
use arrow_schema::{DECIMAL128_MAX_PRECISION, DataType, Field, FieldRef, Fields, Schema, SchemaRef};
use bytes::Bytes;
use fastpipe_batch::{
    ColumnSpec, DType, Error, ErrorKind, Form, Leaf, NestedForm, Result, Slab, SparseForm, SparseLayout, TimeUnit,
    try_collect, try_with_capacity,
};

use crate::types::arrow;

/// Names the memory for copied columns in out-of-memory errors.
const COPIED: &str = "columns with another layout in Arrow; a smaller batch_size needs less";

/// Converts the memory of a batch to a buffer, which owns it until the last slice is dropped.
pub fn buffer(slab: Slab) -> Buffer {
    Buffer::from(Bytes::from_owner(slab))
}

/// Returns the schema of batches with these columns. If `valid` is a name, a bool column with that name is appended.
pub fn schema(columns: &[ColumnSpec], valid: Option<&str>, metadata: HashMap<String, String>) -> Result<SchemaRef> {
    let mut fields = try_with_capacity(columns.len() + 1, "columns")?;
    for column in columns {
        let ty = type_of(&column.form, column.scale).map_err(|error| error.at_feature(&column.name))?;
        fields.push(Field::new(&*column.name, ty, true));
    }
    fields.extend(valid.map(|name| Field::new(name, DataType::Boolean, true)));
    Ok(Arc::new(Schema::new_with_metadata(fields, metadata)))
}

fn item(ty: DataType) -> FieldRef {
    Arc::new(Field::new_list_field(ty, true))
}

/// Returns the decimal type with `scale` decimal places that can represent all integers of a dtype.
fn decimal_type(dtype: DType, scale: i8) -> Option<DataType> {
    let digits = match dtype {
        DType::I8 | DType::U8 => 3,
        DType::I16 | DType::U16 => 5,
        DType::I32 | DType::U32 => 10,
        DType::I64 => 19,
        DType::U64 => 20,
        _ => return None,
    };
    let digits = u8::try_from(scale).unwrap_or(0).max(digits);
    Some(match digits <= DECIMAL128_MAX_PRECISION {
        true => DataType::Decimal128(digits, scale),
        false => DataType::Decimal256(digits, scale),
    })
}

fn leaf_type(leaf: Leaf, scale: Option<i8>) -> Result<DataType> {
    if let (Leaf::Fixed(dtype), Some(scale)) = (leaf, scale) {
        let none = || Error::new(ErrorKind::Internal, format!("{dtype} cannot represent decimals"));
        return decimal_type(dtype, scale).ok_or_else(none);
    }
    match leaf {
        Leaf::Fixed(DType::Timedelta(TimeUnit::Days)) => {
            let reason = "Arrow does not support durations in days; request timedelta64[s]";
            Err(Error::new(ErrorKind::Unsupported, reason))
        }
        leaf => Ok(arrow(leaf)),
    }
}

fn type_of(form: &Form, scale: Option<i8>) -> Result<DataType> {
    match form {
        Form::Nested(form) => {
            let mut ty = leaf_type(form.leaf, scale)?;
            for &size in form.shape.iter().rev() {
                let size = i32::try_from(size).map_err(|_| {
                    let reason = format!("an Arrow fixed-size list must have fewer than 2**31 items; got {size}");
                    Error::new(ErrorKind::Limit, reason)
                })?;
                ty = DataType::FixedSizeList(item(ty), size);
            }
            Ok((0..form.ragged).fold(ty, |ty, _| DataType::LargeList(item(ty))))
        }
        Form::Sparse(form) => {
            let list = |name: String, ty| Field::new(name, DataType::LargeList(item(ty)), true);
            let indices = (0..form.shape.len()).map(|i| list(format!("indices{i}"), DataType::Int64));
            let values = list("values".into(), leaf_type(form.leaf, scale)?);
            Ok(DataType::Struct(indices.chain([values]).collect()))
        }
    }
}

/// Exports a batch with these columns. `schema` must be the result of [`schema`], and `parts` must be in the order of
/// the columns. If the schema has the additional bool column, it contains `is_valid` of each row. In the columns named
/// in `nan_is_null`, NaN is exported as null.
pub fn to_record_batch(
    schema: &SchemaRef,
    columns: &[ColumnSpec],
    parts: impl Iterator<Item = Buffer>,
    rows: usize,
    is_valid: impl Fn(usize) -> bool,
    nan_is_null: &HashSet<String>,
) -> Result<RecordBatch> {
    let mut exporter = Exporter {
        parts,
        rows,
        nan_is_null: false,
    };
    let mut arrays: Vec<ArrayRef> = try_with_capacity(schema.fields.len(), "columns")?;
    let mut fields = schema.fields.iter();
    for (column, field) in columns.iter().zip(fields.by_ref()) {
        exporter.nan_is_null = nan_is_null.contains(&*column.name);
        let array = match &column.form {
            Form::Nested(form) => exporter.nested(form, field.data_type()),
            Form::Sparse(form) => exporter.sparse(form, field.data_type()),
        };
        arrays.push(make_array(array.map_err(|error| error.at_feature(&column.name))?));
    }
    if fields.next().is_some() {
        let flags = BooleanBuffer::collect_bool(rows, is_valid);
        arrays.push(make_array(array(
            &DataType::Boolean,
            rows,
            None,
            &[flags.into_inner()],
            &[],
        )));
    }
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    let batch = RecordBatch::try_new_with_options(schema.clone(), arrays, &options);
    batch.map_err(|error| {
        Error::new(
            ErrorKind::Internal,
            format!("a batch doesn't fit its Arrow schema: {error}"),
        )
    })
}

/// Creates an array of data that the engine has produced.
fn array(
    ty: &DataType,
    len: usize,
    nulls: Option<NullBuffer>,
    buffers: &[Buffer],
    children: &[ArrayData],
) -> ArrayData {
    let builder = ArrayData::builder(ty.clone()).len(len).nulls(nulls);
    let builder = builder.buffers(buffers.to_vec()).child_data(children.to_vec());
    // SAFETY: the callers check that buffers and children have the lengths that `len` requires, and that the last
    // offset is the end of the values. The engine computes offsets as sums of lengths, so they start at 0 and ascend.
    // Each string was checked to be UTF-8 when it was written. Slabs and their parts start at multiples of 64 bytes.
    unsafe { builder.build_unchecked() }
}

#[cold]
fn unfit(what: &str) -> Error {
    Error::new(ErrorKind::Internal, format!("{what} of a batch are inconsistent"))
}

/// Checks that the numbers are offsets, which begin with 0 and end with `end`. Returns the number of ranges.
fn offsets_of(buffer: &Buffer, end: usize) -> Result<usize> {
    let offsets = buffer.typed_data::<i64>();
    match offsets {
        [0, ..] if offsets.last().is_some_and(|&last| usize::try_from(last) == Ok(end)) => Ok(offsets.len() - 1),
        _ => Err(unfit("offsets and values")),
    }
}

/// Packs bools, one byte each, into bits.
fn packed(bools: &[u8]) -> Result<BooleanBuffer> {
    // Moves bit 0 of byte i to bit i of the highest byte.
    const GATHER: u64 = 0x0102_0408_1020_4080;
    const ONES: u64 = 0x0101_0101_0101_0101;
    let mut bits = try_with_capacity(bools.len().div_ceil(8), COPIED)?;
    let (eights, rest) = bools.as_chunks::<8>();
    let pack = |eight: [u8; 8]| ((u64::from_le_bytes(eight) & ONES).wrapping_mul(GATHER) >> 56) as u8;
    bits.extend(eights.iter().map(|eight| pack(*eight)));
    if !rest.is_empty() {
        let mut eight = [0; 8];
        eight[..rest.len()].copy_from_slice(rest);
        bits.push(pack(eight));
    }
    Ok(BooleanBuffer::new(bits.into(), 0, bools.len()))
}

fn nulls_of(mask: Option<&Buffer>, len: usize) -> Result<Option<NullBuffer>> {
    match mask {
        None => Ok(None),
        Some(mask) if mask.len() == len => Ok(Some(NullBuffer::new(packed(mask)?))),
        Some(_) => Err(unfit("masks and values")),
    }
}

/// Adds nulls for all values for which `there` returns false.
fn also_null(nulls: Option<NullBuffer>, len: usize, there: impl Fn(usize) -> bool) -> Option<NullBuffer> {
    let there = NullBuffer::new(BooleanBuffer::collect_bool(len, there));
    NullBuffer::union(nulls.as_ref(), Some(&there))
}

/// Adds nulls for all NaN values.
fn nulls_of_floats(of: DType, floats: &Buffer, nulls: Option<NullBuffer>) -> Option<NullBuffer> {
    fn found<T: ArrowNativeType>(
        floats: &Buffer,
        nulls: Option<NullBuffer>,
        is_nan: impl Fn(T) -> bool,
    ) -> Option<NullBuffer> {
        let floats = floats.typed_data::<T>();
        // Most batches contain no NaN. This detects that case without a branch per value.
        let mut chunks = floats.chunks(128);
        match chunks.any(|chunk| chunk.iter().fold(false, |any, &float| any | is_nan(float))) {
            true => also_null(nulls, floats.len(), |i| !is_nan(floats[i])),
            false => nulls,
        }
    }
    match of {
        DType::F16 => found(floats, nulls, |bits: u16| bits & 0x7fff > 0x7c00),
        DType::F32 => found(floats, nulls, f32::is_nan),
        DType::F64 => found(floats, nulls, f64::is_nan),
        _ => nulls,
    }
}

/// Converts times to Arrow's representation. NaT is exported as null.
fn times(of: DType, times: Buffer, nulls: Option<NullBuffer>) -> Result<(Buffer, Option<NullBuffer>)> {
    const NONE: i64 = i64::MIN;
    let numbers = times.typed_data::<i64>();
    let mut nulls = nulls;
    if numbers.contains(&NONE) {
        nulls = also_null(nulls, numbers.len(), |i| numbers[i] != NONE);
    }
    if of != DType::Datetime(TimeUnit::Days) {
        return Ok((times, nulls));
    }
    let mut days = try_with_capacity(numbers.len(), COPIED)?;
    for &number in numbers {
        let day = if number == NONE { 0 } else { number };
        days.push(i32::try_from(day).map_err(|_| {
            let reason = "the date is out of range for Arrow, which counts days in 32 bits; request datetime64[s]";
            Error::new(ErrorKind::ValueRange, reason)
        })?);
    }
    Ok((Buffer::from_vec(days), nulls))
}

/// Converts integers to decimals of a type.
fn decimals(dtype: DType, integers: &Buffer, ty: &DataType) -> Result<Buffer> {
    fn of<T: ArrowNativeType>(integers: &Buffer, ty: &DataType) -> Result<Buffer>
    where
        i128: From<T>,
    {
        let integers = integers.typed_data::<T>().iter().map(|&integer| i128::from(integer));
        Ok(match ty {
            DataType::Decimal128(..) => Buffer::from_vec(try_collect(integers, COPIED)?),
            _ => Buffer::from_vec(try_collect(integers.map(i256::from_i128), COPIED)?),
        })
    }
    match dtype {
        DType::I8 => of::<i8>(integers, ty),
        DType::U8 => of::<u8>(integers, ty),
        DType::I16 => of::<i16>(integers, ty),
        DType::U16 => of::<u16>(integers, ty),
        DType::I32 => of::<i32>(integers, ty),
        DType::U32 => of::<u32>(integers, ty),
        DType::I64 => of::<i64>(integers, ty),
        DType::U64 => of::<u64>(integers, ty),
        _ => Err(unfit("values and decimals")),
    }
}

/// Returns one level of lists. All lists of the level share the same offsets.
fn list(ty: &DataType, offsets: &Buffer, items: ArrayData, mask: Option<&Buffer>) -> Result<ArrayData> {
    let len = offsets_of(offsets, items.len())?;
    Ok(array(
        ty,
        len,
        nulls_of(mask, len)?,
        std::slice::from_ref(offsets),
        &[items],
    ))
}

/// Returns the types of all levels of lists, from the outermost to the values.
fn levels(ty: &DataType) -> Vec<&DataType> {
    let mut levels = vec![ty];
    let mut inner = ty;
    while let DataType::LargeList(item) | DataType::FixedSizeList(item, _) = inner {
        inner = item.data_type();
        levels.push(inner);
    }
    levels
}

/// Consumes the parts of a batch in the order of its columns.
struct Exporter<I> {
    parts: I,
    rows: usize,
    nan_is_null: bool,
}

impl<I: Iterator<Item = Buffer>> Exporter<I> {
    fn next(&mut self) -> Result<Buffer> {
        self.parts.next().ok_or_else(|| unfit("columns and parts"))
    }

    fn next_if(&mut self, wanted: bool) -> Result<Option<Buffer>> {
        wanted.then(|| self.next()).transpose()
    }

    fn nested(&mut self, form: &NestedForm, ty: &DataType) -> Result<ArrayData> {
        let types = levels(ty);
        let mut lists = Vec::with_capacity(form.ragged);
        for &masked in &form.masks[..form.ragged] {
            lists.push((self.next_if(masked)?, self.next()?));
        }
        let mask = self.next_if(form.leaf_mask.is_some())?;
        let rows = (form.ragged == 0).then_some(self.rows);
        let (leaf, shape) = (form.leaf, &form.shape[..]);
        let mut array = self.values(leaf, shape, rows, mask.zip(form.leaf_mask), &types[form.ragged..])?;
        for ((mask, offsets), ty) in lists.iter().zip(&types).rev() {
            array = list(ty, offsets, array, mask.as_ref())?;
        }
        Ok(array)
    }

    /// Exports values of shape `[n, *shape]`. `n` is the number of rows, or follows from the number of values. `types`
    /// contains the types of the lists of `shape` and of the values. `mask` includes the number of dimensions of the
    /// shape that it spans.
    fn values(
        &mut self,
        leaf: Leaf,
        shape: &[usize],
        rows: Option<usize>,
        mask: Option<(Buffer, usize)>,
        types: &[&DataType],
    ) -> Result<ArrayData> {
        let width: usize = shape.iter().product();
        let part = self.next()?;
        let count = |elements: usize| rows.unwrap_or(elements.checked_div(width).unwrap_or(0));
        let nulls = |dims: usize, len: usize| {
            let mask = mask.as_ref().filter(|(_, spans)| *spans == dims);
            nulls_of(mask.map(|(mask, _)| mask), len)
        };
        let ty = types[shape.len()];
        let (n, mut values) = match leaf {
            Leaf::Fixed(dtype) => {
                let n = count(part.len() / dtype.size());
                let len = n.saturating_mul(width);
                if part.len() != len.saturating_mul(dtype.size()) {
                    return Err(unfit("rows and values"));
                }
                let mut nulls = nulls(shape.len(), len)?;
                if self.nan_is_null {
                    nulls = nulls_of_floats(dtype, &part, nulls);
                }
                let (values, nulls) = match dtype {
                    dtype if ty.is_decimal() => (decimals(dtype, &part, ty)?, nulls),
                    DType::Bool => (packed(&part)?.into_inner(), nulls),
                    dtype if dtype.is_time() => times(dtype, part, nulls)?,
                    _ => (part, nulls),
                };
                (n, array(ty, len, nulls, &[values], &[]))
            }
            Leaf::Bytes { .. } => {
                let bytes = self.next()?;
                let len = offsets_of(&part, bytes.len())?;
                let n = count(len);
                if n.saturating_mul(width) != len {
                    return Err(unfit("rows and strings"));
                }
                (n, array(ty, len, nulls(shape.len(), len)?, &[part, bytes], &[]))
            }
        };
        for dims in (0..shape.len()).rev() {
            let len = n * shape[..dims].iter().product::<usize>();
            values = array(types[dims], len, nulls(dims, len)?, &[], &[values]);
        }
        Ok(values)
    }

    /// Exports a struct of lists: one list per dimension and one for the values. All lists share the same offsets.
    fn sparse(&mut self, form: &SparseForm, ty: &DataType) -> Result<ArrayData> {
        let DataType::Struct(fields) = ty else {
            return Err(unfit("columns and types"));
        };
        if form.layout != SparseLayout::Csr {
            return Err(unfit("layouts of sparse columns"));
        }
        let mask = self.next_if(form.mask)?;
        let (offsets, coordinates) = (self.next()?, self.next()?);
        let types: Vec<_> = fields.iter().map(|field| levels(field.data_type())).collect();
        let mut items = indices_of(coordinates, form.shape.len(), fields)?;
        let leaf = types.last().map_or(&[][..], |types| &types[1..]);
        items.push(self.values(form.leaf, &[], None, None, leaf)?);
        let lists = items.into_iter().zip(&types);
        let lists = lists.map(|(items, types)| list(types[0], &offsets, items, None));
        let lists: Vec<ArrayData> = lists.collect::<Result<_>>()?;
        let rows = lists.first().map_or(0, ArrayData::len);
        Ok(array(ty, rows, nulls_of(mask.as_ref(), rows)?, &[], &lists))
    }
}

/// Returns the indices of each dimension.
fn indices_of(coordinates: Buffer, dimensions: usize, fields: &Fields) -> Result<Vec<ArrayData>> {
    let ty = &DataType::Int64;
    let mut indices = try_with_capacity(fields.len(), "columns")?;
    if dimensions == 1 {
        let len = coordinates.len() / DType::I64.size();
        indices.push(array(ty, len, None, &[coordinates], &[]));
        return Ok(indices);
    }
    let numbers = coordinates.typed_data::<i64>();
    for dimension in 0..dimensions {
        let mut of: Vec<i64> = try_with_capacity(numbers.len() / dimensions, COPIED)?;
        of.extend(numbers.iter().skip(dimension).step_by(dimensions));
        indices.push(array(ty, of.len(), None, &[Buffer::from_vec(of)], &[]));
    }
    Ok(indices)
}

#[cfg(test)]
mod tests {
    use arrow_array::cast::AsArray;
    use arrow_array::types::{Decimal128Type, Decimal256Type, Float32Type, Int64Type, TimestampSecondType};
    use arrow_array::{Array, Int64Array};
    use fastpipe_batch::SlabPool;
    use proptest::prelude::*;

    use super::*;

    fn column(form: Form) -> ColumnSpec {
        ColumnSpec::new("x", form)
    }

    fn numbers(numbers: &[i64]) -> Buffer {
        Buffer::from_vec(numbers.to_vec())
    }

    fn bools(bools: &[u8]) -> Buffer {
        Buffer::from_vec(bools.to_vec())
    }

    fn exported(form: Form, parts: Vec<Buffer>, rows: usize) -> Result<ArrayRef> {
        let columns = [column(form)];
        let schema = schema(&columns, None, HashMap::new())?;
        let batch = to_record_batch(&schema, &columns, parts.into_iter(), rows, |_| true, &HashSet::new())?;
        let array = batch.column(0).clone();
        array.to_data().validate_full().unwrap();
        Ok(array)
    }

    /// The form of lists of pairs of strings, with a mask at each level.
    fn texts() -> NestedForm {
        NestedForm {
            ragged: 1,
            shape: vec![2],
            leaf: Leaf::Bytes { utf8: true },
            masks: vec![true],
            leaf_mask: Some(1),
        }
    }

    #[test]
    fn nothing_is_copied_if_layouts_match() {
        let (offsets, ends, text) = (numbers(&[0, 2, 2]), numbers(&[0, 1, 1, 3, 4]), bools("aöb".as_bytes()));
        let parts = vec![
            bools(&[1, 0]),
            offsets.clone(),
            bools(&[1, 0, 1, 1]),
            ends.clone(),
            text.clone(),
        ];
        let array = exported(Form::Nested(texts()), parts, 2).unwrap();
        let lists = array.as_list::<i64>();
        assert!(lists.is_valid(0) && lists.is_null(1));
        let strings = lists.values().as_fixed_size_list().values().as_string::<i64>().clone();
        let found: Vec<_> = strings.iter().collect();
        assert_eq!(found, [Some("a"), None, Some("ö"), Some("b")]);
        assert_eq!(lists.offsets().inner().inner().as_ptr(), offsets.as_ptr());
        assert_eq!(strings.offsets().inner().inner().as_ptr(), ends.as_ptr());
        assert_eq!(strings.values().as_ptr(), text.as_ptr());
    }

    #[test]
    fn sparse_columns_are_structs_of_lists() {
        let form = |dims: usize| {
            Form::Sparse(SparseForm {
                layout: SparseLayout::Csr,
                shape: vec![None; dims],
                leaf: Leaf::Fixed(DType::F32),
                mask: true,
            })
        };
        let (offsets, values) = (numbers(&[0, 0, 2]), Buffer::from_vec(vec![0.5f32, 1.5]));
        for (dims, coordinates) in [(1, numbers(&[7, 8])), (2, numbers(&[7, 1, 8, 2]))] {
            let parts = vec![bools(&[0, 1]), offsets.clone(), coordinates.clone(), values.clone()];
            let array = exported(form(dims), parts, 2).unwrap();
            let array = array.as_struct();
            assert!(array.is_null(0) && array.is_valid(1));
            let first = array.column_by_name("indices0").unwrap().as_list::<i64>();
            assert_eq!(first.values().as_primitive::<Int64Type>().values()[..], [7, 8]);
            assert_eq!(
                dims == 1,
                first.values().to_data().buffers()[0].as_ptr() == coordinates.as_ptr()
            );
            if dims == 2 {
                let second = array.column_by_name("indices1").unwrap().as_list::<i64>();
                assert_eq!(second.values().as_primitive::<Int64Type>().values()[..], [1, 2]);
            }
            let found = array.column_by_name("values").unwrap().as_list::<i64>();
            let found = found.values().as_primitive::<Float32Type>();
            assert_eq!(found.values().inner().as_ptr(), values.as_ptr());
        }
    }

    #[test]
    fn nat_is_null() {
        let of = |unit| Form::Nested(NestedForm::dense(&[2], Leaf::Fixed(DType::Datetime(unit))));
        let times = numbers(&[5, i64::MIN, -7, 8]);
        let seconds = exported(of(TimeUnit::Seconds), vec![times.clone()], 2).unwrap();
        let seconds = seconds
            .as_fixed_size_list()
            .values()
            .as_primitive::<TimestampSecondType>()
            .clone();
        assert_eq!(seconds.iter().collect::<Vec<_>>(), [Some(5), None, Some(-7), Some(8)]);
        let days = exported(of(TimeUnit::Days), vec![times], 2).unwrap();
        assert_eq!(days.as_fixed_size_list().values().null_count(), 1);
        let error = exported(of(TimeUnit::Days), vec![numbers(&[0, 1 << 31])], 1).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::ValueRange);
    }

    #[test]
    fn nan_is_null_only_in_the_given_columns() {
        let halves = vec![0x3c00u16, 0x7e00, 0xfc01, 0x7c00];
        let floats = vec![1.0, f32::NAN, -f32::NAN, f32::INFINITY];
        let doubles: Vec<f64> = floats.iter().map(|&float| float.into()).collect();
        for (dtype, values) in [
            (DType::F16, Buffer::from_vec(halves)),
            (DType::F32, Buffer::from_vec(floats)),
            (DType::F64, Buffer::from_vec(doubles)),
        ] {
            let form = NestedForm {
                leaf_mask: Some(0),
                ..NestedForm::dense(&[], Leaf::Fixed(dtype))
            };
            let columns = [column(Form::Nested(form))];
            let schema = schema(&columns, None, HashMap::new()).unwrap();
            for (name, nulls) in [("x", [true, true, true, false]), ("y", [true, false, false, false])] {
                let parts = [bools(&[0, 1, 1, 1]), values.clone()].into_iter();
                let batch =
                    to_record_batch(&schema, &columns, parts, 4, |_| true, &HashSet::from([name.into()])).unwrap();
                let array = batch.column(0);
                array.to_data().validate_full().unwrap();
                assert_eq!([0, 1, 2, 3].map(|i| array.is_null(i)), nulls);
                assert_eq!(array.to_data().buffers()[0].as_ptr(), values.as_ptr());
            }
        }
    }

    #[test]
    fn integers_with_a_scale_are_decimals() {
        let form = Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)));
        for (scale, ty) in [
            (2, DataType::Decimal128(19, 2)),
            (-3, DataType::Decimal128(19, -3)),
            (38, DataType::Decimal128(38, 38)),
            (39, DataType::Decimal256(39, 39)),
        ] {
            let mut column = column(form.clone());
            column.scale = Some(scale);
            let columns = [column];
            let schema = schema(&columns, None, HashMap::new()).unwrap();
            assert_eq!(*schema.field(0).data_type(), ty);
            let parts = [numbers(&[-5, i64::MAX])];
            let batch = to_record_batch(&schema, &columns, parts.into_iter(), 2, |_| true, &HashSet::new()).unwrap();
            let found = batch.column(0);
            found.to_data().validate_full().unwrap();
            let wide: Vec<i128> = match ty {
                DataType::Decimal128(..) => found.as_primitive::<Decimal128Type>().values().to_vec(),
                _ => {
                    let values = found.as_primitive::<Decimal256Type>().values();
                    values.iter().map(|value| value.as_i128()).collect()
                }
            };
            assert_eq!(wide, [-5, i128::from(i64::MAX)]);
        }
    }

    #[test]
    fn padding_rows_are_not_valid() {
        let columns = [column(Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64))))];
        let schema = schema(&columns, Some("valid"), HashMap::new()).unwrap();
        let batch = to_record_batch(
            &schema,
            &columns,
            [numbers(&[1, 2, 3])].into_iter(),
            3,
            |row| row < 2,
            &HashSet::new(),
        )
        .unwrap();
        let flags: Vec<_> = batch.column(1).as_boolean().iter().collect();
        assert_eq!(flags, [Some(true), Some(true), Some(false)]);
    }

    #[test]
    fn parts_that_do_not_fit_are_refused() {
        let dense = || Form::Nested(NestedForm::dense(&[], Leaf::Fixed(DType::I64)));
        let text = || Form::Nested(NestedForm::dense(&[], Leaf::Bytes { utf8: true }));
        for (form, parts) in [
            (dense(), vec![]),
            (dense(), vec![numbers(&[1])]),
            (text(), vec![numbers(&[0, 1, 2]), bools(b"a")]),
            (text(), vec![numbers(&[1, 1, 1]), bools(b"a")]),
            (text(), vec![numbers(&[0, 1]), bools(b"a")]),
            (text(), vec![numbers(&[]), bools(b"")]),
        ] {
            assert_eq!(exported(form, parts, 2).unwrap_err().kind(), ErrorKind::Internal);
        }
    }

    #[test]
    fn a_slab_lives_as_long_as_its_arrow_arrays() {
        let pool = SlabPool::new(1);
        let slab = pool.take(16).unwrap();
        let start = slab.as_ptr().cast_const();
        let whole = buffer(slab);
        let part = whole.slice_with_length(8, 8);
        drop(whole);
        assert_ne!(pool.take(16).unwrap().as_ptr().cast_const(), start);
        drop(part);
        assert_eq!(pool.take(16).unwrap().as_ptr().cast_const(), start);
    }

    proptest! {
        #[test]
        fn bools_are_packed_in_their_order(values in proptest::collection::vec(any::<bool>(), 0..70)) {
            let bytes: Vec<u8> = values.iter().map(|&value| value.into()).collect();
            let bits = packed(&bytes).unwrap();
            prop_assert_eq!(bits.iter().collect::<Vec<_>>(), values.clone());
            let form = NestedForm { leaf_mask: Some(0), ..NestedForm::dense(&[], Leaf::Fixed(DType::I64)) };
            let numbers: Vec<i64> = (0..values.len() as i64).collect();
            let parts = vec![Buffer::from_vec(bytes), Buffer::from_vec(numbers.clone())];
            let wanted: Int64Array = numbers.iter().zip(&values).map(|(&n, &there)| there.then_some(n)).collect();
            let found = exported(Form::Nested(form), parts, values.len()).unwrap();
            prop_assert_eq!(found.as_primitive::<Int64Type>(), &wanted);
        }
    }
}
