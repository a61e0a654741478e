//! Imports arrays of other libraries as arrays of the arrow crates.

use arrow_array::{RecordBatch, RecordBatchOptions, make_array};
use arrow_buffer::{BooleanBufferBuilder, NullBuffer};
use arrow_data::ArrayData;
use arrow_schema::{ArrowError, DataType, SchemaRef};
use fastpipe_batch::{Error, ErrorKind, Result};

fn malformed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

/// Converts data from Arrow's C data interface, a struct of the columns, to a record batch.
pub fn record_batch(schema: &SchemaRef, data: ArrayData) -> Result<RecordBatch> {
    let rows = data.len();
    let data = without_offsets(data).map_err(|error| malformed(&error))?;
    if data.null_count() > 0 {
        let reason = "rows of the table are null as a whole, which is not supported; flatten its structs";
        return Err(Error::new(ErrorKind::Unsupported, reason));
    }
    let columns = data.child_data().iter().map(|column| make_array(column.clone()));
    let options = RecordBatchOptions::new().with_row_count(Some(rows));
    RecordBatch::try_new_with_options(schema.clone(), columns.collect(), &options).map_err(|error| malformed(&error))
}

/// Returns the number of child rows per row for types whose children the arrow crates slice together with the parent.
/// Returns `None` for other types.
fn rows_below(data: &ArrayData) -> Option<usize> {
    match data.data_type() {
        DataType::Struct(_) => Some(1),
        DataType::FixedSizeList(_, size) => Some(usize::try_from(*size).unwrap_or(0)),
        _ => None,
    }
}

/// Removes the offsets of structs and fixed-size lists by slicing their children. The arrow crates slice the children
/// of a sliced struct twice: in `ArrayData::slice` and again in `StructArray::from`. So arrays must not have offsets
/// when they reach that code.
fn without_offsets(data: ArrayData) -> Result<ArrayData, ArrowError> {
    if data.is_empty() {
        // The crates report the offsets of an empty array as damage because they don't copy its values.
        return Ok(ArrayData::new_empty(data.data_type()));
    }
    if let DataType::Dictionary(_, values) = data.data_type()
        && !values.is_nested()
    {
        // Its keys are checked later, when the nulls above them are known.
        data.validate()?;
        return Ok(data);
    }
    let children = data.child_data().iter().cloned().map(without_offsets);
    let children = children.collect::<Result<_, _>>()?;
    match rows_below(&data) {
        Some(below) => from_children(&data, children, data.nulls().cloned(), data.offset(), data.len(), below),
        None => data.into_builder().child_data(children).build(),
    }
}

/// Returns some rows of an array that was returned by `without_offsets`.
fn slice(data: &ArrayData, offset: usize, len: usize) -> Result<ArrayData, ArrowError> {
    if offset.checked_add(len).is_none_or(|end| end > data.len()) {
        return Err(ArrowError::InvalidArgumentError(format!(
            "{len} rows from row {offset} on exceed a child array of length {}",
            data.len()
        )));
    }
    match rows_below(data) {
        _ if len == 0 => Ok(ArrayData::new_empty(data.data_type())),
        Some(below) => {
            let nulls = data.nulls().map(|nulls| nulls.slice(offset, len));
            from_children(data, data.child_data().to_vec(), nulls, offset, len, below)
        }
        None => Ok(data.slice(offset, len)),
    }
}

/// Creates an array without an offset from the given rows of its children.
fn from_children(
    like: &ArrayData,
    children: Vec<ArrayData>,
    nulls: Option<NullBuffer>,
    offset: usize,
    len: usize,
    below: usize,
) -> Result<ArrayData, ArrowError> {
    let (from, rows) = (offset.saturating_mul(below), len.saturating_mul(below));
    let above = nulls.as_ref().filter(|nulls| nulls.null_count() > 0);
    let above = above.map(|nulls| if below == 1 { nulls.clone() } else { nulls.expand(below) });
    let children = children.iter().map(|child| match &above {
        Some(above) if rows > 0 => below_nulls(slice(child, from, rows)?, above),
        _ => slice(child, from, rows),
    });
    let builder = ArrayData::builder(like.data_type().clone()).len(len).nulls(nulls);
    builder.child_data(children.collect::<Result<_, _>>()?).build()
}

/// Adds the nulls of outer levels down to dictionaries. A key of a null row may be out of range of the dictionary.
fn below_nulls(data: ArrayData, above: &NullBuffer) -> Result<ArrayData, ArrowError> {
    let Some(nulls) = NullBuffer::union(Some(above), data.nulls()) else {
        return Ok(data);
    };
    if matches!(data.data_type(), DataType::Dictionary(..)) {
        let nulls = from_offset(&nulls, data.offset());
        return data.into_builder().nulls(Some(nulls)).build();
    }
    let Some(below) = rows_below(&data) else {
        return Ok(data);
    };
    let inner = if below == 1 { nulls.clone() } else { nulls.expand(below) };
    let children = data.child_data().iter().map(|child| below_nulls(child.clone(), &inner));
    let children: Vec<ArrayData> = children.collect::<Result<_, _>>()?;
    data.into_builder().nulls(Some(nulls)).child_data(children).build()
}

/// Returns the same nulls in a buffer with `offset` valid values before them. The crates require this for sliced
/// arrays.
fn from_offset(nulls: &NullBuffer, offset: usize) -> NullBuffer {
    let mut valid = BooleanBufferBuilder::new(offset + nulls.len());
    valid.append_n(offset, true);
    valid.append_buffer(nulls.inner());
    NullBuffer::new(valid.finish().slice(offset, nulls.len()))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::Int16Type;
    use arrow_array::{Array, ArrayRef, DictionaryArray, FixedSizeListArray, Int32Array, StructArray};
    use arrow_schema::{Field, Schema};
    use proptest::prelude::*;

    use super::*;

    fn within(name: &str, array: ArrayRef) -> ArrayRef {
        let field = Arc::new(Field::new(name, array.data_type().clone(), true));
        Arc::new(StructArray::from(vec![(field, array)]))
    }

    /// Slices an array in the style of other libraries: with an offset in the parent and unsliced children.
    fn with_offset(array: &dyn Array, offset: usize, len: usize) -> ArrayData {
        let builder = array.to_data().into_builder().offset(offset).len(len);
        builder.build().unwrap()
    }

    fn numbers(array: &ArrayRef) -> Vec<i32> {
        match array.data_type() {
            DataType::Struct(_) => numbers(array.as_any().downcast_ref::<StructArray>().unwrap().column(0)),
            DataType::FixedSizeList(..) => {
                numbers(array.as_any().downcast_ref::<FixedSizeListArray>().unwrap().values())
            }
            _ => array.as_any().downcast_ref::<Int32Array>().unwrap().values().to_vec(),
        }
    }

    /// Keys of null rows may have any value, including when the array starts at an offset.
    #[test]
    fn sliced_dictionaries_below_nulls_keep_their_rows() {
        for from in 0..9 {
            let keys = (0..10)
                .map(|at| ["a", "b"][at % 2])
                .collect::<DictionaryArray<Int16Type>>();
            let field = Arc::new(Field::new("item", keys.data_type().clone(), true));
            let nulls = NullBuffer::from_iter((0..10).map(|at| at % 3 != 0));
            let lists = FixedSizeListArray::new(field, 1, Arc::new(keys), Some(nulls.clone()));
            let builder = lists.to_data().into_builder().offset(from).len(10 - from);
            let column = builder.nulls(Some(nulls.slice(from, 10 - from))).build().unwrap();
            let schema = Arc::new(Schema::new(vec![Field::new("a", lists.data_type().clone(), true)]));
            let ty = DataType::Struct(schema.fields.clone());
            let table = ArrayData::builder(ty)
                .len(10 - from)
                .child_data(vec![column])
                .build()
                .unwrap();
            let batch = record_batch(&schema, table).unwrap();
            assert_eq!(batch.column(0).as_ref(), &lists.slice(from, 10 - from) as &dyn Array);
        }
    }

    proptest! {
        /// A slice of nested structs and fixed-size lists has the expected rows at any depth.
        #[test]
        fn slices_of_nested_columns_have_their_rows(kinds in prop::collection::vec(any::<bool>(), 0..4), from in 0..5usize, len in 0..5usize) {
            let lists = kinds.iter().filter(|&&list| list).count();
            let width = 1 << lists;
            let mut array: ArrayRef = Arc::new(Int32Array::from_iter_values(0..10 * width));
            for list in kinds {
                array = if list {
                    let field = Arc::new(Field::new("item", array.data_type().clone(), true));
                    Arc::new(FixedSizeListArray::new(field, 2, array, None))
                } else {
                    within("p", array)
                };
            }
            let column = with_offset(&array, from, len);
            let schema = Arc::new(Schema::new(vec![Field::new("a", array.data_type().clone(), true)]));
            let ty = DataType::Struct(schema.fields.clone());
            let table = ArrayData::builder(ty).len(len).child_data(vec![column]).build().unwrap();
            let batch = record_batch(&schema, table).unwrap();
            prop_assert_eq!(batch.num_rows(), len);
            let (first, end) = (from as i32 * width, (from + len) as i32 * width);
            prop_assert_eq!(numbers(batch.column(0)), (first..end).collect::<Vec<_>>());
        }
    }
}
