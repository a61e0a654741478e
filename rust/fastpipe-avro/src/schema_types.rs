//! From a schema's JSON to its types (Avro 1.12 specification, "Schema Declaration").
//!
//! Names are taken as writers make them, which isn't always as the specification wants them: Java's have `$` in them, or a
//! dot in front. What is refused is what could be read in two ways, or not at all: names defined twice, names without
//! letters, fields that no path could tell apart.

use std::collections::{HashMap, HashSet};
use std::fmt::Display;
use std::mem::discriminant;

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::limits::{
    MAX_NAME_BYTES, MAX_PATH_BYTES, MAX_SCHEMA_LEVELS, MAX_SCHEMA_LIST, MAX_SCHEMA_NAME_BYTES, MAX_SCHEMA_NODES,
};
use crate::schema::{Node, NodeId, Type};
use crate::schema_json::{Json, Key, Object};

/// The types of a schema, as they are met.
#[derive(Default)]
pub(crate) struct Types {
    nodes: Vec<Node>,
    named: HashMap<String, NodeId>,
    /// Bytes of names so far, each with its namespace.
    names: usize,
    /// Bytes of the paths of fields so far.
    paths: usize,
}

/// What lies around a type.
#[derive(Clone, Copy)]
struct Around<'a> {
    /// The namespace that is inherited; none is empty.
    space: &'a str,
    /// Bytes of the path of the field.
    path: usize,
    /// Types.
    levels: usize,
}

#[cold]
fn no_schema(what: impl Display) -> Error {
    Error::new(ErrorKind::Schema, format!("expected an Avro schema, found {what}"))
}

#[cold]
fn beyond(what: impl Display) -> Error {
    Error::new(
        ErrorKind::Limit,
        format!("the schema has {what}, the most that is read"),
    )
}

/// The type that a name alone stands for.
fn primitive(name: &str) -> Option<Type> {
    Some(match name {
        "null" => Type::Null,
        "boolean" => Type::Boolean,
        "int" => Type::Int,
        "long" => Type::Long,
        "float" => Type::Float,
        "double" => Type::Double,
        "bytes" => Type::Bytes,
        "string" => Type::String,
        _ => return None,
    })
}

impl Types {
    /// The types that a schema consists of, and the number of the one that holds the others.
    pub(crate) fn of(schema: Json) -> Result<(Vec<Node>, NodeId)> {
        let mut types = Types::default();
        let around = Around {
            space: "",
            path: 0,
            levels: 0,
        };
        let root = types.part(schema, around)?;
        Ok((types.nodes, root))
    }

    fn push(&mut self, ty: Type, name: Option<String>) -> Result<NodeId> {
        if self.nodes.len() >= MAX_SCHEMA_NODES {
            return Err(beyond(format_args!("more than {MAX_SCHEMA_NODES} types")));
        }
        let logical = None;
        self.nodes.push(Node { ty, name, logical });
        Ok(self.nodes.len() - 1)
    }

    /// Adds a type that lies within others.
    fn part(&mut self, schema: Json, around: Around<'_>) -> Result<NodeId> {
        let levels = around.levels + 1;
        if levels > MAX_SCHEMA_LEVELS {
            return Err(beyond(format_args!(
                "types nested deeper than {MAX_SCHEMA_LEVELS} levels"
            )));
        }
        self.add(schema, Around { levels, ..around })
    }

    /// Adds a type and its parts.
    fn add(&mut self, schema: Json, around: Around<'_>) -> Result<NodeId> {
        match schema {
            Json::Text(name) => match primitive(&name) {
                Some(ty) => self.push(ty, None),
                None => self.reference(&name, around),
            },
            Json::List(branches) => self.union(branches, around),
            Json::Object(object) => self.object(object, around),
            Json::Number(_) | Json::Other => Err(no_schema("what is no type where one belongs")),
        }
    }

    fn reference(&mut self, name: &str, around: Around<'_>) -> Result<NodeId> {
        let full = self.full_name(name, around.space)?;
        // Java writes the names of types without a namespace so within one that has one.
        let found = self.named.get(&full).or_else(|| self.named.get(name));
        found
            .copied()
            .ok_or_else(|| no_schema(format_args!("the type '{full}', which is not defined")))
    }

    fn object(&mut self, mut object: Object, around: Around<'_>) -> Result<NodeId> {
        let first = self.nodes.len();
        let kind = object.take(Key::Type);
        let id = match kind.as_ref().and_then(Json::text) {
            Some("record") => self.record(&mut object, around),
            Some("enum") => self.symbols(&mut object, around),
            Some("fixed") => self.fixed(&mut object, around),
            Some("array") => {
                let item = self.part(body(&mut object, Key::Items, "array", "items")?, around)?;
                self.push(Type::Array(item), None)
            }
            Some("map") => {
                let value = self.part(body(&mut object, Key::Values, "map", "values")?, around)?;
                self.push(Type::Map(value), None)
            }
            _ => self.add(kind.ok_or_else(|| no_schema("an object without its \"type\""))?, around),
        }?;
        // A type that was defined elsewhere is what it is there.
        if id >= first && self.nodes[id].logical.is_none() {
            self.nodes[id].logical = logical(&object, &self.nodes[id].ty);
        }
        Ok(id)
    }

    fn record(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let fields = list(body(object, Key::Fields, "record", "fields")?, "\"fields\"")?;
        // Its number must be known before its fields, which may refer to it.
        let (id, full) = self.define(object, Type::Record(Vec::new()), around)?;
        let space = full.rfind('.').map_or("", |dot| &full[..dot]);
        let mut parts = Vec::new();
        for field in fields {
            parts.push(self.field(field, Around { space, ..around })?);
        }
        distinct(parts.iter().map(|(name, _)| name.as_str()), "field")?;
        self.nodes[id].ty = Type::Record(parts);
        Ok(id)
    }

    fn field(&mut self, field: Json, mut around: Around<'_>) -> Result<(String, NodeId)> {
        let Json::Object(mut field) = field else {
            return Err(no_schema("what is no field among the fields of a record"));
        };
        let Some(Json::Text(name)) = field.take(Key::Name) else {
            return Err(no_schema("a field without its \"name\""));
        };
        self.name(&name, 0)?;
        // Features are named by paths with dots.
        if name.is_empty() || name.contains(|c: char| c == '.' || c.is_control()) {
            return Err(no_schema(format_args!("the name '{}' of a field", name.escape_debug())));
        }
        around.path += 1 + name.len();
        self.paths += around.path;
        if self.paths > MAX_PATH_BYTES {
            let what = format_args!("fields whose paths take more than {MAX_PATH_BYTES} bytes");
            return Err(beyond(what));
        }
        let missing = || no_schema(format_args!("the field '{name}' without its \"type\""));
        let ty = field.take(Key::Type).ok_or_else(missing)?;
        let ty = self.part(ty, around)?;
        Ok((name, ty))
    }

    fn symbols(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let mut symbols = Vec::new();
        for symbol in list(body(object, Key::Symbols, "enum", "symbols")?, "\"symbols\"")? {
            let Json::Text(symbol) = symbol else {
                return Err(no_schema("what is no text among the symbols of an enum"));
            };
            self.name(&symbol, 0)?;
            symbols.push(symbol);
        }
        distinct(symbols.iter().map(String::as_str), "symbol")?;
        Ok(self.define(object, Type::Enum(symbols.into()), around)?.0)
    }

    fn fixed(&mut self, object: &mut Object, around: Around<'_>) -> Result<NodeId> {
        let Json::Number(size) = body(object, Key::Size, "fixed", "size")? else {
            return Err(no_schema("a \"size\" of a fixed that is no number of bytes"));
        };
        let size = usize::try_from(size).map_err(|_| no_schema("a \"size\" beyond any memory"))?;
        Ok(self.define(object, Type::Fixed(size), around)?.0)
    }

    fn union(&mut self, branches: Vec<Json>, around: Around<'_>) -> Result<NodeId> {
        check_length(branches.len())?;
        let (mut ids, mut seen) = (Vec::with_capacity(branches.len()), HashSet::new());
        for branch in branches {
            let id = self.part(branch, around)?;
            let Node { ty, name, .. } = &self.nodes[id];
            if matches!(ty, Type::Union(_)) {
                return Err(no_schema("a union right within a union"));
            }
            // Types with names are told apart by these.
            if !seen.insert((discriminant(ty), name.as_ref().map(|_| id))) {
                return Err(no_schema("a union with two branches of the same type"));
            }
            ids.push(id);
        }
        self.push(Type::Union(ids), None)
    }

    /// Adds a type with a name. Returns its full name, too.
    fn define(&mut self, object: &Object, ty: Type, around: Around<'_>) -> Result<(NodeId, String)> {
        let name = object
            .text(Key::Name)
            .ok_or_else(|| no_schema("a record, enum or fixed without its \"name\""))?;
        let space = object.text(Key::Namespace).unwrap_or(around.space);
        self.name(space, 0)?;
        let full = self.full_name(name, space)?;
        if self.named.contains_key(&full) {
            let reason = format!("expected an Avro schema: the type '{full}' is defined twice");
            return Err(Error::new(ErrorKind::Schema, reason));
        }
        let id = self.push(ty, Some(full.clone()))?;
        self.named.insert(full.clone(), id);
        Ok((id, full))
    }

    /// A name with its namespace, which is `space` unless it has one of its own. A dot in front says that it has none.
    fn full_name(&mut self, name: &str, space: &str) -> Result<String> {
        let (space, last) = name.rsplit_once('.').unwrap_or((space, name));
        self.name(name, space.len())?;
        if last.is_empty() {
            return Err(no_schema(format_args!("the name '{name}' of a type")));
        }
        Ok(match space {
            "" => last.to_owned(),
            space => format!("{space}.{last}"),
        })
    }

    /// Holds a name and its namespace against the limits.
    fn name(&mut self, name: &str, space: usize) -> Result<()> {
        if name.len() > MAX_NAME_BYTES {
            return Err(beyond(format_args!(
                "a name of {} bytes; {MAX_NAME_BYTES} is",
                name.len()
            )));
        }
        self.names += name.len() + space;
        if self.names > MAX_SCHEMA_NAME_BYTES {
            let what = format_args!("names that take more than {MAX_SCHEMA_NAME_BYTES} bytes, each with its namespace");
            return Err(beyond(what));
        }
        Ok(())
    }
}

fn body(object: &mut Object, key: Key, kind: &str, name: &str) -> Result<Json> {
    // The kind alone is no reference to a type of that name.
    object
        .take(key)
        .ok_or_else(|| no_schema(format_args!("a type \"{kind}\" without its \"{name}\"")))
}

fn list(json: Json, what: &str) -> Result<Vec<Json>> {
    let Json::List(list) = json else {
        return Err(no_schema(format_args!("{what} that are no list")));
    };
    check_length(list.len())?;
    Ok(list)
}

fn check_length(n: usize) -> Result<()> {
    if n > MAX_SCHEMA_LIST {
        return Err(beyond(format_args!("a list of {n} entries; {MAX_SCHEMA_LIST} is")));
    }
    Ok(())
}

fn distinct<'a>(names: impl Iterator<Item = &'a str>, what: &str) -> Result<()> {
    let mut seen = HashSet::new();
    for name in names {
        if !seen.insert(name) {
            return Err(no_schema(format_args!("the {what} '{name}' twice")));
        }
    }
    Ok(())
}

/// The logical type that an object gives to a type. One that doesn't fit it is ignored ("Logical Types").
fn logical(object: &Object, ty: &Type) -> Option<&'static str> {
    const NAMES: [(&str, &[Type]); 12] = [
        ("date", &[Type::Int]),
        ("time-millis", &[Type::Int]),
        ("time-micros", &[Type::Long]),
        ("timestamp-millis", &[Type::Long]),
        ("timestamp-micros", &[Type::Long]),
        ("timestamp-nanos", &[Type::Long]),
        ("local-timestamp-millis", &[Type::Long]),
        ("local-timestamp-micros", &[Type::Long]),
        ("local-timestamp-nanos", &[Type::Long]),
        ("big-decimal", &[Type::Bytes]),
        ("uuid", &[Type::String, Type::Bytes, Type::Fixed(16)]),
        ("duration", &[Type::Fixed(12)]),
    ];
    let name = object.text(Key::LogicalType)?;
    if name == "decimal" && matches!(ty, Type::Bytes | Type::Fixed(_)) {
        return is_decimal(object).then_some("decimal");
    }
    let (name, types) = NAMES.iter().find(|(of, _)| *of == name)?;
    types.contains(ty).then_some(name)
}

fn is_decimal(object: &Object) -> bool {
    let Some(&Json::Number(precision)) = object.get(Key::Precision) else {
        return false;
    };
    match object.get(Key::Scale) {
        None => precision > 0,
        Some(&Json::Number(scale)) => precision > 0 && scale <= precision,
        Some(_) => false,
    }
}

#[cfg(test)]
mod tests {
    use serde_json::{Value, json};

    use super::*;
    use crate::limits::MAX_SCHEMA_JSON_LEVELS;
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
    fn lists_and_levels_are_bounded() {
        let wide = |n: usize| record("Wide", (0..n).map(|i| field(format!("f{i}"), "int")).collect());
        assert_eq!(kind(&wide(MAX_SCHEMA_LIST)), None);
        assert_eq!(kind(&wide(MAX_SCHEMA_LIST + 1)), Some(ErrorKind::Limit));
        let within = |schema: Value, levels: usize| {
            (0..levels).fold(schema, |inner, i| record(&format!("N{i}"), vec![field("f", inner)]))
        };
        assert_eq!(kind(&within(wide(10_000), 100)), None);
        // The root and the int are levels, too.
        assert_eq!(kind(&within(json!("int"), MAX_SCHEMA_LEVELS - 1)), None);
        assert_eq!(kind(&within(json!("int"), MAX_SCHEMA_LEVELS)), Some(ErrorKind::Limit));
        let arrays = |n: usize| (0..n).fold(json!("int"), |inner, _| json!({"type": "array", "items": inner}));
        assert_eq!(kind(&arrays(MAX_SCHEMA_LEVELS - 1)), None);
        assert_eq!(kind(&arrays(MAX_SCHEMA_LEVELS)), Some(ErrorKind::Limit));
    }

    /// The deepest schemas, and what is too deep, parsed, inferred and compiled on half of what Rust's threads have.
    #[test]
    fn a_small_stack_is_enough() {
        let run = || {
            let mut records = String::from("\"int\"");
            for i in 0..MAX_SCHEMA_LEVELS - 1 {
                records = format!(r#"{{"type":"record","name":"N{i}","fields":[{{"name":"f","type":{records}}}]}}"#);
            }
            let schema = Schema::parse(&records).unwrap();
            let inferred = crate::infer::infer(&schema).unwrap();
            let features: Vec<_> = inferred.into_iter().map(|f| f.feature.unwrap()).collect();
            let column = crate::layout::Column::new(&schema, &features[0], 0).unwrap();
            crate::compile::compile(&schema, &[column]).unwrap();
            let wrapped = |n: usize| "{\"type\":".repeat(n) + "\"int\"" + &"}".repeat(n);
            Schema::parse(&wrapped(MAX_SCHEMA_JSON_LEVELS)).unwrap();
            for schema in [
                wrapped(MAX_SCHEMA_JSON_LEVELS + 1),
                "[".repeat(1 << 20),
                "[{\"type\":".repeat(1 << 17),
            ] {
                assert_eq!(Schema::parse(&schema).unwrap_err().kind(), ErrorKind::Limit);
            }
        };
        let small = std::thread::Builder::new().stack_size(1 << 20);
        small.spawn(run).unwrap().join().unwrap();
    }

    #[test]
    fn names_of_other_writers() {
        let names = |schema: Value| {
            let schema = Schema::parse(&schema.to_string()).unwrap();
            let mut names: Vec<_> = (0..schema.len())
                .filter_map(|id| schema.node(id).name.clone())
                .collect();
            names.sort();
            names
        };
        // Java's nested classes; names that say that they have no namespace; names that break rules.
        let inner =
            json!({"type": "enum", "name": "Inner", "namespace": "org.x.Outer$", "symbols": ["A", "b-c", "d e"]});
        let mut outer = record("Outer", vec![field("a", inner), field("b", "org.x.Outer$.Inner")]);
        outer["namespace"] = json!("org.x");
        assert_eq!(names(outer), ["org.x.Outer", "org.x.Outer$.Inner"]);
        let global = json!({"type": "fixed", "name": "F", "size": 1});
        let mut schema = record(
            ".global",
            vec![
                field("a", global),
                field("b", ".F"),
                field("c", "F"),
                field("d-ü", ".global"),
            ],
        );
        assert_eq!(names(schema.clone()), ["F", "global"]);
        schema["namespace"] = json!("not.used");
        assert_eq!(names(schema), ["F", "global"]);
        assert_eq!(names(record("a-b.1st", vec![])), ["a-b.1st"]);
        // A type of no namespace, named so within one: Java writes that.
        let within = json!({"type": "record", "name": "R", "namespace": "ns", "fields": [field("a", "Outside")]});
        let fields = vec![
            field("a", json!({"type": "fixed", "name": "Outside", "size": 1})),
            field("b", within),
        ];
        assert_eq!(names(record("Top", fields)), ["Outside", "Top", "ns.R"]);
        // An empty namespace is none, also for what lies within.
        let inner = json!({"type": "record", "name": "I", "namespace": "", "fields": [
            {"name": "f", "type": {"type": "fixed", "name": "F", "size": 1}}]});
        assert_eq!(names(record("ns.R", vec![field("a", inner)])), ["F", "I", "ns.R"]);
    }

    #[test]
    fn what_could_be_read_in_two_ways_is_refused() {
        let fixed = |name: &str| json!({"type": "fixed", "name": name, "size": 1});
        for schema in [
            record("", vec![]),
            record("ns.", vec![]),
            record("R", vec![field("", "int")]),
            record("R", vec![field("a.b", "int")]),
            record("R", vec![field("a", "int"), field("a", "int")]),
            record("R", vec![field("a", fixed("F")), field("b", fixed(".F"))]),
            record("R", vec![field("a", "ns.R")]),
        ] {
            assert_eq!(kind(&schema), Some(ErrorKind::Schema), "{schema}");
        }
    }

    #[test]
    fn logical_types_that_do_not_fit_are_ignored() {
        let logical = |schema: Value| {
            let schema = Schema::parse(&schema.to_string()).unwrap();
            schema.node(schema.root()).logical
        };
        for (schema, expected) in [
            (json!({"type": "int", "logicalType": "date"}), Some("date")),
            (json!({"type": {"type": "int", "logicalType": "date"}}), Some("date")),
            (json!({"type": {"type": "int"}, "logicalType": "date"}), Some("date")),
            (json!({"type": "long", "logicalType": "date"}), None),
            (json!({"type": "int", "logicalType": 7}), None),
            (
                json!({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 4}),
                Some("decimal"),
            ),
            (
                json!({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 5}),
                None,
            ),
            (json!({"type": "bytes", "logicalType": "decimal", "precision": 0}), None),
            (
                json!({"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": -1}),
                None,
            ),
            (json!({"type": "bytes", "logicalType": "decimal"}), None),
            (
                json!({"type": "string", "logicalType": "decimal", "precision": 4}),
                None,
            ),
            (
                json!({"type": "fixed", "name": "F", "size": 2, "logicalType": "decimal", "precision": 4}),
                Some("decimal"),
            ),
            (
                json!({"type": "fixed", "name": "F", "size": 12, "logicalType": "duration"}),
                Some("duration"),
            ),
            (
                json!({"type": "fixed", "name": "F", "size": 3, "logicalType": "duration"}),
                None,
            ),
            (
                json!({"type": "fixed", "name": "F", "size": 16, "logicalType": "uuid"}),
                Some("uuid"),
            ),
            (json!({"type": "string", "logicalType": "uuid"}), Some("uuid")),
        ] {
            assert_eq!(logical(schema.clone()), expected, "{schema}");
        }
        // A reference doesn't change the type that it refers to.
        let fixed = json!({"type": "fixed", "name": "F", "size": 12});
        let again = json!({"type": "F", "logicalType": "duration"});
        let schema = record("R", vec![field("a", fixed), field("b", again)]);
        let schema = Schema::parse(&schema.to_string()).unwrap();
        assert!((0..schema.len()).all(|id| schema.node(id).logical.is_none()));
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
