//! Reads hostile container files: damaged ones, and valid ones with false record counts.

use proptest::prelude::*;

#[path = "../../fuzz/bodies/container.rs"]
mod body;

const SYNC: [u8; 16] = [0xa5; 16];
const RECORD: &str =
    r#"{"type": "record", "name": "R", "fields": [{"name": "a", "type": "long"}, {"name": "s", "type": "string"}]}"#;
const NULLS: &str = r#"{"type": "record", "name": "R", "fields": [{"name": "a", "type": "null"}]}"#;

fn long(value: i64, out: &mut Vec<u8>) {
    let mut n = (value << 1 ^ value >> 63) as u64;
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn text(value: &str, out: &mut Vec<u8>) {
    long(value.len() as i64, out);
    out.extend(value.as_bytes());
}

fn deflated(data: &[u8]) -> Vec<u8> {
    let mut c = libdeflater::Compressor::new(libdeflater::CompressionLvl::default());
    let mut out = vec![0; c.deflate_compress_bound(data.len())];
    let n = c.deflate_compress(data, &mut out).unwrap();
    out.truncate(n);
    out
}

/// Returns a file of blocks with these record counts and arbitrary contents.
fn file(schema: &str, codec: &str, blocks: &[(i64, Vec<u8>)]) -> Vec<u8> {
    let mut out = b"Obj\x01".to_vec();
    long(2, &mut out);
    for (key, value) in [("avro.schema", schema), ("avro.codec", codec)] {
        text(key, &mut out);
        text(value, &mut out);
    }
    out.push(0);
    out.extend(SYNC);
    for (rows, data) in blocks {
        let stored = if codec == "deflate" {
            deflated(data)
        } else {
            data.clone()
        };
        long(*rows, &mut out);
        long(stored.len() as i64, &mut out);
        out.extend(stored);
        out.extend(SYNC);
    }
    out
}

fn sound() -> Vec<(i64, Vec<u8>)> {
    let block = |from: i64| {
        let mut data = Vec::new();
        for i in from..from + 5 {
            long(i * 1000, &mut data);
            text(&"x".repeat(i as usize), &mut data);
        }
        (5, data)
    };
    vec![block(0), block(5)]
}

fn rows() -> impl Strategy<Value = i64> {
    prop_oneof![
        -2..20i64,
        Just((1i64 << 31) - 1),
        Just(1i64 << 24),
        0..1i64 << 31,
        any::<i64>()
    ]
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(300) })]

    #[test]
    fn damage_never_panics(
        deflate: bool,
        changes in proptest::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in prop_oneof![2 => Just(None), 1 => any::<prop::sample::Index>().prop_map(Some)],
    ) {
        let mut bytes = file(RECORD, if deflate { "deflate" } else { "null" }, &sound());
        for (at, byte) in changes {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if let Some(cut) = cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        body::run(&bytes);
    }

    /// False record counts of any kind must not cause a panic.
    #[test]
    fn lies_about_rows_never_panic(
        schema in prop_oneof![Just(RECORD), Just(NULLS), Just("\"boolean\"")],
        codec in prop_oneof![Just("null"), Just("deflate"), Just("snappy"), Just("zstandard"), Just("bzip2"), Just("xz")],
        blocks in proptest::collection::vec((rows(), proptest::collection::vec(any::<u8>(), 0..2000)), 0..5),
    ) {
        body::run(&file(schema, codec, &blocks));
    }
}
