//! The schema of Avro's that follows from an Arrow schema.

use std::collections::HashSet;

use arrow_schema::{DataType, Field, Fields, TimeUnit};
use fastpipe_batch::{Error, ErrorKind, Result};
use serde_json::{Value, json};

use crate::names::check_field;
use crate::schema::Schema;

/// The schema of rows of these fields, the record of which has this name. What may be null is a union of null and its
/// type, whose default is null. Types without a counterpart become the next wider one, or are refused:
///
/// - unsigned integers become the int or long that holds them, those of 64 bits a long; float16 a float;
/// - dictionaries and run ends become what they stand for;
/// - timestamps of a time zone are `timestamp-…`, those of none `local-timestamp-…`; seconds become milliseconds;
/// - times of day in nanoseconds become microseconds, and differences of times longs in their unit;
/// - intervals are the logical type `duration`.
pub fn infer(fields: &Fields, name: &str) -> Result<Schema> {
    let mut names = Names(HashSet::from([name.to_owned()]));
    let schema = json!({"type": "record", "name": name, "fields": names.fields(fields, "")?});
    Schema::parse(&schema.to_string())
}

/// Full names that types have.
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

    /// A name for a type at a path that no other has.
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
                // Avro has no scales below 0, and none above the precision.
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
