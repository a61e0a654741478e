//! Converts arrays to the types of a schema. Columns are matched by name; lists, maps and records are converted level
//! by level, and leaves by `coerce_value`.
//!
//! In Arrow, an array may contain values that don't belong to any row: below a null list or struct, or outside of the
//! range of offsets. So each level knows which of its values are visible. Only visible nulls and values that don't fit
//! raise errors.

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{
    Array, ArrayRef, BooleanArray, FixedSizeListArray, GenericListArray, ListArray, MapArray, OffsetSizeTrait,
    StructArray, make_array, new_null_array,
};
use arrow_buffer::{BooleanBuffer, BooleanBufferBuilder, NullBuffer, OffsetBuffer};
use arrow_schema::{DataType, Field, FieldRef, Fields};
use fastpipe_batch::{Error, ErrorKind, Result};

use crate::coerce_value::{Leaf, Seen, coerce_value, first_seen, misfit, unpacked};
use crate::schema::{NullableType, Type};

fn malformed(error: &arrow_schema::ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

fn both(seen: &Seen, nulls: Option<&NullBuffer>) -> Seen {
    match (seen, nulls.filter(|nulls| nulls.null_count() > 0)) {
        (None, None) => None,
        (Some(seen), None) => Some(seen.clone()),
        (None, Some(nulls)) => Some(nulls.inner().clone()),
        (Some(seen), Some(nulls)) => Some(seen & nulls.inner()),
    }
}

/// Converts an array to the type of a field. `path` is the field's name in errors.
pub(crate) fn coerce(target: &NullableType, array: &ArrayRef, seen: &Seen, path: &str) -> Result<ArrayRef> {
    let array = unpacked(array)?;
    if *array.data_type() == DataType::Null && target.ty != Type::Null {
        if target.null.is_none() && first_seen(seen, array.len(), |_| true).is_some() {
            return Err(null_error(path));
        }
        return Ok(new_null_array(&empty_type(&target.ty), array.len()));
    }
    let fitted = match &target.ty {
        Type::Record(fields) => record(fields, &array, seen, path, target.null.is_some())?,
        Type::Array(item) => list(item, &array, seen, path)?,
        Type::Map(value) => map(value, &array, seen, path)?,
        _ => coerce_value(
            &Leaf {
                ty: &target.ty,
                path,
                seen: &both(seen, array.logical_nulls().as_ref()),
            },
            &array,
        )?,
    };
    if target.null.is_none()
        && target.ty != Type::Null
        && fitted.null_count() > 0
        && first_seen(seen, fitted.len(), |i| fitted.is_null(i)).is_some()
    {
        return Err(null_error(path));
    }
    Ok(fitted)
}

#[cold]
fn null_error(path: &str) -> Error {
    let reason = "found a null, which the schema doesn't allow; pass a schema in which the type is [\"null\", …]";
    Error::new(ErrorKind::Null, reason).at_feature(path)
}

/// Converts records. Columns are matched by name. `nullable` is whether the record itself may be null.
fn record(
    fields: &[(String, NullableType)],
    array: &ArrayRef,
    seen: &Seen,
    path: &str,
    nullable: bool,
) -> Result<ArrayRef> {
    let Some(found) = array.as_struct_opt() else {
        return Err(misfit(array, "records", path));
    };
    let nulls = found
        .nulls()
        .cloned()
        .or_else(|| nullable.then(|| no_record(fields, found)).flatten());
    let seen = both(seen, nulls.as_ref());
    let (fields, columns) = columns(fields, found.fields(), found.columns(), &seen, path)?;
    let made = StructArray::try_new_with_length(fields, columns, nulls, found.len());
    Ok(Arc::new(made.map_err(|error| malformed(&error))?))
}

/// Returns the rows in which all fields of a struct are null, although one of them isn't nullable. A nullable record
/// whose fields were read as separate columns looks like this.
fn no_record(fields: &[(String, NullableType)], found: &StructArray) -> Option<NullBuffer> {
    if fields
        .iter()
        .all(|(_, target)| target.null.is_some() || target.ty == Type::Null)
    {
        return None;
    }
    let mut present: Option<BooleanBuffer> = None;
    for column in found.columns() {
        let valid = column.logical_nulls()?;
        present = Some(present.map_or_else(|| valid.inner().clone(), |present| &present | valid.inner()));
    }
    present.map(NullBuffer::new)
}

/// Returns the fields of a record, in the order of the schema.
pub(crate) fn columns(
    wanted: &[(String, NullableType)],
    found: &Fields,
    arrays: &[ArrayRef],
    seen: &Seen,
    path: &str,
) -> Result<(Fields, Vec<ArrayRef>)> {
    let below = |name: &str| {
        if path.is_empty() {
            name.to_owned()
        } else {
            format!("{path}.{name}")
        }
    };
    let mut places = std::collections::HashMap::with_capacity(found.len());
    for (place, field) in found.iter().enumerate() {
        if places.insert(field.name().as_str(), place).is_some() {
            let reason = "two columns have this name: rename one";
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(&below(field.name())));
        }
    }
    let mut fields = Vec::with_capacity(wanted.len());
    let mut columns = Vec::with_capacity(wanted.len());
    for (name, target) in wanted {
        let path = below(name);
        let Some(place) = places.remove(name.as_str()) else {
            let reason = "the schema has this field, but the data has no such column: add it, or pass another schema";
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(&path));
        };
        let column = coerce(target, &arrays[place], seen, &path)?;
        fields.push(field(name, &column));
        columns.push(column);
    }
    if let Some(name) = places.keys().min() {
        let reason = "the data has this column, but the schema has no such field: leave it out, or pass another schema";
        return Err(Error::new(ErrorKind::Schema, reason).at_feature(&below(name)));
    }
    Ok((fields.into(), columns))
}

/// Returns a field with the type of its converted column. In Arrow, it is always nullable.
pub(crate) fn field(name: &str, column: &ArrayRef) -> Field {
    Field::new(name, column.data_type().clone(), true)
}

fn list(item: &NullableType, array: &ArrayRef, seen: &Seen, path: &str) -> Result<ArrayRef> {
    match array.data_type() {
        DataType::List(_) => offsets_list::<i32>(item, array.as_list(), seen, path),
        DataType::LargeList(_) => offsets_list::<i64>(item, array.as_list(), seen, path),
        DataType::ListView(inner) | DataType::LargeListView(inner) => {
            let plain =
                arrow_cast::cast(array, &DataType::LargeList(inner.clone())).map_err(|error| malformed(&error))?;
            offsets_list::<i64>(item, plain.as_list(), seen, path)
        }
        DataType::FixedSizeList(_, size) => {
            let lists = array.as_fixed_size_list();
            let width = usize::try_from(*size).unwrap_or(0);
            let visible = both(seen, lists.nulls()).map(|rows| spread(&rows, width));
            let values = aligned(coerce(item, lists.values(), &visible, path)?);
            let inner = Arc::new(field("item", &values));
            let made =
                FixedSizeListArray::try_new_with_length(inner, *size, values, lists.nulls().cloned(), lists.len());
            Ok(Arc::new(made.map_err(|error| malformed(&error))?))
        }
        _ => Err(misfit(array, "lists", path)),
    }
}

fn spread(rows: &BooleanBuffer, width: usize) -> BooleanBuffer {
    let mut out = BooleanBufferBuilder::new(rows.len() * width);
    for row in rows {
        out.append_n(width, row);
    }
    out.finish()
}

/// Returns which values belong to visible rows. The offsets must cover all values.
fn within<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>, rows: &Seen, values: usize) -> Seen {
    let rows = rows.as_ref()?;
    let mut out = BooleanBufferBuilder::new(values);
    for (row, pair) in rows.iter().zip(offsets.windows(2)) {
        out.append_n((pair[1] - pair[0]).as_usize(), row);
    }
    Some(out.finish())
}

/// Returns offsets that begin with 0, and the original first and last offset. Only the values of a slice are then
/// processed.
fn trimmed<O: OffsetSizeTrait>(offsets: &OffsetBuffer<O>) -> (OffsetBuffer<O>, usize, usize) {
    let (first, last) = (offsets[0], offsets[offsets.len() - 1]);
    let offsets = if first == O::usize_as(0) {
        offsets.clone()
    } else {
        OffsetBuffer::new(offsets.iter().map(|&offset| offset - first).collect())
    };
    (offsets, first.as_usize(), last.as_usize())
}

fn offsets_list<O: OffsetSizeTrait>(
    item: &NullableType,
    lists: &GenericListArray<O>,
    seen: &Seen,
    path: &str,
) -> Result<ArrayRef> {
    let rows = both(seen, lists.nulls());
    let (offsets, first, last) = trimmed(lists.offsets());
    let values = lists.values().slice(first, last - first);
    let visible = within(&offsets, &rows, values.len());
    let values = aligned(coerce(item, &values, &visible, path)?);
    let inner = Arc::new(field("item", &values));
    let made = GenericListArray::try_new(inner, offsets, values, lists.nulls().cloned());
    Ok(Arc::new(made.map_err(|error| malformed(&error))?))
}

fn map(value: &NullableType, array: &ArrayRef, seen: &Seen, path: &str) -> Result<ArrayRef> {
    let text = NullableType {
        null: None,
        ty: Type::Text,
    };
    let (keys, values, offsets, nulls) = match array.data_type() {
        DataType::Map(..) => {
            let maps = array.as_map();
            (
                maps.keys().clone(),
                maps.values().clone(),
                maps.offsets().clone(),
                maps.nulls().cloned(),
            )
        }
        // Readers represent maps as structs of two lists.
        DataType::Struct(fields) if is_map(fields) => {
            let found = array.as_struct();
            let (keys, values) = (pair_list(found, "keys", path)?, pair_list(found, "values", path)?);
            let nulls = NullBuffer::union(found.nulls(), keys.nulls());
            for row in 0..found.len() {
                if keys.value_length(row) != values.value_length(row) && nulls.as_ref().is_none_or(|n| n.is_valid(row))
                {
                    let reason = format!("row {row} of a batch has different numbers of keys and values");
                    return Err(Error::new(ErrorKind::Shape, reason).at_feature(path));
                }
            }
            let offsets = keys.offsets().clone();
            if offsets.inner() != values.offsets().inner() {
                let reason = "the keys and values of a map column have different offsets: write them as one map";
                return Err(Error::new(ErrorKind::Unsupported, reason).at_feature(path));
            }
            (keys.values().clone(), values.values().clone(), offsets, nulls)
        }
        _ => return Err(misfit(array, "maps", path)),
    };
    let rows = both(seen, nulls.as_ref());
    let (offsets, first, last) = trimmed(&offsets);
    let (keys, values) = (keys.slice(first, last - first), values.slice(first, last - first));
    let visible = within(&offsets, &rows, keys.len());
    let keys = coerce(&text, &keys, &visible, &format!("{path}.keys"))?;
    let values = aligned(coerce(value, &values, &visible, &format!("{path}.values"))?);
    // The keys of a map are never null in Arrow, not even where they aren't visible.
    let keys = without_nulls(&keys);
    let pair: Fields = vec![
        Arc::new(Field::new("key", keys.data_type().clone(), false)),
        Arc::new(field("value", &values)),
    ]
    .into();
    let entries = StructArray::try_new(pair.clone(), vec![keys, values], None).map_err(|error| malformed(&error))?;
    let entry = Arc::new(Field::new("entries", DataType::Struct(pair), false));
    let made = MapArray::try_new(entry, offsets, entries, nulls, false);
    Ok(Arc::new(made.map_err(|error| malformed(&error))?))
}

fn is_map(fields: &Fields) -> bool {
    let named = |name: &str| fields.iter().any(|field| field.name() == name);
    fields.len() == 2 && named("keys") && named("values")
}

/// Returns a field of lists, with 32-bit offsets that begin with 0.
fn pair_list(found: &StructArray, name: &str, path: &str) -> Result<ListArray> {
    let column = found.column_by_name(name).ok_or_else(|| misfit(found, "maps", path))?;
    let lists = unpacked(column)?;
    let item = match lists.data_type() {
        DataType::List(item) | DataType::LargeList(item) => item.clone(),
        _ => return Err(misfit(&lists, "lists of a map's keys or values", path)),
    };
    let cast = arrow_cast::cast(&lists, &DataType::List(item)).map_err(|error| malformed(&error))?;
    Ok(cast.as_list::<i32>().clone())
}

fn without_nulls(array: &ArrayRef) -> ArrayRef {
    if array.null_count() == 0 {
        return array.clone();
    }
    let data = array.to_data().into_builder().nulls(None);
    // Without nulls, one buffer less is validated.
    data.build().map_or_else(|_| array.clone(), make_array)
}

/// Aligns booleans with the beginning of their buffer. In lists, `arrow-avro` writes wrong values for booleans with an
/// offset.
fn aligned(array: ArrayRef) -> ArrayRef {
    match array.as_boolean_opt() {
        Some(bools) if bools.values().offset() != 0 => {
            let values = BooleanBuffer::new(bools.values().sliced(), 0, bools.len());
            Arc::new(BooleanArray::new(values, bools.nulls().cloned()))
        }
        _ => array,
    }
}

/// Returns the Arrow type of an array of only nulls.
fn empty_type(ty: &Type) -> DataType {
    let inner = |target: &NullableType| -> FieldRef { Arc::new(Field::new("item", empty_type(&target.ty), true)) };
    match ty {
        Type::Null | Type::Refused(_) => DataType::Null,
        Type::Boolean => DataType::Boolean,
        Type::Int | Type::Date | Type::TimeMillis | Type::Enum(_) => DataType::Int32,
        Type::Long | Type::TimeMicros | Type::Timestamp { .. } => DataType::Int64,
        Type::Float => DataType::Float32,
        Type::Double => DataType::Float64,
        Type::Bytes => DataType::Binary,
        Type::Text | Type::Uuid => DataType::Utf8,
        // The size fits into an i32, which the parser has checked.
        Type::Fixed(size) => DataType::FixedSizeBinary(*size as i32),
        Type::Duration => DataType::FixedSizeBinary(12),
        Type::Decimal { precision, scale, .. } if *precision <= 38 => DataType::Decimal128(*precision, *scale),
        Type::Decimal { precision, scale, .. } => DataType::Decimal256(*precision, *scale),
        Type::Array(item) => DataType::List(inner(item)),
        Type::Map(value) => {
            let pair = vec![
                Field::new("key", DataType::Utf8, false),
                Field::new("value", empty_type(&value.ty), true),
            ];
            DataType::Map(
                Arc::new(Field::new("entries", DataType::Struct(pair.into()), false)),
                false,
            )
        }
        Type::Record(fields) => {
            let fields = fields
                .iter()
                .map(|(name, target)| Field::new(name, empty_type(&target.ty), true));
            DataType::Struct(fields.collect())
        }
    }
}
