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
    // An inherited namespace counts for each name that inherits it. Primitive types don't inherit.
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
fn lists_and_nesting_are_bounded() {
    let wide = |n: usize| record("Wide", (0..n).map(|i| field(format!("f{i}"), "int")).collect());
    assert_eq!(kind(&wide(MAX_SCHEMA_LIST)), None);
    assert_eq!(kind(&wide(MAX_SCHEMA_LIST + 1)), Some(ErrorKind::Limit));
    let within = |schema: Value, levels: usize| {
        (0..levels).fold(schema, |inner, i| record(&format!("N{i}"), vec![field("f", inner)]))
    };
    assert_eq!(kind(&within(wide(10_000), 100)), None);
    // The root and the int count as levels.
    assert_eq!(kind(&within(json!("int"), MAX_SCHEMA_LEVELS - 1)), None);
    assert_eq!(kind(&within(json!("int"), MAX_SCHEMA_LEVELS)), Some(ErrorKind::Limit));
    let arrays = |n: usize| (0..n).fold(json!("int"), |inner, _| json!({"type": "array", "items": inner}));
    assert_eq!(kind(&arrays(MAX_SCHEMA_LEVELS - 1)), None);
    assert_eq!(kind(&arrays(MAX_SCHEMA_LEVELS)), Some(ErrorKind::Limit));
}

/// The deepest allowed schemas, and deeper ones, are parsed, inferred and compiled with half of the default stack of
/// Rust's threads.
#[test]
fn parsing_needs_little_stack() {
    let run = || {
        let mut records = String::from("\"int\"");
        for i in 0..MAX_SCHEMA_LEVELS - 1 {
            records = format!(r#"{{"type":"record","name":"N{i}","fields":[{{"name":"f","type":{records}}}]}}"#);
        }
        let schema = Schema::parse(&records).unwrap();
        let inferred = crate::infer::infer(&schema).unwrap();
        let features: Vec<_> = inferred.into_iter().map(|f| f.feature.unwrap()).collect();
        let column = crate::layout::Column::new(&schema, &features[0], 0).unwrap();
        crate::compile::compile(&schema, None, &[column]).unwrap();
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
fn names_of_other_writers_are_accepted() {
    let names = |schema: Value| {
        let schema = Schema::parse(&schema.to_string()).unwrap();
        let mut names: Vec<_> = (0..schema.len())
            .filter_map(|id| schema.node(id).name.clone())
            .collect();
        names.sort();
        names
    };
    // Names of Java's nested classes, names with an explicitly empty namespace, and names that violate the rules.
    let inner = json!({"type": "enum", "name": "Inner", "namespace": "org.x.Outer$", "symbols": ["A", "b-c", "d e"]});
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
    // Within a namespace, Java refers to a type without a namespace by its short name.
    let within = json!({"type": "record", "name": "R", "namespace": "ns", "fields": [field("a", "Outside")]});
    let fields = vec![
        field("a", json!({"type": "fixed", "name": "Outside", "size": 1})),
        field("b", within),
    ];
    assert_eq!(names(record("Top", fields)), ["Outside", "Top", "ns.R"]);
    // An empty namespace also applies to nested types.
    let inner = json!({"type": "record", "name": "I", "namespace": "", "fields": [
        {"name": "f", "type": {"type": "fixed", "name": "F", "size": 1}}]});
    assert_eq!(names(record("ns.R", vec![field("a", inner)])), ["F", "I", "ns.R"]);
}

#[test]
fn ambiguous_schemas_are_refused() {
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
fn invalid_logical_types_are_ignored() {
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
            Some("decimal(4, 4)"),
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
            Some("decimal(4, 0)"),
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
        let found = logical(schema.clone()).map(|logical| logical.to_string());
        assert_eq!(found.as_deref(), expected, "{schema}");
    }
    // A reference doesn't change the type that it refers to.
    let fixed = json!({"type": "fixed", "name": "F", "size": 12});
    let again = json!({"type": "F", "logicalType": "duration"});
    let schema = record("R", vec![field("a", fixed), field("b", again)]);
    let schema = Schema::parse(&schema.to_string()).unwrap();
    assert!((0..schema.len()).all(|id| schema.node(id).logical.is_none()));
}

/// Types named like a kind of type ("record"), which many fields reference twice.
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
    // The name of the kind is a valid reference in the type of a field.
    assert_eq!(
        kind(&record(
            "R",
            vec![field("a", record("record", vec![])), field("b", "record")]
        )),
        None
    );
}

/// Types whose defaults contain themselves, or contain the previous type twice.
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
