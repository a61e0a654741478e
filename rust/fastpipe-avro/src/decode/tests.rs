//! Tests of the whole decoder.

use std::sync::Arc;

use fastpipe_batch::{ErrorKind, Fragment, Rows, SlabPool};
use proptest::prelude::*;

use super::*;
use crate::compile::{compile, compile_steps};
use crate::infer::infer;
use crate::isa::Isa;
use crate::layout::Column;
use crate::limits::MAX_ZERO_WIDTH;
use crate::merge::merge;
use crate::resolve::resolve;
use crate::schema::{NodeId, Schema, Type};

/// Generates types as JSON. [`name`] adds the names of named types.
fn types() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::json;
    let leaf = prop_oneof![
        Just(json!("null")),
        Just(json!("boolean")),
        Just(json!("int")),
        Just(json!("long")),
        Just(json!("float")),
        Just(json!("double")),
        Just(json!("bytes")),
        Just(json!("string")),
        (0..5u8).prop_map(|n| json!({"type": "fixed", "size": n})),
        Just(json!({"type": "enum", "symbols": ["A", "B", "C"]})),
        Just(json!({"type": "int", "logicalType": "date"})),
        Just(json!({"type": "long", "logicalType": "timestamp-micros"})),
        Just(json!({"type": "bytes", "logicalType": "decimal", "precision": 18, "scale": 3})),
        Just(json!({"type": "bytes", "logicalType": "decimal", "precision": 30, "scale": 3})),
        Just(json!({"type": "fixed", "size": 5, "logicalType": "decimal", "precision": 4})),
        Just(json!({"type": "fixed", "size": 12, "logicalType": "duration"})),
        Just(json!({"type": "fixed", "size": 16, "logicalType": "uuid"})),
    ];
    leaf.prop_recursive(4, 24, 4, |inner| {
        prop_oneof![
            inner.clone().prop_map(|t| json!({"type": "array", "items": t})),
            inner.clone().prop_map(|t| json!({"type": "map", "values": t})),
            (inner.clone(), 0..3u8).prop_filter_map("a union in a union", |(t, kind)| {
                let plain = !t.is_array() && t != json!("null");
                plain.then(|| match kind {
                    0 => json!(["null", t]),
                    1 => json!([t, "null"]),
                    _ => json!([t]),
                })
            }),
            proptest::collection::vec(inner.clone(), 2..5)
                .prop_map(union_of)
                .prop_filter("no branches", |union| union != &json!([])),
            proptest::collection::vec(inner, 0..4).prop_map(|fields| {
                let field = |(i, t)| json!({"name": format!("f{i}"), "type": t});
                json!({"type": "record", "fields": fields.into_iter().enumerate().map(field).collect::<Vec<_>>()})
            }),
        ]
    })
}

/// Returns a union of the types that may be its branches together.
fn union_of(types: Vec<serde_json::Value>) -> serde_json::Value {
    let mut kinds = std::collections::HashSet::new();
    let kind = |ty: &serde_json::Value| ty.as_str().or_else(|| ty["type"].as_str()).map(str::to_owned);
    let named = ["fixed", "enum", "record"];
    let fits = |ty: &serde_json::Value| {
        let kind = kind(ty);
        kind.is_some_and(|kind| named.contains(&&*kind) || kinds.insert(kind))
    };
    types.into_iter().filter(fits).collect::<Vec<_>>().into()
}

/// Adds the names of named types.
fn name(value: &mut serde_json::Value, next: &mut u32) {
    match value {
        serde_json::Value::Object(map) => {
            if ["fixed", "enum", "record"]
                .iter()
                .any(|t| map.get("type").is_some_and(|v| v == t))
            {
                map.insert("name".into(), format!("T{next}").into());
                *next += 1;
            }
            map.iter_mut().for_each(|(_, v)| name(v, next));
        }
        serde_json::Value::Array(items) => items.iter_mut().for_each(|v| name(v, next)),
        _ => {}
    }
}

/// Generator of test data: a 64-bit linear congruential generator (Knuth, MMIX).
struct Random(u64);

impl Random {
    fn below(&mut self, n: u64) -> u64 {
        self.0 = self
            .0
            .wrapping_mul(6_364_136_223_846_793_005)
            .wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

fn long(value: i64, out: &mut Vec<u8>) {
    let mut n = ((value << 1) ^ (value >> 63)) as u64;
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// A naive encoder. Writes a random value of a type, with arrays in several blocks, with and without byte counts.
fn encode(schema: &Schema, id: NodeId, random: &mut Random, out: &mut Vec<u8>) {
    match schema.ty(id) {
        Type::Null => {}
        Type::Boolean => out.push(random.below(2) as u8),
        Type::Int => long(i64::from(random.below(1 << 32) as u32 as i32 >> random.below(32)), out),
        Type::Long => long((random.below(1 << 31) << 33) as i64 >> random.below(64), out),
        Type::Float => out.extend((random.below(1000) as f32).to_le_bytes()),
        Type::Double => out.extend((random.below(1000) as f64).to_le_bytes()),
        Type::Bytes | Type::String => {
            // At most 8 bytes, so decimals fit into 64 bits.
            let n = random.below(9);
            long(n as i64, out);
            out.extend((0..n).map(|i| b'a' + i as u8));
        }
        Type::Fixed(n) => out.extend((0..*n).map(|i| i as u8)),
        Type::Enum(symbols) => long(random.below(symbols.texts.len() as u64) as i64, out),
        Type::Record(fields) => fields.iter().for_each(|f| encode(schema, f.node, random, out)),
        Type::Union(union) => {
            let branch = random.below(union.branches.len() as u64) as usize;
            long(branch as i64, out);
            encode(schema, union.branches[branch].node, random, out);
        }
        Type::Default { .. } | Type::Missing { .. } | Type::Mismatch { .. } => panic!("none of a file's types"),
        Type::Array(item) | Type::Map(item) => {
            for _ in 0..random.below(3) {
                let n = 1 + random.below(12) as i64;
                let mut items = Vec::new();
                for _ in 0..n {
                    if matches!(schema.ty(id), Type::Map(_)) {
                        items.extend([4, b'k', b'0' + random.below(10) as u8]);
                    }
                    encode(schema, *item, random, &mut items);
                }
                if random.below(2) == 0 {
                    long(n, out);
                } else {
                    long(-n, out);
                    long(items.len() as i64, out);
                }
                out.extend(items);
            }
            out.push(0);
        }
    }
}

struct Decoded {
    end: std::result::Result<u64, Error>,
    skipped: std::result::Result<usize, Error>,
}

/// Returns a possible later version of a schema. It keeps some of the fields, in another order or under new names.
/// Types may be promoted or replaced by unions, and new fields have defaults.
fn evolved(schema: &serde_json::Value, random: &mut Random) -> serde_json::Value {
    use serde_json::{Value, json};
    let promoted = |kind: &str, random: &mut Random| match (kind, random.below(4)) {
        ("int", 0) => "long".into(),
        ("int" | "long", 1) => "double".into(),
        ("float", 2) => "double".into(),
        ("string", 3) => "bytes".into(),
        ("bytes", 3) => "string".into(),
        (kind, _) => kind.to_owned(),
    };
    let inner = match schema {
        Value::String(kind) => promoted(kind, random).into(),
        Value::Array(branches) => {
            let mut branches: Vec<Value> = branches.iter().map(|b| evolved_branch(b, random)).collect();
            if random.below(3) == 0 {
                branches.rotate_left(1);
            }
            return branches.into();
        }
        Value::Object(object) if object["type"] == "record" => {
            let mut fields: Vec<Value> = Vec::new();
            for field in object["fields"].as_array().unwrap() {
                let name = field["name"].as_str().unwrap();
                let mut new = json!({"name": name, "type": evolved(&field["type"], random)});
                if random.below(3) == 0 {
                    new = json!({"name": format!("new_{name}"), "aliases": [name], "type": new["type"]});
                }
                if random.below(6) > 0 {
                    fields.push(new);
                }
            }
            if random.below(2) == 0 {
                fields.reverse();
            }
            let (kind, default) = [
                (json!("long"), json!(7)),
                (json!(["null", "string"]), json!(null)),
                (json!({"type": "array", "items": ["int", "string"]}), json!([1, "x"])),
                (
                    json!({"type": "map", "values": {"type": "array", "items": "float"}}),
                    json!({"k": [1.5], "l": []}),
                ),
            ][random.below(4) as usize]
                .clone();
            fields.push(json!({"name": "added", "type": kind, "default": default}));
            json!({"type": "record", "name": object["name"], "fields": fields})
        }
        Value::Object(object) if object["type"] == "array" => {
            json!({"type": "array", "items": evolved(&object["items"], random)})
        }
        Value::Object(object) if object["type"] == "map" => {
            json!({"type": "map", "values": evolved(&object["values"], random)})
        }
        other => other.clone(),
    };
    match random.below(5) {
        0 if inner != "null" => json!(["null", inner]),
        1 if inner != "boolean" => json!([inner, "boolean"]),
        _ => inner,
    }
}

/// Returns a possible later version of a branch, which is never a union.
fn evolved_branch(schema: &serde_json::Value, random: &mut Random) -> serde_json::Value {
    match evolved(schema, random) {
        serde_json::Value::Array(branches) => branches
            .into_iter()
            .find(|b| b != "null" && b != "boolean")
            .unwrap_or_else(|| schema.clone()),
        other => other,
    }
}

/// Decodes the columns of a projection from all records, and also skips all records.
fn both(schema: &Schema, wanted: u64, data: &[u8], rows: u32) -> Decoded {
    both_resolved(schema, None, wanted, data, rows).unwrap()
}

/// Decodes and skips all records, with the file's schema resolved to a reader's schema. Fails if the schemas don't
/// resolve.
fn both_resolved(
    writer: &Schema,
    reader: Option<&Schema>,
    wanted: u64,
    data: &[u8],
    rows: u32,
) -> std::result::Result<Decoded, Error> {
    let schema = reader.unwrap_or(writer);
    let features = infer(schema).unwrap();
    let features = features.into_iter().filter_map(|f| f.feature.ok());
    let mut next = 0;
    let columns: Vec<Column> = features
        .enumerate()
        .filter(|(i, _)| wanted >> (i % 64) & 1 == 1)
        .map(|(_, feature)| {
            let column = Column::new(schema, &feature, next).unwrap();
            next += column.spec.parts().len() as u32;
            column
        })
        .collect();
    let plan = match reader {
        Some(reader) => compile(&resolve(writer, reader)?, Some(reader), &columns)?,
        None => compile(writer, None, &columns)?,
    };
    let parts: Arc<[_]> = columns.iter().flat_map(|c| c.spec.parts()).collect();
    let pool = SlabPool::new(1);
    let batch = Rows::new(parts.clone(), rows as usize, &pool).unwrap();
    let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
    let picks: Vec<_> = (0..rows).map(|i| Pick { record: i, slot: i }).collect();
    let block = Block {
        folders: &[],
        plan: &plan,
        data,
        rows,
        zero_width_left: &AtomicU64::new(MAX_ZERO_WIDTH),
    };
    let end = place(&block, Mark::START, &picks, &mut sink).map(|mark| mark.byte);
    let skipped = skip_all(&plan, data, rows, &mut sink);
    Ok(Decoded { end, skipped })
}

/// A value of a branch that the reader's union lacks raises an error for any selection of columns. It is never read as
/// null.
#[test]
fn unresolved_branches_are_refused() {
    let record = |union: &str| {
        let json = format!(r#"{{"type": "record", "name": "R", "fields": [{{"name": "f", "type": {union}}}]}}"#);
        Schema::parse(&json).unwrap()
    };
    let writer = record(r#"["null", "boolean", "int"]"#);
    for reader in [
        r#"["null", "int", "string"]"#,
        r#"["int", "null", "string"]"#,
        r#"["string", "null", "int"]"#,
        r#"["null", "int", "long"]"#,
        r#"["null", "int"]"#,
        r#"["null"]"#,
        r#""int""#,
        "[]",
    ] {
        let reader = record(reader);
        let columns = infer(&reader).unwrap().len();
        for wanted in (0..columns).map(|column| 1 << column).chain([u64::MAX]) {
            let found = both_resolved(&writer, Some(&reader), wanted, &[2, 1], 1).unwrap();
            let error = found.end.unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Schema);
            assert!(error.reason().contains("boolean, the reader"), "{error}");
            assert_eq!(found.skipped.unwrap(), 2);
        }
        let skipped = both_resolved(&writer, Some(&reader), 0, &[2, 1], 1).unwrap();
        assert_eq!(skipped.end.unwrap(), 2);
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(400))]

    /// With any reader's schema, decoding a record consumes exactly the bytes that skipping it consumes.
    #[test]
    fn resolved_records_end_where_they_end(mut schema in types(), seed: u64, rows in 0..6u32, wanted: u64) {
        name(&mut schema, &mut 0);
        let mut random = Random(seed);
        let reader = evolved(&schema, &mut random);
        let writer = Schema::parse(&schema.to_string()).unwrap();
        let Ok(reader) = Schema::parse(&reader.to_string()) else {
            // The new schema is invalid: a union now has two branches of the same type.
            return Ok(());
        };
        let mut data = Vec::new();
        (0..rows).for_each(|_| encode(&writer, writer.root(), &mut random, &mut data));
        let mut readers = vec![reader];
        readers.extend(merge(&writer, &readers[0]));
        for reader in &readers {
            for wanted in [wanted, 0, u64::MAX] {
                let Ok(decoded) = both_resolved(&writer, Some(reader), wanted, &data, rows) else { continue };
                prop_assert_eq!(decoded.skipped.unwrap(), data.len());
                match decoded.end {
                    Ok(end) => prop_assert_eq!(end, data.len() as u64),
                    Err(error) => prop_assert!(matches!(error.kind(), ErrorKind::Schema), "{}", error),
                }
            }
        }
    }

    /// A schema merged from two schemas reads the records of both.
    #[test]
    fn merged_schemas_read_both(mut first in types(), mut second in types(), seed: u64, rows in 1..5u32) {
        name(&mut first, &mut 0);
        name(&mut second, &mut 0);
        let mut random = Random(seed);
        let schemas = [&first, &second].map(|json| Schema::parse(&json.to_string()).unwrap());
        let Ok(merged) = merge(&schemas[0], &schemas[1]) else { return Ok(()) };
        for writer in &schemas {
            let mut data = Vec::new();
            (0..rows).for_each(|_| encode(writer, writer.root(), &mut random, &mut data));
            let decoded = both_resolved(writer, Some(&merged), u64::MAX, &data, rows).unwrap();
            prop_assert_eq!(decoded.end.unwrap(), data.len() as u64);
            prop_assert_eq!(decoded.skipped.unwrap(), data.len());
        }
    }

    #[test]
    fn skipping_ends_where_decoding_ends(
        mut schema in types(),
        seed: u64,
        rows in 0..6u32,
        wanted: u64,
        damage in proptest::option::of((any::<prop::sample::Index>(), any::<u8>())),
    ) {
        name(&mut schema, &mut 0);
        let schema = Schema::parse(&schema.to_string()).unwrap();
        let mut random = Random(seed);
        let mut data = Vec::new();
        (0..rows).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
        match damage {
            None => {
                for wanted in [wanted, 0, u64::MAX] {
                    let decoded = both(&schema, wanted, &data, rows);
                    prop_assert_eq!(decoded.end.unwrap(), data.len() as u64);
                    prop_assert_eq!(decoded.skipped.unwrap(), data.len());
                }
            }
            // Skipping must accept all damaged data that decoding accepts. (The reverse doesn't hold: skipping checks
            // less.)
            Some((at, byte)) if !data.is_empty() => {
                let at = at.index(data.len());
                data[at] = byte;
                let decoded = both(&schema, u64::MAX, &data, rows);
                match decoded.end {
                    Ok(end) => prop_assert_eq!(decoded.skipped.unwrap() as u64, end),
                    Err(error) => prop_assert_ne!(error.kind(), ErrorKind::Internal),
                }
            }
            Some(_) => {}
        }
    }

    #[test]
    fn a_block_read_piecemeal_is_the_block_read_at_once(mut schema in types(), seed: u64, rows in 1..8u32, cut in 0..8u32) {
        name(&mut schema, &mut 0);
        let schema = Schema::parse(&schema.to_string()).unwrap();
        let mut data = Vec::new();
        let mut random = Random(seed);
        (0..rows).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
        let features: Vec<_> = infer(&schema).unwrap().into_iter().filter_map(|f| f.feature.ok()).collect();
        let mut next = 0;
        let columns: Vec<_> = features
            .iter()
            .map(|f| {
                let column = Column::new(&schema, f, next).unwrap();
                next += column.spec.parts().len() as u32;
                column
            })
            .collect();
        let plan = compile(&schema, None, &columns).unwrap();
        let parts: Arc<[_]> = columns.iter().flat_map(|c| c.spec.parts()).collect();
        let picks: Vec<_> = (0..rows).map(|i| Pick { record: i, slot: rows - 1 - i }).collect();
        let read = |cuts: &[usize]| {
            let batch = Rows::new(parts.clone(), rows as usize, &SlabPool::new(1)).unwrap();
            let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
            let left = AtomicU64::new(MAX_ZERO_WIDTH);
            let block = Block { plan: &plan, data: &data, rows, zero_width_left: &left, folders: &[] };
            let mut mark = Mark::START;
            for picks in cuts.windows(2).map(|w| &picks[w[0]..w[1]]) {
                mark = place(&block, mark, picks, &mut sink).unwrap();
            }
            let fragment = sink.finish();
            let arenas: Vec<_> = (0..parts.len()).map(|i| fragment.arena(i).0.to_vec()).collect();
            let filled = batch.complete().unwrap();
            let placed: Vec<_> = (0..parts.len())
                .map(|i| {
                    // The element before the lengths is written when the batch is joined.
                    let lead = if parts[i].kind == fastpipe_batch::PartKind::Lengths { 8 } else { 0 };
                    filled.place(i).map(|p| filled.bytes()[p][lead..].to_vec())
                })
                .collect();
            (mark, arenas, placed)
        };
        let n = rows as usize;
        let cut = (cut as usize).min(n);
        prop_assert_eq!(read(&[0, n]), read(&[0, cut, n]));
    }
}

/// The complete result of running a plan over a block: the written memory, or the error.
type Outcome = std::result::Result<(u64, Vec<Vec<u8>>, Vec<Option<Vec<u8>>>), String>;

fn outcome(plan: &Plan, columns: &[Column], data: &[u8], rows: u32) -> Outcome {
    let parts: Arc<[_]> = columns.iter().flat_map(|c| c.spec.parts()).collect();
    let batch = Rows::new(parts.clone(), rows as usize, &SlabPool::new(1)).unwrap();
    let mut sink = Sink::new(&batch, Fragment::default()).unwrap();
    let picks: Vec<_> = (0..rows)
        .map(|i| Pick {
            record: i,
            slot: rows - 1 - i,
        })
        .collect();
    let block = Block {
        folders: &[],
        plan,
        data,
        rows,
        zero_width_left: &AtomicU64::new(MAX_ZERO_WIDTH),
    };
    let mark = place(&block, Mark::START, &picks, &mut sink).map_err(|e| e.to_string())?;
    let fragment = sink.finish();
    let arenas = (0..parts.len()).map(|i| fragment.arena(i).0.to_vec()).collect();
    let filled = batch.complete().unwrap();
    let placed = (0..parts.len()).map(|i| {
        let lead = if parts[i].kind == fastpipe_batch::PartKind::Lengths {
            8
        } else {
            0
        };
        filled.place(i).map(|p| filled.bytes()[p][lead..].to_vec())
    });
    Ok((mark.byte, arenas, placed.collect()))
}

/// Decodes the same block by single steps, and by fused operations with every set of instructions.
fn outcomes(schema: &Schema, nulls: u8, data: &[u8], rows: u32) -> Vec<Outcome> {
    let features = infer(schema).unwrap();
    let mut next = 0;
    let columns: Vec<Column> = features
        .into_iter()
        .filter_map(|f| f.feature.ok())
        .map(|mut feature| {
            feature.nulls = match nulls {
                0 => feature.nulls,
                1 => fastpipe_batch::Nulls::Fill(None),
                _ => fastpipe_batch::Nulls::Error,
            };
            let column = Column::new(schema, &feature, next).unwrap();
            next += column.spec.parts().len() as u32;
            column
        })
        .collect();
    let mut outcomes = vec![outcome(
        &compile_steps(schema, None, &columns).unwrap(),
        &columns,
        data,
        rows,
    )];
    for isa in Isa::all() {
        let mut plan = compile(schema, None, &columns).unwrap();
        plan.isa = isa;
        outcomes.push(outcome(&plan, &columns, data, rows));
    }
    outcomes
}

/// Generates records of scalars, many of them nullable, among other fields.
fn scalars() -> impl Strategy<Value = serde_json::Value> {
    use serde_json::json;
    let scalar = (0..5usize, 0..3u8).prop_map(|(kind, null)| {
        let kind = json!(["boolean", "int", "long", "float", "double"][kind]);
        match null {
            0 => kind,
            1 => json!(["null", kind]),
            _ => json!([kind, "null"]),
        }
    });
    let field = prop_oneof![8 => scalar, 1 => types()];
    proptest::collection::vec(field, 0..12).prop_map(|fields| {
        let field = |(i, t)| json!({"name": format!("f{i}"), "type": t});
        json!({"type": "record", "fields": fields.into_iter().enumerate().map(field).collect::<Vec<_>>()})
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(600))]

    #[test]
    fn all_ways_of_reading_are_alike(
        mut schema in prop_oneof![scalars(), types()],
        seed: u64,
        rows in 1..6u32,
        nulls in 0..3u8,
        damage in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..3),
        cut in proptest::option::of(any::<prop::sample::Index>()),
    ) {
        name(&mut schema, &mut 0);
        let schema = Schema::parse(&schema.to_string()).unwrap();
        let mut data = Vec::new();
        let mut random = Random(seed);
        (0..rows).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
        if !data.is_empty() {
            for (at, byte) in damage {
                let at = at.index(data.len());
                data[at] = byte;
            }
            if let Some(cut) = cut {
                data.truncate(cut.index(data.len()));
            }
        }
        let outcomes = outcomes(&schema, nulls, &data, rows);
        for other in &outcomes[1..] {
            prop_assert_eq!(&outcomes[0], other);
        }
    }

    #[test]
    fn what_is_cut_short_fails_alike_everywhere(mut schema in scalars(), seed: u64) {
        name(&mut schema, &mut 0);
        let schema = Schema::parse(&schema.to_string()).unwrap();
        let mut data = Vec::new();
        let mut random = Random(seed);
        (0..2).for_each(|_| encode(&schema, schema.root(), &mut random, &mut data));
        for end in 0..data.len().min(120) {
            let outcomes = outcomes(&schema, 0, &data[..end], 2);
            for other in &outcomes[1..] {
                prop_assert_eq!(&outcomes[0], other);
            }
        }
    }
}

#[test]
fn scalars_are_fused() {
    let schema = r#"{"type": "record", "name": "R", "fields": [
        {"name": "a", "type": "int"}, {"name": "b", "type": ["null", "double"]}, {"name": "c", "type": ["long", "null"]},
        {"name": "d", "type": "string"}, {"name": "e", "type": "boolean"}]}"#;
    let schema = Schema::parse(schema).unwrap();
    let features = infer(&schema).unwrap().into_iter().map(|f| f.feature.unwrap());
    let mut next = 0;
    let columns: Vec<Column> = features
        .map(|feature| {
            let column = Column::new(&schema, &feature, next).unwrap();
            next += column.spec.parts().len() as u32;
            column
        })
        .collect();
    let plan = compile(&schema, None, &columns).unwrap();
    let ops = plan.record.of(&plan.ops);
    let runs: Vec<_> = ops
        .iter()
        .filter_map(|op| match op {
            Op::Scalars { scalars, cells } => Some((scalars.end - scalars.start, *cells)),
            _ => None,
        })
        .collect();
    assert_eq!((runs, ops.len()), (vec![(3, 5), (1, 1)], 3));
}

/// The plan of a union of many types grows at most with the number of columns plus the number of types.
#[test]
fn plans_of_wide_unions_are_small() {
    let branch = |i: u32| format!(r#"{{"type": "fixed", "name": "F{i}", "size": 1}}"#);
    let branches: Vec<_> = (0..4000).map(branch).collect();
    let schema = Schema::parse(&format!("[{}]", branches.join(","))).unwrap();
    let mut next = 0;
    let features = infer(&schema).unwrap().into_iter().filter_map(|f| f.feature.ok());
    let columns: Vec<Column> = features
        .map(|feature| {
            let column = Column::new(&schema, &feature, next).unwrap();
            next += column.spec.parts().len() as u32;
            column
        })
        .collect();
    assert_eq!(columns.len(), 4001);
    let plan = compile(&schema, None, &columns).unwrap();
    assert!(plan.emits.len() < 10 * columns.len(), "{} constants", plan.emits.len());
    assert!(plan.ops.len() < 20 * columns.len(), "{} operations", plan.ops.len());
}
