//! The schema of a file (Avro 1.12 specification, "Schema Declaration"), restricted to types that Arrow rows can have.

use std::collections::HashMap;

use arrow_schema::TimeUnit;
use fastpipe_batch::{Error, ErrorKind, Result};
use serde_json::Value;

use crate::names::{check_field, is_full_name, is_name};

/// Maximum number of digits of Arrow's decimals.
const MOST_DIGITS: u64 = 76;

/// Maximum number of types in a schema. A named type counts with its components wherever it is used.
const MOST_TYPES: usize = 100_000;

/// The schema of a file, which is a record.
#[derive(Clone, Debug)]
pub struct Schema {
    json: String,
    pub(crate) fields: Vec<(String, NullableType)>,
}

/// A type, and the position of null in its union.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct NullableType {
    pub(crate) null: Option<Null>,
    pub(crate) ty: Type,
}

/// The branch of a union that is null.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Null {
    First,
    Second,
    /// The union has only one type, which isn't null. This never occurs in a schema for writing.
    Never,
}

impl NullableType {
    /// Whether values can be null.
    pub(crate) fn is_nullable(&self) -> bool {
        self.ty == Type::Null || matches!(self.null, Some(Null::First | Null::Second))
    }
}

/// A type, including its logical type.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Type {
    Null,
    Boolean,
    Int,
    Date,
    TimeMillis,
    Long,
    TimeMicros,
    /// A timestamp in UTC or without a time zone.
    Timestamp {
        unit: TimeUnit,
        local: bool,
    },
    Float,
    Double,
    Bytes,
    Text,
    /// A UUID stored as text.
    Uuid,
    Fixed(usize),
    /// A decimal stored in bytes, or in a fixed of this size.
    Decimal {
        precision: u8,
        scale: i8,
        size: Option<usize>,
    },
    /// Months, days and milliseconds.
    Duration,
    Enum(Vec<String>),
    Array(Box<NullableType>),
    Map(Box<NullableType>),
    Record(Vec<(String, NullableType)>),
    /// A type without an equivalent in Arrow, and the reason. This never occurs in a schema for writing.
    Refused(String),
}

impl Schema {
    /// Parses a schema for writing.
    pub fn parse(json: &str) -> Result<Self> {
        let value: Value = serde_json::from_str(json)
            .map_err(|error| Error::new(ErrorKind::Schema, format!("the schema isn't JSON: {error}")))?;
        let mut parser = Parser::default();
        let target = parser.target(&value, "", "")?;
        match target {
            NullableType {
                null: None,
                ty: Type::Record(fields),
            } => Ok(Schema {
                json: json.to_owned(),
                fields,
            }),
            _ => Err(Error::new(
                ErrorKind::Schema,
                "the schema must be a record: its fields are the columns of the rows that are written",
            )),
        }
    }

    /// Parses any schema of a file. A type without an Arrow equivalent is rejected only if a column uses it.
    pub(crate) fn parse_any(json: &str) -> Result<NullableType> {
        let value: Value = serde_json::from_str(json)
            .map_err(|error| Error::new(ErrorKind::Schema, format!("the schema isn't JSON: {error}")))?;
        let mut parser = Parser {
            any: true,
            ..Parser::default()
        };
        parser.target(&value, "", "")
    }

    /// Returns the JSON text that the schema was parsed from.
    pub fn json(&self) -> &str {
        &self.json
    }

    /// Whether rows of this schema are also rows of the other: the types are equal, regardless of other attributes.
    pub fn writes_as(&self, other: &Schema) -> bool {
        self.fields == other.fields
    }
}

#[derive(Default)]
struct Parser {
    /// Named types by full name; `None` while a type is being parsed.
    named: HashMap<String, Option<Type>>,
    types: usize,
    /// Whether the schema is for reading rather than writing.
    any: bool,
}

fn bad(path: &str, reason: impl Into<String>) -> Error {
    let error = Error::new(ErrorKind::Schema, reason);
    if path.is_empty() { error } else { error.at_feature(path) }
}

fn unsupported(path: &str, reason: impl Into<String>) -> Error {
    let error = Error::new(ErrorKind::Unsupported, reason);
    if path.is_empty() { error } else { error.at_feature(path) }
}

fn below(path: &str, name: &str) -> String {
    if path.is_empty() {
        name.to_owned()
    } else {
        format!("{path}.{name}")
    }
}

impl Parser {
    fn target(&mut self, value: &Value, path: &str, space: &str) -> Result<NullableType> {
        let Value::Array(branches) = value else {
            let ty = self.ty(value, path, space)?;
            return Ok(NullableType { null: None, ty });
        };
        let is_null = |branch: &Value| branch == "null" || branch.get("type").is_some_and(|ty| ty == "null");
        match &branches[..] {
            [first, second] if is_null(first) != is_null(second) => {
                let (null, value) = if is_null(first) {
                    (Null::First, second)
                } else {
                    (Null::Second, first)
                };
                let ty = self.ty(value, path, space)?;
                Ok(NullableType { null: Some(null), ty })
            }
            [one] if self.any => {
                let ty = self.ty(one, path, space)?;
                let null = Some(Null::Never);
                Ok(NullableType { null, ty })
            }
            _ if self.any => {
                // The branches may define named types that other types refer to.
                for branch in branches {
                    self.ty(branch, path, space)?;
                }
                let reason = "a union of several types has no Arrow equivalent: name the other columns with --columns, \
                              or convert to Avro, which keeps it";
                let ty = Type::Refused(reason.into());
                Ok(NullableType { null: None, ty })
            }
            _ => Err(unsupported(
                path,
                "unions must be of null and one type, such as [\"null\", \"long\"]: pass a schema without other unions",
            )),
        }
    }

    fn ty(&mut self, value: &Value, path: &str, space: &str) -> Result<Type> {
        self.types += 1;
        if self.types > MOST_TYPES {
            return Err(Error::new(
                ErrorKind::Limit,
                format!("the schema has more than {MOST_TYPES} types"),
            ));
        }
        match value {
            Value::String(name) => self.of_name(name, path, space),
            Value::Object(object) => {
                let Some(inner) = object.get("type") else {
                    return Err(bad(path, "a type in the schema is an object without \"type\""));
                };
                match inner.as_str() {
                    Some(kind @ ("record" | "error" | "enum" | "fixed")) => self.named(kind, object, path, space),
                    Some("array") => {
                        let items = object
                            .get("items")
                            .ok_or_else(|| bad(path, "an array must have \"items\""))?;
                        Ok(Type::Array(Box::new(self.target(items, path, space)?)))
                    }
                    Some("map") => {
                        let values = object
                            .get("values")
                            .ok_or_else(|| bad(path, "a map must have \"values\""))?;
                        Ok(Type::Map(Box::new(self.target(values, path, space)?)))
                    }
                    Some(name) => {
                        let ty = self.of_name(name, path, space)?;
                        self.logical(ty, object, path)
                    }
                    None if inner.is_object() => self.ty(inner, path, space),
                    None => Err(bad(path, "\"type\" must be the name of a type, or a type")),
                }
            }
            Value::Array(_) => Err(bad(path, "a union contains another one, which Avro doesn't allow")),
            _ => Err(bad(path, format!("{value} is not an Avro type"))),
        }
    }

    fn of_name(&mut self, name: &str, path: &str, space: &str) -> Result<Type> {
        Ok(match name {
            "null" => Type::Null,
            "boolean" => Type::Boolean,
            "int" => Type::Int,
            "long" => Type::Long,
            "float" => Type::Float,
            "double" => Type::Double,
            "bytes" => Type::Bytes,
            "string" => Type::Text,
            _ => {
                let full = full_name(name, space);
                let known = self.named.get(&full).or_else(|| self.named.get(name));
                match known {
                    Some(Some(ty)) => {
                        let ty = ty.clone();
                        self.types += count(&ty);
                        if self.types > MOST_TYPES {
                            let reason = format!("the schema has more than {MOST_TYPES} types");
                            return Err(Error::new(ErrorKind::Limit, reason));
                        }
                        ty
                    }
                    Some(None) if self.any => Type::Refused(format!(
                        "the type {full:?} contains itself, which has no Arrow equivalent: name the other columns with \
                         --columns, or convert to Avro, which keeps it"
                    )),
                    Some(None) => {
                        let reason = format!("{name:?} contains itself, which no Arrow type does");
                        return Err(unsupported(path, reason));
                    }
                    None => {
                        return Err(bad(
                            path,
                            format!("{name:?} is not an Avro type, and no earlier type has this name"),
                        ));
                    }
                }
            }
        })
    }

    fn named(&mut self, kind: &str, object: &serde_json::Map<String, Value>, path: &str, space: &str) -> Result<Type> {
        let name = object.get("name").and_then(Value::as_str);
        let name = name.ok_or_else(|| bad(path, format!("a type {kind:?} must have a \"name\", a string")))?;
        let full = match object.get("namespace").and_then(Value::as_str) {
            Some(given) if !name.contains('.') => full_name(name, given),
            _ => full_name(name, space),
        };
        if !self.any && !is_full_name(&full) {
            return Err(bad(
                path,
                format!("{full:?} is not a valid name of a type: its parts may contain only a-z, A-Z, 0-9 and _"),
            ));
        }
        if self.named.insert(full.clone(), None).is_some() {
            return Err(bad(path, format!("two types are named {full:?}")));
        }
        let ty = match kind {
            "fixed" => {
                let size = object
                    .get("size")
                    .and_then(Value::as_u64)
                    .and_then(|size| i32::try_from(size).ok());
                let size = size.ok_or_else(|| bad(path, "a fixed must have a \"size\", a number below 2^31"))?;
                self.logical(Type::Fixed(size as usize), object, path)?
            }
            "enum" => Type::Enum(self.symbols(object, path)?),
            _ => {
                let space = full.rsplit_once('.').map_or("", |(space, _)| space);
                let fields = object.get("fields").and_then(Value::as_array);
                let fields = fields.ok_or_else(|| bad(path, "a record must have \"fields\", a list"))?;
                let mut read: Vec<(String, NullableType)> = Vec::with_capacity(fields.len());
                let mut seen = std::collections::HashSet::new();
                for field in fields {
                    let name = field.get("name").and_then(Value::as_str);
                    let name = name.ok_or_else(|| bad(path, "a field must have a \"name\", a string"))?;
                    let path = below(path, name);
                    if !self.any {
                        check_field(name, &path)?;
                    }
                    let ty = field
                        .get("type")
                        .ok_or_else(|| bad(&path, "a field must have a \"type\""))?;
                    if !seen.insert(name) {
                        return Err(bad(&path, "two fields of a record have this name: rename one"));
                    }
                    read.push((name.to_owned(), self.target(ty, &path, space)?));
                }
                Type::Record(read)
            }
        };
        self.named.insert(full, Some(ty.clone()));
        Ok(ty)
    }

    fn logical(&self, ty: Type, object: &serde_json::Map<String, Value>, path: &str) -> Result<Type> {
        let name = object.get("logicalType").and_then(Value::as_str);
        match (name, &ty) {
            (Some("big-decimal"), Type::Bytes) if self.any => {
                let reason = "a big-decimal, whose values have different scales, has no Arrow equivalent: name the \
                              other columns with --columns, or convert to Avro, which keeps it";
                Ok(Type::Refused(reason.into()))
            }
            // Invalid decimals are read as their underlying type, as the specification requires of readers.
            (Some("decimal"), Type::Bytes | Type::Fixed(_)) if self.any => {
                let digits = object.get("precision").and_then(Value::as_u64);
                Ok(match logical(ty.clone(), object, path) {
                    Ok(ty) => ty,
                    Err(_) if digits > Some(MOST_DIGITS) => Type::Refused(format!(
                        "a decimal of more than {MOST_DIGITS} digits has no Arrow equivalent: name the other columns \
                         with --columns, or convert to Avro, which keeps it"
                    )),
                    Err(_) => ty,
                })
            }
            _ => logical(ty, object, path),
        }
    }

    fn symbols(&self, object: &serde_json::Map<String, Value>, path: &str) -> Result<Vec<String>> {
        let symbols = object.get("symbols").and_then(Value::as_array);
        let symbols = symbols.and_then(|all| all.iter().map(|one| one.as_str().map(str::to_owned)).collect());
        let symbols: Vec<String> = symbols.ok_or_else(|| bad(path, "an enum must have a list of \"symbols\""))?;
        let mut seen = std::collections::HashSet::new();
        for symbol in &symbols {
            if !self.any && !is_name(symbol) {
                return Err(bad(
                    path,
                    format!("{symbol:?} is not a valid enum symbol: symbols follow the rules of field names"),
                ));
            }
            if !seen.insert(symbol) {
                return Err(bad(path, format!("the enum has the symbol {symbol:?} twice")));
            }
        }
        Ok(symbols)
    }
}

fn full_name(name: &str, space: &str) -> String {
    if space.is_empty() || name.contains('.') {
        name.to_owned()
    } else {
        format!("{space}.{name}")
    }
}

fn count(ty: &Type) -> usize {
    match ty {
        Type::Record(fields) => 1 + fields.iter().map(|(_, target)| count(&target.ty)).sum::<usize>(),
        Type::Array(target) | Type::Map(target) => 1 + count(&target.ty),
        _ => 1,
    }
}

/// Returns a type with the logical type of its object. As the specification requires, a logical type is ignored if it
/// is unknown or doesn't fit the type. An invalid decimal raises an error, because other readers would read different
/// numbers.
fn logical(ty: Type, object: &serde_json::Map<String, Value>, path: &str) -> Result<Type> {
    let Some(name) = object.get("logicalType").and_then(Value::as_str) else {
        return Ok(ty);
    };
    let timestamp = |unit, local| Type::Timestamp { unit, local };
    Ok(match (name, ty) {
        ("date", Type::Int) => Type::Date,
        ("time-millis", Type::Int) => Type::TimeMillis,
        ("time-micros", Type::Long) => Type::TimeMicros,
        ("timestamp-millis", Type::Long) => timestamp(TimeUnit::Millisecond, false),
        ("local-timestamp-millis", Type::Long) => timestamp(TimeUnit::Millisecond, true),
        ("timestamp-micros", Type::Long) => timestamp(TimeUnit::Microsecond, false),
        ("local-timestamp-micros", Type::Long) => timestamp(TimeUnit::Microsecond, true),
        ("timestamp-nanos", Type::Long) => timestamp(TimeUnit::Nanosecond, false),
        ("local-timestamp-nanos", Type::Long) => timestamp(TimeUnit::Nanosecond, true),
        ("uuid", Type::Text) => Type::Uuid,
        ("duration", Type::Fixed(12)) => Type::Duration,
        ("decimal", Type::Bytes) => decimal(None, object, path)?,
        ("decimal", Type::Fixed(size)) => decimal(Some(size), object, path)?,
        (_, ty) => ty,
    })
}

fn decimal(size: Option<usize>, object: &serde_json::Map<String, Value>, path: &str) -> Result<Type> {
    let precision = object
        .get("precision")
        .and_then(Value::as_u64)
        .filter(|digits| (1..=MOST_DIGITS).contains(digits));
    let scale = match object.get("scale") {
        None => Some(0),
        Some(scale) => scale.as_u64(),
    };
    let (Some(precision), Some(scale)) = (precision, scale) else {
        let reason = format!("a decimal must have a \"precision\" of 1 to {MOST_DIGITS} and a \"scale\" of 0 or more");
        return Err(bad(path, reason));
    };
    if scale > precision {
        return Err(bad(
            path,
            format!("the decimal's scale {scale} exceeds its precision {precision}"),
        ));
    }
    // Both are less than 77.
    Ok(Type::Decimal {
        precision: precision as u8,
        scale: scale as i8,
        size,
    })
}
