//! Infers an Avro schema from an Arrow schema.

use std::collections::HashSet;

use arrow_schema::{DataType, Field, Fields, TimeUnit};
use fastpipe_batch::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::names::check_field;
use crate::schema::Schema;

/// Infers the schema of rows with these fields. The record is called `name`. A nullable field is a union of null and
/// its type, with null as the default. A type without an Avro equivalent is converted to a wider type, or raises an
/// error:
///
/// - Unsigned integers are written as the smallest of int and long that can represent them, and 64-bit ones as long.
///   float16 is written as float.
/// - Dictionaries and run-end-encoded arrays are written as the type of their values.
/// - Timestamps with a time zone are written as `timestamp-…`, and timestamps without one as `local-timestamp-…`.
///   Seconds are converted to milliseconds.
/// - Times of day in nanoseconds are converted to microseconds. Time differences are written as longs in their unit.
/// - Intervals are written as the logical type `duration`.
pub fn infer(fields: &Fields, name: &str) -> Result<Schema> {
    let mut names = Names(HashSet::from([name.to_owned()]));
    let schema = json!({"type": "record", "name": name, "fields": names.fields(fields, "")?});
    Schema::parse(&schema.to_string())
}

/// Full names of types that are in use.
struct Names(HashSet<String>);

impl Names {
    fn fields(&mut self, fields: &Fields, path: &str) -> Result<Vec<Value>> {
        let one = |field: &std::sync::Arc<Field>| {
            let name = field.name();
            let path = if path.is_empty() {
                name.clone()
            } else {
                format!("{path}.{name}")
            };
            check_field(name, &path)?;
            let ty = self.target(field, &path)?;
            Ok(if field.is_nullable() && *field.data_type() != DataType::Null {
                json!({"name": name, "type": ty, "default": null})
            } else {
                json!({"name": name, "type": ty})
            })
        };
        fields.iter().map(one).collect()
    }

    fn target(&mut self, field: &Field, path: &str) -> Result<Value> {
        let ty = self.ty(field.data_type(), path)?;
        Ok(if field.is_nullable() && ty != "null" {
            json!(["null", ty])
        } else {
            ty
        })
    }

    /// Returns an unused name for a type at a path.
    fn name(&mut self, path: &str) -> String {
        let name = path.replace('.', "_");
        let mut free = name.clone();
        for number in 2_u32.. {
            if self.0.insert(free.clone()) {
                break;
            }
            free = format!("{name}_{number}");
        }
        free
    }

    fn ty(&mut self, ty: &DataType, path: &str) -> Result<Value> {
        use DataType as D;
        let logical = |ty: &str, name: &str| json!({"type": ty, "logicalType": name});
        Ok(match ty {
            D::Null => json!("null"),
            D::Boolean => json!("boolean"),
            D::Int8 | D::Int16 | D::Int32 | D::UInt8 | D::UInt16 => json!("int"),
            D::Int64 | D::UInt32 | D::UInt64 | D::Duration(_) => json!("long"),
            D::Float16 | D::Float32 => json!("float"),
            D::Float64 => json!("double"),
            D::Utf8 | D::LargeUtf8 | D::Utf8View => json!("string"),
            D::Binary | D::LargeBinary | D::BinaryView => json!("bytes"),
            D::FixedSizeBinary(size) => json!({"type": "fixed", "name": self.name(path), "size": size}),
            D::Date32 | D::Date64 => logical("int", "date"),
            D::Time32(_) => logical("int", "time-millis"),
            D::Time64(_) => logical("long", "time-micros"),
            D::Timestamp(unit, zone) => {
                let unit = match unit {
                    TimeUnit::Second | TimeUnit::Millisecond => "millis",
                    TimeUnit::Microsecond => "micros",
                    TimeUnit::Nanosecond => "nanos",
                };
                let local = if zone.is_some() { "" } else { "local-" };
                logical("long", &format!("{local}timestamp-{unit}"))
            }
            D::Interval(_) => {
                json!({"type": "fixed", "name": self.name(path), "size": 12, "logicalType": "duration"})
            }
            D::Decimal32(precision, scale)
            | D::Decimal64(precision, scale)
            | D::Decimal128(precision, scale)
            | D::Decimal256(precision, scale) => {
                // Avro requires a scale from 0 to the precision.
                let digits = i32::from(*precision).max(i32::from(*scale)) - i32::from(*scale).min(0);
                json!({"type": "bytes", "logicalType": "decimal", "precision": digits, "scale": (*scale).max(0)})
            }
            D::List(item) | D::LargeList(item) | D::ListView(item) | D::LargeListView(item) => {
                json!({"type": "array", "items": self.target(item, path)?})
            }
            D::FixedSizeList(item, _) => json!({"type": "array", "items": self.target(item, path)?}),
            D::Struct(fields) => {
                let name = self.name(path);
                json!({"type": "record", "name": name, "fields": self.fields(fields, path)?})
            }
            D::Map(entries, _) => match entries.data_type() {
                D::Struct(fields) if fields.len() == 2 => {
                    json!({"type": "map", "values": self.target(&fields[1], &format!("{path}.values"))?})
                }
                _ => return Err(refused(ty, path)),
            },
            D::Dictionary(_, values) => self.ty(values, path)?,
            D::RunEndEncoded(_, values) => self.ty(values.data_type(), path)?,
            D::Union(..) => return Err(refused(ty, path)),
        })
    }
}

fn refused(ty: &DataType, path: &str) -> Error {
    let reason = format!("values of Arrow type {ty} aren't written: cast them, or leave the column out");
    Error::new(ErrorKind::Unsupported, reason).at_feature(path)
}
