//! Reads the written files with the apache-avro crate.

use std::sync::Arc;

use apache_avro::types::Value;
use arrow_array::builder::{Int64Builder, ListBuilder, MapBuilder, StringBuilder};
use arrow_array::cast::AsArray;
use arrow_array::types::Int64Type;
use arrow_array::{
    Array, ArrayRef, BooleanArray, FixedSizeBinaryArray, Float32Array, Int64Array, LargeStringArray, ListArray,
    RecordBatch, StringArray, StructArray, TimestampMicrosecondArray,
};
use arrow_schema::{DataType, Field};
use fastpipe_avro_write::{Codec, Compression, Encoder, Schema, Settings, infer};
use proptest::prelude::*;

fn settings(codec: Codec, block_bytes: usize, threads: usize) -> Settings {
    Settings {
        compression: Compression::new(codec.name(), None).expect("a codec"),
        block_bytes,
        threads,
        sync: *b"0123456789abcdef",
    }
}

fn write(batches: &[RecordBatch], schema: Schema, settings: Settings) -> Vec<u8> {
    let mut encoder = Encoder::create(
        Vec::new(),
        "test".into(),
        schema,
        settings,
        &[("k".into(), b"v".to_vec())],
    )
    .expect("a header");
    for batch in batches {
        encoder.push(batch).expect("rows");
    }
    let (bytes, written) = encoder.finish().expect("an end");
    assert_eq!(written.bytes, bytes.len() as u64);
    assert_eq!(
        written.rows,
        batches.iter().map(|batch| batch.num_rows() as u64).sum::<u64>()
    );
    bytes
}

fn read(bytes: &[u8]) -> Vec<Vec<(String, Value)>> {
    let reader = apache_avro::Reader::new(bytes).expect("a container file");
    reader
        .map(|row| match row.expect("a record") {
            Value::Record(fields) => fields,
            other => panic!("{other:?} is no record"),
        })
        .collect()
}

fn some(value: Value) -> Value {
    Value::Union(1, Box::new(value))
}

fn null() -> Value {
    Value::Union(0, Box::new(Value::Null))
}

type Row = (
    Option<i64>,
    String,
    Vec<Option<bool>>,
    f32,
    Option<Vec<(String, Option<i64>)>>,
    Option<(i64, Option<String>)>,
);

fn rows() -> impl Strategy<Value = Vec<Row>> {
    let maybe = |of: BoxedStrategy<i64>| proptest::option::of(of);
    let row = (
        maybe(any::<i64>().boxed()),
        "\\PC{0,8}",
        proptest::collection::vec(proptest::option::of(any::<bool>()), 0..5),
        -1e9_f32..1e9,
        proptest::option::of(proptest::collection::vec(
            ("[a-z]{1,9}", maybe(any::<i64>().boxed())),
            0..2,
        )),
        proptest::option::of((any::<i64>(), proptest::option::of("[a-z]{0,5}".prop_map(String::from)))),
    );
    proptest::collection::vec(row, 0..40)
}

fn batch(rows: &[Row]) -> RecordBatch {
    let ids: Int64Array = rows.iter().map(|row| row.0).collect();
    let texts = LargeStringArray::from_iter_values(rows.iter().map(|row| &row.1));
    let mut lists = ListBuilder::new(arrow_array::builder::BooleanBuilder::new());
    let mut maps = MapBuilder::new(None, StringBuilder::new(), Int64Builder::new());
    for row in rows {
        lists.append_value(row.2.iter().copied());
        for (key, value) in row.4.iter().flatten() {
            maps.keys().append_value(key);
            maps.values().append_option(*value);
        }
        maps.append(row.4.is_some()).expect("as many keys as values");
    }
    let inner_ids: Int64Array = rows
        .iter()
        .map(|row| Some(row.5.as_ref().map_or(0, |inner| inner.0)))
        .collect();
    let inner_texts: StringArray = rows
        .iter()
        .map(|row| row.5.as_ref().and_then(|inner| inner.1.clone()))
        .collect();
    let fields = vec![
        Field::new("x", DataType::Int64, false),
        Field::new("y", DataType::Utf8, true),
    ];
    let structs = StructArray::new(
        fields.into(),
        vec![Arc::new(inner_ids), Arc::new(inner_texts)],
        Some(rows.iter().map(|row| row.5.is_some()).collect()),
    );
    let lists: ListArray = lists.finish();
    RecordBatch::try_from_iter_with_nullable([
        ("id", Arc::new(ids) as ArrayRef, true),
        ("text", Arc::new(texts), false),
        ("flags", Arc::new(lists), false),
        (
            "f",
            Arc::new(Float32Array::from_iter_values(rows.iter().map(|row| row.3))),
            false,
        ),
        ("map", Arc::new(maps.finish()), true),
        ("inner", Arc::new(structs), true),
    ])
    .expect("a record batch")
}

fn value(row: &Row) -> Vec<(String, Value)> {
    let maybe = |value: Option<i64>| value.map_or_else(null, |value| some(Value::Long(value)));
    let named = |name: &str, value: Value| (name.to_owned(), value);
    let flags = row
        .2
        .iter()
        .map(|flag| flag.map_or_else(null, |flag| some(Value::Boolean(flag))));
    let map = row.4.as_ref().map_or_else(null, |entries| {
        some(Value::Map(
            entries
                .iter()
                .map(|(key, value)| (key.clone(), maybe(*value)))
                .collect(),
        ))
    });
    let inner = row.5.as_ref().map_or_else(null, |(x, y)| {
        let y = y.clone().map_or_else(null, |y| some(Value::String(y)));
        some(Value::Record(vec![named("x", Value::Long(*x)), named("y", y)]))
    });
    vec![
        named("id", maybe(row.0)),
        named("text", Value::String(row.1.clone())),
        named("flags", Value::Array(flags.collect())),
        named("f", Value::Float(row.3)),
        named("map", map),
        named("inner", inner),
    ]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    #[test]
    fn rows_are_read_as_they_were_given(
        rows in rows(),
        codec in proptest::sample::select(Codec::ALL.to_vec()),
        block_bytes in prop_oneof![Just(1_usize), 10_usize..200, Just(1 << 16)],
        threads in 1_usize..4,
        cut in any::<prop::sample::Index>(),
    ) {
        let whole = batch(&rows);
        let schema = infer(whole.schema().fields(), "Row").expect("a schema");
        let cut = cut.index(rows.len() + 1);
        // Slices have offsets in lists, bits and children.
        let parts = [whole.slice(0, cut), whole.slice(cut, rows.len() - cut)];
        let bytes = write(&parts, schema.clone(), settings(codec, block_bytes, threads));
        let duplicates = rows.iter().any(|row| row.4.as_ref().is_some_and(|map| map.len() == 2 && map[0].0 == map[1].0));
        if !duplicates {
            prop_assert_eq!(read(&bytes), rows.iter().map(value).collect::<Vec<_>>());
        }
        prop_assert!(bytes == write(&[whole], schema, settings(codec, block_bytes, 1)));
    }
}

#[test]
fn logical_types_and_names_are_kept() {
    let schema = r#"{"type":"record","name":"a.b.R","fields":[
        {"name":"suit","type":{"type":"enum","name":"Suit","symbols":["A","B"]}},
        {"name":"fixed","type":{"type":"fixed","name":"F","size":2}},
        {"name":"again","type":["F","null"]},
        {"name":"at","type":{"type":"long","logicalType":"timestamp-millis"}}]}"#;
    let fixed = || FixedSizeBinaryArray::try_from_iter([b"ab", b"cd"].into_iter()).expect("two bytes");
    let batch = RecordBatch::try_from_iter([
        (
            "at",
            Arc::new(TimestampMicrosecondArray::from(vec![5000, -7000])) as ArrayRef,
        ),
        ("suit", Arc::new(StringArray::from(vec!["B", "A"]))),
        ("again", Arc::new(fixed())),
        ("fixed", Arc::new(fixed())),
    ]);
    let schema = Schema::parse(schema).expect("a schema");
    let bytes = write(&[batch.expect("a record batch")], schema, settings(Codec::Snappy, 1, 1));
    let rows = read(&bytes);
    assert_eq!(rows[0][0].1, Value::Enum(1, "B".into()));
    assert_eq!(rows[1][1].1, Value::Fixed(2, b"cd".to_vec()));
    assert_eq!(rows[1][2].1, Value::Union(0, Box::new(Value::Fixed(2, b"cd".to_vec()))));
    assert_eq!(rows[1][3].1, Value::TimestampMillis(-7));
}

/// Values below a null or outside of the offsets are ignored, even if they are null or out of range.
#[test]
fn values_without_rows_are_ignored() {
    let schema = r#"{"type":"record","name":"R","fields":[
        {"name":"list","type":["null",{"type":"array","items":"int"}]},
        {"name":"inner","type":["null",{"type":"record","name":"I","fields":[{"name":"x","type":"int"}]}]}]}"#;
    let values: Int64Array = vec![Some(i64::MAX), Some(1), None, Some(2), None].into_iter().collect();
    let offsets = arrow_buffer::OffsetBuffer::new(vec![1, 2, 3, 4].into());
    let valid = || Some(arrow_buffer::NullBuffer::from(vec![true, false, true]));
    let item = Arc::new(Field::new("item", DataType::Int64, true));
    let list = ListArray::new(item, offsets, Arc::new(values), valid());
    let x: Int64Array = vec![Some(7), Some(i64::MIN), Some(8)].into_iter().collect();
    let x: ArrayRef = Arc::new(x);
    let inner = StructArray::new(vec![Field::new("x", DataType::Int64, true)].into(), vec![x], valid());
    let batch = RecordBatch::try_from_iter([("list", Arc::new(list) as ArrayRef), ("inner", Arc::new(inner))]);
    let schema = Schema::parse(schema).expect("a schema");
    let rows = read(&write(
        &[batch.expect("a record batch")],
        schema,
        settings(Codec::Null, 1, 1),
    ));
    assert_eq!(rows[0][0].1, some(Value::Array(vec![Value::Int(1)])));
    assert_eq!((&rows[1][0].1, &rows[1][1].1), (&null(), &null()));
    assert_eq!(rows[2][1].1, some(Value::Record(vec![("x".into(), Value::Int(8))])));
}

/// `arrow-avro` reads the wrong bits for a list's booleans if they don't begin with their buffer.
#[test]
fn bools_at_a_bit_offset_are_read() {
    let bools = BooleanArray::from(vec![true, false, true, true, false]).slice(1, 4);
    let offsets = arrow_buffer::OffsetBuffer::new(vec![0, 2, 4].into());
    let item = Arc::new(Field::new("item", DataType::Boolean, false));
    let list = ListArray::new(item, offsets, Arc::new(bools), None);
    let batch =
        RecordBatch::try_from_iter_with_nullable([("b", Arc::new(list) as ArrayRef, false)]).expect("a record batch");
    let schema = infer(batch.schema().fields(), "R").expect("a schema");
    let rows = read(&write(&[batch], schema, settings(Codec::Null, 1, 1)));
    let flags = |a, b| Value::Array(vec![Value::Boolean(a), Value::Boolean(b)]);
    assert_eq!(
        (&rows[0][0].1, &rows[1][0].1),
        (&flags(false, true), &flags(true, false))
    );
}

#[test]
fn exponentially_large_schemas_are_refused() {
    let mut fields =
        String::from(r#"{"name":"f0","type":{"type":"record","name":"T0","fields":[{"name":"x","type":"int"}]}}"#);
    for i in 1..40 {
        let below = i - 1;
        fields += &format!(
            r#",{{"name":"f{i}","type":{{"type":"record","name":"T{i}","fields":[
            {{"name":"a","type":"T{below}"}},{{"name":"b","type":"T{below}"}}]}}}}"#
        );
    }
    let error =
        Schema::parse(&format!(r#"{{"type":"record","name":"R","fields":[{fields}]}}"#)).expect_err("2^40 types");
    assert_eq!(error.kind(), fastpipe_batch::ErrorKind::Limit);
    let deep = format!(
        "{}\"int\"{}",
        r#"{"type":"array","items":"#.repeat(5000),
        "}".repeat(5000)
    );
    assert!(Schema::parse(&deep).is_err());
}

#[test]
fn nested_columns_are_records() {
    let column = |value: i64| Arc::new(Int64Array::from(vec![value])) as ArrayRef;
    let batch = RecordBatch::try_from_iter([
        ("a.b", column(1)),
        ("c", column(2)),
        ("a.d.e", column(3)),
        ("a.d.f", column(4)),
    ]);
    let nested = fastpipe_avro_write::nested(&batch.expect("a record batch")).expect("records");
    assert_eq!(
        nested
            .schema()
            .fields()
            .iter()
            .map(|field| field.name().as_str())
            .collect::<Vec<_>>(),
        ["a", "c"]
    );
    let a = nested.column(0).as_struct();
    let d = a.column_by_name("d").expect("d").as_struct();
    assert_eq!(
        d.column_by_name("f").expect("f").as_primitive::<Int64Type>().value(0),
        4
    );
    assert_eq!(a.null_count(), 0);
}
