//! Decodes encoded values (Avro 1.12 specification, "Binary Encoding") to Arrow arrays that preserve their types.
//!
//! A column is a field of the root record or of a nested record. Its input is the encoded bytes of one value per row.
//! Only the schema determines the Arrow type, not the data.

mod input;
mod values;

use std::sync::Arc;

use arrow_array::cast::AsArray;
use arrow_array::{Array, RecordBatch, RecordBatchOptions};
use arrow_buffer::NullBufferBuilder;
use arrow_schema::{ArrowError, DataType, Field, IntervalUnit, SchemaRef, TimeUnit};
use fastpipe_batch::{Error, ErrorKind, Result};

use self::input::{Input, MOST_EMPTY_ITEMS};
use self::values::Values;
use crate::schema::{NullableType, Schema, Type};

/// Columns of Avro records and their Arrow types.
#[derive(Clone, Debug)]
pub struct Columns {
    targets: Vec<NullableType>,
    schema: SchemaRef,
}

impl Columns {
    /// Creates columns from names, which are paths of fields from the root. By default, all fields are columns. A root
    /// that isn't a record is a single column named `value`.
    pub fn new(json: &str, names: Option<&[String]>) -> Result<Columns> {
        let root = Schema::parse_any(json)?;
        let (mut targets, mut fields) = (Vec::new(), Vec::new());
        let all = match &root.ty {
            Type::Record(fields) if root.null.is_none() => fields.iter().map(|(name, _)| name.clone()).collect(),
            _ => vec![ROOT.to_owned()],
        };
        for name in names.unwrap_or(&all) {
            let (target, nullable) = find(&root, name)?;
            let field = field(name, target, name)?;
            let nullable = nullable || field.is_nullable();
            fields.push(field.with_nullable(nullable));
            targets.push(target.clone());
        }
        Ok(Columns {
            targets,
            schema: Arc::new(arrow_schema::Schema::new(fields)),
        })
    }

    /// Returns the Arrow schema of the columns.
    pub fn schema(&self) -> &SchemaRef {
        &self.schema
    }

    /// Whether both decode encoded values in the same way.
    pub fn decode_as(&self, other: &Columns) -> bool {
        self.targets == other.targets
    }

    /// Decodes columns of large binary values. A value is null if a record around it is null.
    pub fn decode(&self, encoded: &RecordBatch) -> Result<RecordBatch> {
        let fields = self.schema.fields().iter();
        let columns = fields
            .zip(&self.targets)
            .zip(encoded.columns())
            .map(|((field, target), column)| {
                let column = column.as_binary_opt::<i64>();
                let column =
                    column.ok_or_else(|| Error::new(ErrorKind::Internal, "encoded values are large binary"))?;
                let mut values = Values::new(&target.ty);
                let mut valid = NullBufferBuilder::new(column.len());
                let mut empty_left = MOST_EMPTY_ITEMS;
                for row in 0..column.len() {
                    if column.is_null(row) {
                        valid.append_null();
                        values.absent(&target.ty).map_err(|e| e.at_feature(field.name()))?;
                        continue;
                    }
                    let mut input = Input::new(column.value(row), empty_left);
                    values
                        .read(target, &mut valid, &mut input)
                        .map_err(|e| e.at_feature(field.name()))?;
                    empty_left = input.empty_left();
                }
                let array = values.finish(field.data_type(), valid.finish());
                array.map_err(|error| internal(&error).at_feature(field.name()))
            });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let options = RecordBatchOptions::new().with_row_count(Some(encoded.num_rows()));
        RecordBatch::try_new_with_options(self.schema.clone(), columns, &options).map_err(|error| internal(&error))
    }
}

/// Name of the only column if the root isn't a record.
const ROOT: &str = "value";

fn internal(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Internal, format!("Arrow data can't be created: {error}"))
}

/// Returns the type at a path, and whether a record on the path may be null.
fn find<'s>(root: &'s NullableType, path: &str) -> Result<(&'s NullableType, bool)> {
    if root.null.is_some() || !matches!(root.ty, Type::Record(_)) {
        let reason = format!("the file's records aren't of a record type: their only column is '{ROOT}'");
        let found = (path == ROOT).then_some((root, false));
        return found.ok_or_else(|| Error::new(ErrorKind::Schema, reason).at_feature(path));
    }
    let (mut target, mut nullable) = (root, false);
    for name in path.split('.') {
        nullable |= target.is_nullable();
        let fields = match &target.ty {
            Type::Record(fields) => fields.as_slice(),
            _ => &[],
        };
        let Some((_, found)) = fields.iter().find(|(field, _)| field == name) else {
            let names: Vec<_> = fields.iter().map(|(name, _)| name.as_str()).collect();
            let reason = match &target.ty {
                Type::Record(_) => format!("unknown field '{name}'; the fields are {}", names.join(", ")),
                _ => format!("unknown field '{name}': the value isn't a record, so name the whole column"),
            };
            return Err(Error::new(ErrorKind::Schema, reason).at_feature(path));
        };
        target = found;
    }
    Ok((target, nullable))
}

fn field(name: &str, target: &NullableType, path: &str) -> Result<Field> {
    Ok(Field::new(name, data_type(&target.ty, path)?, target.is_nullable()))
}

/// Returns the Arrow type that preserves the values of a type. `path` is the path of the column or of a value nested in
/// it.
fn data_type(ty: &Type, path: &str) -> Result<DataType> {
    let below = |name: &str| format!("{path}.{name}");
    Ok(match ty {
        Type::Null => DataType::Null,
        Type::Boolean => DataType::Boolean,
        Type::Int => DataType::Int32,
        Type::Date => DataType::Date32,
        Type::TimeMillis => DataType::Time32(TimeUnit::Millisecond),
        Type::Long => DataType::Int64,
        Type::TimeMicros => DataType::Time64(TimeUnit::Microsecond),
        Type::Timestamp { unit, local } => DataType::Timestamp(*unit, (!local).then(|| "UTC".into())),
        Type::Float => DataType::Float32,
        Type::Double => DataType::Float64,
        Type::Bytes => DataType::Binary,
        Type::Text | Type::Uuid => DataType::Utf8,
        // The size fits into an i32, which the parser has checked.
        Type::Fixed(size) => DataType::FixedSizeBinary(*size as i32),
        Type::Decimal { precision, scale, .. } if *precision <= 38 => DataType::Decimal128(*precision, *scale),
        Type::Decimal { precision, scale, .. } => DataType::Decimal256(*precision, *scale),
        Type::Duration => DataType::Interval(IntervalUnit::MonthDayNano),
        Type::Enum(_) => DataType::Dictionary(Box::new(DataType::Int32), Box::new(DataType::Utf8)),
        Type::Array(item) => DataType::List(Arc::new(field("item", item, path)?)),
        Type::Map(value) => {
            let pair = vec![
                Field::new("key", DataType::Utf8, false),
                field("value", value, &below("values"))?,
            ];
            let entries = Field::new("entries", DataType::Struct(pair.into()), false);
            DataType::Map(Arc::new(entries), false)
        }
        Type::Record(fields) => {
            let fields = fields.iter().map(|(name, target)| field(name, target, &below(name)));
            DataType::Struct(fields.collect::<Result<Vec<_>>>()?.into())
        }
        Type::Refused(reason) => return Err(Error::new(ErrorKind::Unsupported, reason.as_str()).at_feature(path)),
    })
}

#[cfg(test)]
mod tests {
    use arrow_array::LargeBinaryArray;

    use super::*;

    /// Decodes a column `f` of encoded values.
    fn decode(ty: &str, values: &[Option<&[u8]>]) -> Result<RecordBatch> {
        let json = format!(r#"{{"type": "record", "name": "R", "fields": [{{"name": "f", "type": {ty}}}]}}"#);
        let schema = Arc::new(arrow_schema::Schema::new(vec![Field::new(
            "f",
            DataType::LargeBinary,
            true,
        )]));
        let encoded = LargeBinaryArray::from_iter(values.iter().copied());
        Columns::new(&json, None)?.decode(&RecordBatch::try_new(schema, vec![Arc::new(encoded)]).unwrap())
    }

    #[test]
    fn nulls_of_fixed_values_take_bounded_memory() {
        let fixed = |size: usize| format!(r#"["null", {{"type": "fixed", "name": "F", "size": {size}}}]"#);
        let record = |size| {
            let fields = format!(r#"[{{"name": "f", "type": {}}}]"#, fixed(size));
            format!(r#"["null", {{"type": "record", "name": "N", "fields": {fields}}}]"#)
        };
        let array = |size| format!(r#"{{"type": "array", "items": {}}}"#, fixed(size));
        let null: &[u8] = &[0];
        // A block of three null items, and the end of the array.
        let nulls: &[u8] = &[6, 0, 0, 0, 0];
        for size in [(1 << 28) + 1, (1 << 31) - 1] {
            for (ty, value) in [(fixed(size), null), (record(size), null), (array(size), nulls)] {
                let error = decode(&ty, &[Some(value)]).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Limit, "{ty}: {error}");
                assert!(error.to_string().contains("--batch-size"), "{error}");
            }
            // If no value of the batch is null, the data must contain all bytes that the schema declares. Otherwise it
            // is rejected as incomplete.
            assert_eq!(
                decode(&fixed(size), &[Some(&[2, 7])]).unwrap_err().kind(),
                ErrorKind::Malformed
            );
        }
        let decoded = decode(&fixed(2), &[Some(null), Some(&[2, 7, 8]), None]).unwrap();
        let column = decoded.column(0).as_fixed_size_binary();
        assert_eq!((column.null_count(), column.value(1)), (2, [7, 8].as_slice()));
    }
}
