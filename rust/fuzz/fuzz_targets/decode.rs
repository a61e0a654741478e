//! Decodes arbitrary bytes as a block of records with one of a few schemas. If the block can be decoded, skipping must
//! end at the same byte. The target skips all records but the last, and all features but one.
#![no_main]

use std::sync::{Arc, OnceLock};

use fastpipe_avro::{AvroSource, Block, FileInfo, Header, SYNC_BYTES, Schema, infer};
use fastpipe_batch::{BufferPool, Error, ErrorKind, Feature, Fragment, Mark, Pass, Pick, Rows, Sink, SlabPool, Source};
use libfuzzer_sys::fuzz_target;

const SCHEMAS: [&str; 5] = [
    r#"{"type": "record", "name": "R", "fields": [
        {"name": "i", "type": "int"}, {"name": "l", "type": "long"}, {"name": "b", "type": "boolean"},
        {"name": "f", "type": "float"}, {"name": "d", "type": "double"}, {"name": "s", "type": "string"},
        {"name": "y", "type": "bytes"}, {"name": "n", "type": "null"},
        {"name": "x", "type": {"type": "fixed", "name": "F", "size": 3}},
        {"name": "e", "type": {"type": "enum", "name": "E", "symbols": ["A", "B", "C"]}}]}"#,
    r#"{"type": "record", "name": "R", "fields": [
        {"name": "longs", "type": {"type": "array", "items": "long"}},
        {"name": "floats", "type": {"type": "array", "items": "float"}},
        {"name": "strings", "type": {"type": "array", "items": "string"}},
        {"name": "deep", "type": {"type": "array", "items": {"type": "array", "items": "int"}}},
        {"name": "map", "type": {"type": "map", "values": ["null", "double"]}}]}"#,
    r#"{"type": "record", "name": "R", "fields": [
        {"name": "a", "type": ["null", "long"]}, {"name": "b", "type": ["string", "null"]},
        {"name": "c", "type": ["null", {"type": "array", "items": ["null", "int"]}]},
        {"name": "d", "type": {"type": "array", "items": {"type": "record", "name": "I", "fields": [
            {"name": "p", "type": "int"}, {"name": "q", "type": "string"}, {"name": "r", "type": "null"}]}}}]}"#,
    r#"{"type": "record", "name": "R", "fields": [
        {"name": "one", "type": {"type": "record", "name": "S", "fields": [
            {"name": "indices0", "type": {"type": "array", "items": "long"}},
            {"name": "values", "type": {"type": "array", "items": "float"}}]}},
        {"name": "two", "type": ["null", {"type": "record", "name": "T", "fields": [
            {"name": "values", "type": {"type": "array", "items": "string"}},
            {"name": "indices1", "type": {"type": "array", "items": "int"}},
            {"name": "indices0", "type": {"type": "array", "items": "int"}}]}]}]}"#,
    r#"{"type": "record", "name": "R", "fields": [
        {"name": "tree", "type": {"type": "record", "name": "Tree", "fields": [
            {"name": "v", "type": "int"}, {"name": "children", "type": {"type": "array", "items": "Tree"}}]}},
        {"name": "any", "type": ["null", "int", "string", "Tree"]},
        {"name": "last", "type": "int"}]}"#,
];

const SYNC: [u8; SYNC_BYTES] = [0; SYNC_BYTES];

/// Returns the schemas, each with its readable features.
fn schemas() -> &'static [(Arc<Schema>, Vec<Feature>)] {
    static PARSED: OnceLock<Vec<(Arc<Schema>, Vec<Feature>)>> = OnceLock::new();
    PARSED.get_or_init(|| {
        let parse = |json: &&str| {
            let schema = Schema::parse(json).unwrap();
            let features = infer(&schema).unwrap();
            (
                Arc::new(schema),
                features.into_iter().filter_map(|f| f.feature.ok()).collect(),
            )
        };
        SCHEMAS.iter().map(parse).collect()
    })
}

fn long(value: usize, out: &mut Vec<u8>) {
    let mut n = 2 * value as u64;
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

/// Reads some records of a block for some features. Returns the offset at which reading ended.
fn read(schema: &Arc<Schema>, features: &[Feature], rows: u32, data: &[u8], wanted: &[u32]) -> Result<u64, Error> {
    let mut stored = Vec::new();
    long(rows as usize, &mut stored);
    long(data.len(), &mut stored);
    stored.extend(data);
    stored.extend(SYNC);
    let header = Header {
        metadata: Default::default(),
        sync: SYNC,
        size: 0,
    };
    let info = FileInfo {
        path: "memory".into(),
        header,
        schema: schema.clone(),
        codec: fastpipe_avro::Codec::Null,
    };
    let block = Block::parse(&stored, 0)?;
    let source = AvroSource::new(features, &[(info, vec![block])])?;
    let pool = BufferPool::default();
    let unit = source.open(0, Pass::default(), pool.copy(&stored)?.into(), &pool)?;
    let parts: Arc<[_]> = source.facts().columns.iter().flat_map(|c| c.parts()).collect();
    let batch = Rows::new(parts, wanted.len(), &SlabPool::new(1))?;
    let mut sink = Sink::new(&batch, Fragment::default())?;
    let picks: Vec<_> = (0..).zip(wanted).map(|(slot, &record)| Pick { record, slot }).collect();
    Ok(unit.place(Mark::START, &picks, &mut sink)?.byte)
}

fuzz_target!(|input: (u8, u8, &[u8])| {
    let (which, rows, data) = input;
    let (schema, features) = &schemas()[usize::from(which) % SCHEMAS.len()];
    let rows = u32::from(rows % 8) + 1;
    let all: Vec<u32> = (0..rows).collect();
    match read(schema, features, rows, data, &all) {
        Ok(end) => {
            assert_eq!(end, data.len() as u64);
            // Skipping checks less than decoding. Data that can be decoded must therefore be skipped without an error,
            // but not vice versa.
            let last = read(schema, features, rows, data, &[rows - 1]);
            assert_eq!(last.unwrap(), end, "skipping records ended elsewhere");
            for feature in features {
                let one = read(schema, std::slice::from_ref(feature), rows, data, &all);
                assert_eq!(one.unwrap(), end, "skipping all features but '{}' ended elsewhere", feature.name);
            }
        }
        Err(error) => assert_ne!(error.kind(), ErrorKind::Internal, "{error}"),
    }
});
