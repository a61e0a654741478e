//! The skeleton of a schema: its JSON without what reading doesn't need, which is defaults, aliases, documentation, and
//! whatever else its writer put there.
//!
//! Decoding follows the writer's schema alone, so nothing of that matters (Avro 1.12 specification, "Schema Resolution"),
//! but much of it costs: the parser checks each default against its type, type within type, and if that type's own
//! default holds the type, without end; it copies each named type once for each of its aliases. Java's reader leaves
//! defaults unchecked as well, and files with wrong ones exist.
//!
//! The parser also copies each named type into a table, and with it the named types within; and each name takes along the
//! namespace that it inherits, as each field is known by its path. So what is left is measured before the parser sees it,
//! multiplied as it will be.

use apache_avro::schema::RecordField;
use fastpipe_batch::{Error, ErrorKind};
use serde_json::{Map, Value};

use crate::limits::{MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_SCHEMA_LIST, MAX_SCHEMA_MEMORY, MAX_SCHEMA_NAME_BYTES};

const PRIMITIVE: [&str; 8] = ["null", "boolean", "int", "long", "float", "double", "bytes", "string"];

/// The skeleton of a schema. What is no schema is left for the parser to complain of. (Whoever parsed the JSON bounds its
/// depth.)
pub(crate) fn skeleton(schema: Value) -> Result<Value, Error> {
    let root = Around {
        namespace: 0,
        path: 0,
        copies: 1,
    };
    Walk::default().schema(schema, root)
}

/// What lies around a type.
#[derive(Clone, Copy)]
struct Around {
    /// Bytes of the namespace that is inherited.
    namespace: usize,
    /// Bytes of the path of the field.
    path: usize,
    /// How often the parser holds what stands here.
    copies: usize,
}

/// What the parser will be given, so far.
#[derive(Default)]
struct Walk {
    /// Bytes of names, each with its namespace.
    names: usize,
    /// Bytes of the paths of fields.
    paths: usize,
    /// Bytes of memory, all copies together.
    memory: usize,
}

impl Walk {
    fn schema(&mut self, schema: Value, around: Around) -> Result<Value, Error> {
        match schema {
            Value::String(name) => {
                let full = match PRIMITIVE.contains(&name.as_str()) {
                    true => 0,
                    false => self.name(&name, around.namespace)?,
                };
                self.hold(size_of::<apache_avro::Schema>() + full, around)?;
                Ok(Value::String(name))
            }
            Value::Array(branches) => {
                self.hold(size_of::<apache_avro::Schema>(), around)?;
                check_length(&branches)?;
                branches.into_iter().map(|b| self.schema(b, around)).collect()
            }
            Value::Object(object) => self.object(object, around).map(Value::Object),
            other => Ok(other),
        }
    }

    fn object(&mut self, mut object: Map<String, Value>, around: Around) -> Result<Map<String, Value>, Error> {
        self.hold(size_of::<apache_avro::Schema>(), around)?;
        let mut kept = Map::new();
        let kind = object.remove("type");
        let (body, named) = match kind.as_ref().and_then(Value::as_str) {
            Some("record") => ("fields", true),
            Some("enum") => ("symbols", true),
            Some("fixed") => ("size", true),
            Some("array") => ("items", false),
            Some("map") => ("values", false),
            _ => {
                if let Some(kind) = kind {
                    let within = logical(&mut object, &mut kept, around);
                    kept.insert("type".into(), self.schema(kind, within)?);
                }
                return Ok(kept);
            }
        };
        // The parser would look for a type of the name "record" (or "enum", or "fixed"), and copy that.
        let Some(parts) = object.remove(body) else {
            let kind = kind.unwrap_or_default();
            let reason = format!("expected an Avro schema, found a type {kind} without its \"{body}\"");
            return Err(Error::new(ErrorKind::Schema, reason));
        };
        let mut within = around;
        if named {
            within = self.named(&mut object, &mut kept, around)?;
        }
        let parts = match (body, parts) {
            ("fields", Value::Array(fields)) => {
                check_length(&fields)?;
                fields
                    .into_iter()
                    .map(|f| self.field(f, within))
                    .collect::<Result<_, _>>()?
            }
            ("symbols", Value::Array(symbols)) => {
                check_length(&symbols)?;
                for symbol in symbols.iter().filter_map(Value::as_str) {
                    let bytes = self.name(symbol, 0)?;
                    self.hold(size_of::<String>() + bytes, within)?;
                }
                Value::Array(symbols)
            }
            ("size", size) => {
                logical(&mut object, &mut kept, around);
                size
            }
            ("items" | "values", part) => self.schema(part, within)?,
            (_, other) => other,
        };
        kept.insert(body.into(), parts);
        kept.extend(kind.map(|kind| ("type".into(), kind)));
        Ok(kept)
    }

    /// Keeps the name of a type; says what surrounds its parts.
    fn named(
        &mut self,
        object: &mut Map<String, Value>,
        kept: &mut Map<String, Value>,
        around: Around,
    ) -> Result<Around, Error> {
        let mut namespace = around.namespace;
        if let Some(Value::String(own)) = object.remove("namespace") {
            namespace = self.name(&own, 0)?;
            kept.insert("namespace".into(), Value::String(own));
        }
        if let Some(Value::String(name)) = object.remove("name") {
            let full = self.name(&name, namespace)?;
            namespace = name.rfind('.').unwrap_or(namespace);
            // Beside the type in the table stands its name.
            self.hold(2 * full, around)?;
            kept.insert("name".into(), Value::String(name));
        }
        Ok(Around {
            namespace,
            copies: around.copies + 1,
            ..around
        })
    }

    fn field(&mut self, field: Value, mut around: Around) -> Result<Value, Error> {
        let Value::Object(mut field) = field else {
            let reason = format!("expected an Avro schema, found {field} among the fields of a record");
            return Err(Error::new(ErrorKind::Schema, reason));
        };
        let mut kept = Map::new();
        if let Some(Value::String(name)) = field.remove("name") {
            let bytes = self.name(&name, 0)?;
            // Records find fields by name.
            let memory = size_of::<RecordField>() + size_of::<(String, usize)>() + 2 * bytes;
            self.hold(memory, around)?;
            around.path += 1 + bytes;
            self.paths += around.path;
            if self.paths > MAX_PATH_BYTES {
                let reason = format!(
                    "a schema whose fields' paths take more than {MAX_PATH_BYTES} bytes, the most that is read"
                );
                return Err(Error::new(ErrorKind::Limit, reason));
            }
            kept.insert("name".into(), Value::String(name));
        }
        if let Some(schema) = field.remove("type") {
            kept.insert("type".into(), self.schema(schema, around)?);
        }
        Ok(Value::Object(kept))
    }

    /// Bytes of a name together with the namespace that it inherits.
    fn name(&mut self, name: &str, namespace: usize) -> Result<usize, Error> {
        if name.len() > MAX_NAME_BYTES {
            let reason = format!(
                "a schema with a name of {} bytes; {MAX_NAME_BYTES} is the most that is read",
                name.len()
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        let full = if name.contains('.') { 0 } else { namespace } + name.len();
        self.names += full;
        if self.names > MAX_SCHEMA_NAME_BYTES {
            let reason = format!(
                "a schema whose names, each with its namespace, take more than {MAX_SCHEMA_NAME_BYTES} bytes, the most \
                 that is read"
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        Ok(full)
    }

    fn hold(&mut self, bytes: usize, around: Around) -> Result<(), Error> {
        self.memory += bytes * around.copies;
        if self.memory > MAX_SCHEMA_MEMORY {
            let reason = format!(
                "a schema of so many types, or so many within each other, that parsing it takes more than \
                 {MAX_SCHEMA_MEMORY} bytes of memory, the most that is spent"
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        Ok(())
    }
}

/// Keeps what describes a logical type; says what surrounds the type below it.
fn logical(object: &mut Map<String, Value>, kept: &mut Map<String, Value>, around: Around) -> Around {
    let Some(name @ Value::String(_)) = object.remove("logicalType") else {
        return around;
    };
    kept.insert("logicalType".into(), name);
    for key in ["precision", "scale"] {
        if let Some(value) = object.remove(key) {
            // Whatever isn't a number is as wrong as null.
            let number = if value.is_number() { value } else { Value::Null };
            kept.insert(key.into(), number);
        }
    }
    // The parser copies the type to look at it.
    Around {
        copies: around.copies + 1,
        ..around
    }
}

fn check_length(list: &[Value]) -> Result<(), Error> {
    if list.len() > MAX_SCHEMA_LIST {
        let n = list.len();
        let reason = format!("a schema with a list of {n} entries; {MAX_SCHEMA_LIST} is the most that is read");
        return Err(Error::new(ErrorKind::Limit, reason));
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use serde_json::json;

    use super::*;
    use crate::schema::Schema;

    fn kind(schema: &Value) -> Option<ErrorKind> {
        Schema::parse(&schema.to_string()).err().map(|e| e.kind())
    }

    fn record(name: &str, fields: Vec<Value>) -> Value {
        json!({"type": "record", "name": name, "fields": fields})
    }

    fn field(name: impl std::fmt::Display, schema: impl Into<Value>) -> Value {
        json!({"name": name.to_string(), "type": schema.into()})
    }

    #[test]
    fn what_reading_needs_is_left() {
        let bare = json!({"type": "record", "name": "R", "namespace": "a.b", "fields": [
            {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B"]}},
            {"name": "d", "type": [{"type": "fixed", "name": "F", "size": 3, "logicalType": "decimal", "precision": 2}]},
            {"name": "t", "type": {"type": "long", "logicalType": "timestamp-millis"}},
            {"name": "m", "type": {"type": "map", "values": {"type": "array", "items": "a.b.E"}}},
            {"name": "n", "type": ["null", {"type": {"type": "string"}}]}]});
        assert_eq!(skeleton(bare.clone()).unwrap(), bare);
        fn adorn(value: &mut Value) {
            match value {
                Value::Object(object) => {
                    object.values_mut().for_each(adorn);
                    for key in ["doc", "aliases", "default", "order", "connect.name"] {
                        object.insert(key.into(), json!({"type": [{}], "fields": 3, "symbols": [7]}));
                    }
                }
                Value::Array(list) => list.iter_mut().for_each(adorn),
                _ => {}
            }
        }
        let mut adorned = bare.clone();
        adorn(&mut adorned);
        assert_eq!(skeleton(adorned).unwrap(), bare);
    }

    #[test]
    fn names_are_bounded() {
        let long = |n| "n".repeat(n);
        let named = |name: String| record(&name, vec![]);
        assert_eq!(kind(&named(long(MAX_NAME_BYTES))), None);
        let too_long = long(MAX_NAME_BYTES + 1);
        for schema in [
            named(too_long.clone()),
            json!({"type": "fixed", "name": "F", "namespace": too_long, "size": 1}),
            json!({"type": "enum", "name": "E", "symbols": [too_long]}),
            record("R", vec![field(&too_long, "int")]),
            json!(["null", too_long]),
        ] {
            assert_eq!(kind(&schema), Some(ErrorKind::Limit));
        }
        // What names inherit counts for each of them, but primitive types inherit nothing.
        let inheriting = |schema: &str| {
            let mut fields = vec![field("e", json!({"type": "fixed", "name": "E", "size": 1}))];
            fields.extend((0..3000).map(|i| field(format!("f{i}"), schema)));
            record(&format!("{}.R", long(MAX_NAME_BYTES - 2)), fields)
        };
        assert_eq!(kind(&inheriting("E")), Some(ErrorKind::Limit));
        assert_eq!(kind(&inheriting("int")), None);
    }

    #[test]
    fn paths_are_bounded() {
        let within = |levels: usize| {
            let wide = record("Wide", (0..1000).map(|i| field(format!("f{i}"), "int")).collect());
            (0..levels).fold(wide, |inner, i| {
                record(&format!("N{i}"), vec![field("f".repeat(MAX_NAME_BYTES), inner)])
            })
        };
        assert_eq!(kind(&within(1)), None);
        assert_eq!(kind(&within(10)), Some(ErrorKind::Limit));
    }

    #[test]
    fn copies_are_bounded() {
        let wide = |n: usize| record("Wide", (0..n).map(|i| field(format!("f{i}"), "int")).collect());
        let within = |schema: Value, levels: usize| {
            (0..levels).fold(schema, |inner, i| record(&format!("N{i}"), vec![field("f", inner)]))
        };
        assert_eq!(kind(&within(wide(20_000), 5)), None);
        assert_eq!(kind(&within(wide(20_000), 35)), Some(ErrorKind::Limit));
        assert_eq!(kind(&within(wide(1000), 35)), None);
        assert_eq!(kind(&wide(MAX_SCHEMA_LIST + 1)), Some(ErrorKind::Limit));
    }

    /// Types that are called like kinds of types, referred to like them: twice in each of many.
    #[test]
    fn types_without_their_parts_are_refused() {
        for (kind_of, other) in [
            ("record", "fields"),
            ("enum", "symbols"),
            ("fixed", "size"),
            ("array", "items"),
        ] {
            let schema = record(
                "R",
                vec![
                    field("a", record(kind_of, vec![])),
                    field("b", json!({"type": kind_of})),
                ],
            );
            let error = Schema::parse(&schema.to_string()).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Schema);
            assert!(error.reason().contains(other), "{error}");
        }
        // As the type of a field the name alone is fine.
        assert_eq!(
            kind(&record(
                "R",
                vec![field("a", record("record", vec![])), field("b", "record")]
            )),
            None
        );
    }

    /// Types whose defaults hold themselves, or twice the type before.
    #[test]
    fn defaults_are_not_followed() {
        let with_default = |name: &str, schema: &str| json!({"name": name, "type": schema, "default": {}});
        let mut fields = vec![field("t0", record("T0", vec![]))];
        for i in 1..100 {
            let before = format!("T{}", i - 1);
            let twice = vec![with_default("a", &before), with_default("b", &before)];
            fields.push(field(format!("t{i}"), record(&format!("T{i}"), twice)));
        }
        assert_eq!(kind(&record("R", fields)), None);
        let endless = vec![
            field("a", record("T", vec![])),
            field("b", record("T", vec![with_default("t", "T")])),
            with_default("c", "T"),
        ];
        assert_eq!(kind(&record("R", endless)), Some(ErrorKind::Schema), "defined twice");
    }
}
