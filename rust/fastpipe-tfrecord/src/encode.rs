//! Encodes Arrow record batches as records of `tf.train.Example` messages.
//!
//! A column is a feature. Integers and bools are an `int64_list`, floats a `float_list`, and text and bytes a
//! `bytes_list`. Lists, also those within lists of a fixed size, are flattened, because a feature has one list of
//! values. Fields of structs are features of their own, with the names of all levels joined by dots. A null row of a
//! column is left out of its Example.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::types::{Float32Type, Float64Type, Int64Type};
use arrow_array::{Array, ArrayRef, FixedSizeListArray, LargeListArray, RecordBatch, StructArray};
use arrow_buffer::NullBuffer;
use arrow_cast::{CastOptions, cast_with_options};
use arrow_schema::DataType;
use fastpipe_batch::{Error, ErrorKind, Result, try_reserve};

use crate::framing::frame;

/// Tags of length-delimited fields.
const FIRST: u8 = 0x0a;
const SECOND: u8 = 0x12;
const THIRD: u8 = 0x1a;

/// Appends the records of a batch to `out`, framed for a file.
///
/// # Errors
/// [`ErrorKind::Unsupported`] if a feature can't hold the values of a column; [`ErrorKind::ValueRange`] if a number
/// doesn't fit; [`ErrorKind::Null`] if a list has a null item; [`ErrorKind::Limit`] if a record is too large.
pub fn encode(batch: &RecordBatch, out: &mut Vec<u8>) -> Result<()> {
    let mut columns = Vec::new();
    for (field, array) in batch.schema().fields().iter().zip(batch.columns()) {
        flatten(field.name().clone(), array, &mut columns)?;
    }
    let (mut features, mut list) = (Vec::new(), Vec::new());
    for row in 0..batch.num_rows() {
        features.clear();
        for column in &columns {
            column
                .append(row, &mut list, &mut features)
                .map_err(|error| error.at_feature(&column.name))?;
        }
        // The data begins with the tag and the length of the features.
        let mut start = Vec::with_capacity(11);
        start.push(FIRST);
        varint(features.len() as u64, &mut start);
        try_reserve(&mut start, features.len(), "a record")?;
        start.extend_from_slice(&features);
        let (head, tail) = frame(&start).map_err(|error| error.at_record(row as u64))?;
        try_reserve(out, head.len() + start.len() + tail.len(), "records")?;
        out.extend_from_slice(&head);
        out.extend_from_slice(&start);
        out.extend_from_slice(&tail);
    }
    Ok(())
}

/// The values of a feature in all rows.
struct Column {
    name: String,
    /// The lists around the values, from the outermost. Their offsets delimit the values of a row.
    levels: Vec<Level>,
    values: Values,
}

enum Level {
    List(LargeListArray),
    Fixed(FixedSizeListArray),
}

enum Values {
    Ints(ArrayRef),
    Floats(ArrayRef),
    Bytes(ArrayRef),
}

impl Values {
    fn array(&self) -> &ArrayRef {
        match self {
            Values::Ints(array) | Values::Floats(array) | Values::Bytes(array) => array,
        }
    }
}

/// Adds the features of a column.
fn flatten(name: String, array: &ArrayRef, columns: &mut Vec<Column>) -> Result<()> {
    match array.data_type() {
        DataType::Struct(fields) => {
            let array: &StructArray = array.as_struct();
            for (field, child) in fields.iter().zip(array.columns()) {
                let child = masked(child, array).map_err(|error| error.at_feature(&name))?;
                flatten(format!("{name}.{}", field.name()), &child, columns)?;
            }
            Ok(())
        }
        _ => {
            let column = column(&name, array.clone()).map_err(|error| error.at_feature(&name))?;
            columns.push(column);
            Ok(())
        }
    }
}

/// Returns a child of a struct in which the struct's null rows are null.
fn masked(child: &ArrayRef, parent: &StructArray) -> Result<ArrayRef> {
    let nulls = NullBuffer::union(child.nulls(), parent.nulls());
    let data = child.to_data().into_builder().nulls(nulls).build();
    Ok(arrow_array::make_array(data.map_err(|error| inconsistent(&error))?))
}

fn inconsistent(error: &arrow_schema::ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

fn column(name: &str, array: ArrayRef) -> Result<Column> {
    let (mut levels, mut array) = (Vec::new(), array);
    loop {
        let kind = array.data_type().clone();
        match &kind {
            DataType::List(item) | DataType::ListView(item) | DataType::LargeListView(item) => {
                array = cast(&array, &DataType::LargeList(item.clone()))?;
            }
            DataType::LargeList(_) if !levels.is_empty() => {
                let reason = "a feature has one list of values, so lists within lists can't be told apart: write the lengths as a \
                              column of their own";
                return Err(Error::new(ErrorKind::Unsupported, reason));
            }
            DataType::LargeList(_) => {
                let list = array.as_list::<i64>().clone();
                array = list.values().clone();
                levels.push(Level::List(list));
            }
            DataType::FixedSizeList(_, _) => {
                let list = array.as_fixed_size_list().clone();
                array = list.values().clone();
                levels.push(Level::Fixed(list));
            }
            DataType::Dictionary(_, values) => array = cast(&array, values)?,
            DataType::RunEndEncoded(_, values) => array = cast(&array, values.data_type())?,
            _ => break,
        }
    }
    Ok(Column {
        name: name.to_owned(),
        levels,
        values: values(&array)?,
    })
}

fn values(array: &ArrayRef) -> Result<Values> {
    use DataType as D;
    Ok(match array.data_type() {
        D::Boolean | D::Int8 | D::Int16 | D::Int32 | D::Int64 | D::UInt8 | D::UInt16 | D::UInt32 | D::UInt64 => {
            Values::Ints(cast(array, &D::Int64)?)
        }
        D::Float16 | D::Float32 => Values::Floats(cast(array, &D::Float32)?),
        D::Float64 => Values::Floats(narrowed(array)?),
        D::Utf8 | D::LargeUtf8 | D::Utf8View | D::Binary | D::LargeBinary | D::BinaryView | D::FixedSizeBinary(_) => {
            Values::Bytes(cast(array, &D::LargeBinary)?)
        }
        other => {
            let reason = format!(
                "tf.train.Example has no list of values of type {other}: convert the column to integers, floats, text or bytes"
            );
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
    })
}

/// Returns doubles as floats, of which only digits are lost.
fn narrowed(array: &ArrayRef) -> Result<ArrayRef> {
    let doubles = array.as_primitive::<Float64Type>();
    let floats = doubles.try_unary::<_, Float32Type, Error>(|value| {
        let float = value as f32;
        if float.is_infinite() && value.is_finite() {
            let reason = format!("{value} doesn't fit a float_list, whose values are float32");
            return Err(Error::new(ErrorKind::ValueRange, reason));
        }
        Ok(float)
    });
    Ok(Arc::new(floats?))
}

/// Converts an array, or returns an error if a value doesn't fit.
fn cast(array: &ArrayRef, kind: &DataType) -> Result<ArrayRef> {
    let options = CastOptions {
        safe: false,
        ..CastOptions::default()
    };
    cast_with_options(array, kind, &options).map_err(|error| Error::new(ErrorKind::ValueRange, error.to_string()))
}

impl Column {
    /// Appends the feature of a row, unless it is null. `list` is working memory.
    fn append(&self, row: usize, list: &mut Vec<u8>, features: &mut Vec<u8>) -> Result<()> {
        let Some(range) = self.range(row)? else { return Ok(()) };
        let values = self.values.array();
        if range.clone().any(|at| values.is_null(at)) {
            if self.levels.is_empty() {
                return Ok(());
            }
            let reason = "a list has a null item, which tf.train.Example can't represent: fill or drop it";
            return Err(Error::new(ErrorKind::Null, reason).at_record(row as u64));
        }
        list.clear();
        let tag = match &self.values {
            Values::Bytes(array) => {
                let array = array.as_binary::<i64>();
                for at in range {
                    let value = array.value(at);
                    list.push(FIRST);
                    varint(value.len() as u64, list);
                    try_reserve(list, value.len(), "a record")?;
                    list.extend_from_slice(value);
                }
                FIRST
            }
            Values::Floats(array) => {
                let floats = &array.as_primitive::<Float32Type>().values()[range];
                packed(floats.len() * 4, list)?;
                list.extend(floats.iter().flat_map(|value| value.to_le_bytes()));
                SECOND
            }
            Values::Ints(array) => {
                let ints = &array.as_primitive::<Int64Type>().values()[range];
                packed(ints.iter().map(|&value| length(value as u64)).sum(), list)?;
                ints.iter().for_each(|&value| varint(value as u64, list));
                THIRD
            }
        };
        // Feature { list }, in an entry { key, value }.
        let feature = 1 + length(list.len() as u64) + list.len();
        let entry = 1 + length(self.name.len() as u64) + self.name.len() + 1 + length(feature as u64) + feature;
        try_reserve(features, entry + 11, "a record")?;
        features.push(FIRST);
        varint(entry as u64, features);
        features.push(FIRST);
        varint(self.name.len() as u64, features);
        features.extend_from_slice(self.name.as_bytes());
        features.push(SECOND);
        varint(feature as u64, features);
        features.push(tag);
        varint(list.len() as u64, features);
        features.extend_from_slice(list);
        Ok(())
    }

    /// Returns the values of a row, or `None` if the row is null.
    fn range(&self, row: usize) -> Result<Option<std::ops::Range<usize>>> {
        let mut range = row..row + 1;
        for (depth, level) in self.levels.iter().enumerate() {
            let nulls = match level {
                Level::List(list) => list.nulls(),
                Level::Fixed(list) => list.nulls(),
            };
            if nulls.is_some_and(|nulls| range.clone().any(|at| nulls.is_null(at))) {
                if depth == 0 {
                    return Ok(None);
                }
                let reason = "a list has a null item, which tf.train.Example can't represent: fill or drop it";
                return Err(Error::new(ErrorKind::Null, reason).at_record(row as u64));
            }
            range = match level {
                Level::List(list) => {
                    let offsets = list.value_offsets();
                    offsets[range.start] as usize..offsets[range.end] as usize
                }
                Level::Fixed(list) => {
                    let n = list.value_length() as usize;
                    list.value_offset(range.start) as usize..list.value_offset(range.start) as usize + range.len() * n
                }
            };
        }
        Ok(Some(range))
    }
}

/// Begins packed numbers of this many bytes.
fn packed(bytes: usize, list: &mut Vec<u8>) -> Result<()> {
    if bytes > 0 {
        try_reserve(list, bytes + 11, "a record")?;
        list.push(FIRST);
        varint(bytes as u64, list);
    }
    Ok(())
}

/// Appends an integer.
fn varint(value: u64, out: &mut Vec<u8>) {
    let mut value = value;
    while value >= 0x80 {
        out.push(value as u8 | 0x80);
        value >>= 7;
    }
    out.push(value as u8);
}

/// Returns the number of bytes of an integer.
fn length(value: u64) -> usize {
    (64 - (value | 1).leading_zeros() as usize).div_ceil(7)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn integers_have_their_length(value in any::<u64>(), shift in 0..64) {
            let mut bytes = Vec::new();
            varint(value >> shift, &mut bytes);
            prop_assert_eq!(bytes.len(), length(value >> shift));
        }
    }
}
