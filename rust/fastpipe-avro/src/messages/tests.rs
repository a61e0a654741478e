use fastpipe_batch::{Fragment, Rows, SlabPool};
use proptest::prelude::*;

use super::*;

const OLD: &str = r#"{"type": "record", "name": "R", "fields": [
    {"name": "x", "type": "int"}, {"name": "t", "type": "string"}, {"name": "n", "type": {"type": "array", "items": "null"}}]}"#;
const NEW: &str = r#"{"type": "record", "name": "R", "fields": [
    {"name": "n", "type": {"type": "array", "items": "null"}}, {"name": "more", "type": "double"},
    {"name": "t", "type": "string"}, {"name": "x", "type": "int"}]}"#;

fn long(value: i64, out: &mut Vec<u8>) {
    let mut n = ((value << 1) ^ (value >> 63)) as u64;
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
}

fn datum(new: bool, x: i32, text: &[u8], nulls: i64) -> Vec<u8> {
    let mut out = Vec::new();
    let array = |out: &mut Vec<u8>| {
        if nulls > 0 {
            long(nulls, out);
        }
        long(0, out);
    };
    let string = |out: &mut Vec<u8>| {
        long(text.len() as i64, out);
        out.extend(text);
    };
    if new {
        array(&mut out);
        out.extend(1.5f64.to_le_bytes());
        string(&mut out);
        long(x.into(), &mut out);
    } else {
        long(x.into(), &mut out);
        string(&mut out);
        array(&mut out);
    }
    out
}

fn schemas() -> MessageSchemas {
    let old = Arc::new(Schema::parse(OLD).unwrap());
    let columns = ["x".to_owned(), "t".to_owned()];
    let features = infer_message_columns(&old, Some(&columns)).unwrap();
    let mut schemas = MessageSchemas::new(&old, &features.features).unwrap();
    assert_eq!(schemas.add(&Schema::parse(NEW).unwrap()).unwrap(), 1);
    schemas
}

/// Returns the numbers and texts decoded from messages by two sinks.
fn decoded(schemas: &MessageSchemas, messages: &[(usize, Vec<u8>)], cut: usize) -> Result<(Vec<i32>, Vec<u8>)> {
    let pool = SlabPool::new(0);
    let rows = Rows::new(schemas.parts().clone(), messages.len(), &pool)?;
    let messages: Vec<_> = messages
        .iter()
        .map(|(schema, bytes)| Message {
            bytes,
            header: 0,
            schema: *schema,
        })
        .collect();
    let mut text = Vec::new();
    let (front, behind) = messages.split_at(cut.min(messages.len()));
    for (first, part) in [(0, front), (front.len(), behind)] {
        let mut sink = Sink::new(&rows, Fragment::default())?;
        schemas.decode(part, first as u32, &mut sink)?;
        let fragment = sink.finish();
        for part in 0..schemas.parts().len() {
            text.extend(fragment.arena(part).0);
        }
    }
    let filled = rows.complete()?;
    let place = filled.place(0).unwrap();
    let mut slab = filled.into_slab();
    let bytes = &slab.bytes_mut()[place];
    Ok((
        bytes.as_chunks().0.iter().map(|n| i32::from_le_bytes(*n)).collect(),
        text,
    ))
}

proptest! {
    #[test]
    fn messages_of_several_schemas_are_decoded_in_their_order(
        records in proptest::collection::vec((any::<bool>(), any::<i32>(), "[a-zé]{0,40}", 0..30i64), 0..60),
        cut in 0..70usize,
    ) {
        let schemas = schemas();
        let messages: Vec<_> = records
            .iter()
            .map(|(new, x, text, nulls)| (usize::from(*new), datum(*new, *x, text.as_bytes(), *nulls)))
            .collect();
        let (numbers, text) = decoded(&schemas, &messages, cut).unwrap();
        prop_assert_eq!(numbers, records.iter().map(|r| r.1).collect::<Vec<_>>());
        prop_assert_eq!(text, records.iter().flat_map(|r| r.2.bytes()).collect::<Vec<_>>());
    }

    #[test]
    fn whatever_is_wrong_names_the_message(
        count in 1..20usize,
        which in any::<prop::sample::Index>(),
        new: bool,
        kind in 0..4,
    ) {
        let schemas = schemas();
        let which = which.index(count);
        let mut messages: Vec<_> = (0..count).map(|i| (i % 2, datum(i % 2 == 1, 7, b"text", 2))).collect();
        let mut bad = datum(new, 7, if kind == 0 { b"te\xfft" } else { b"text" }, 2);
        match kind {
            1 => bad.truncate(bad.len() - 1),
            2 => bad.push(0),
            3 => bad.clear(),
            _ => {}
        }
        let size = bad.len() as u64;
        messages[which] = (usize::from(new), bad);
        let error = decoded(&schemas, &messages, 5).unwrap_err();
        prop_assert_eq!(error.kind(), ErrorKind::Malformed);
        prop_assert_eq!(error.location().record, Some(which as u64), "{}", error);
        prop_assert!(error.location().offset.unwrap() <= size, "{}", error);
        prop_assert!(!error.to_string().contains("block"), "{}", error);
    }
}

#[test]
fn items_without_bytes_are_bounded_over_all_messages() {
    let schemas = schemas();
    let few = vec![(0, datum(false, 1, b"", 100)); 100];
    decoded(&schemas, &few, 0).unwrap();
    let many = vec![(0, datum(false, 1, b"", 1 << 12)); 100];
    let error = decoded(&schemas, &many, 0).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
}

#[test]
fn headers_select_schemas() {
    let single = [&[0xc3, 0x01][..], &0x0123_4567_89ab_cdefu64.to_le_bytes(), b"x"].concat();
    assert_eq!(Framing::SingleObject.key(&single, 0).unwrap(), 0x0123_4567_89ab_cdef);
    assert_eq!(Framing::Registry.key(&[0, 0, 0, 1, 2, 9], 0).unwrap(), 258);
    assert_eq!(Framing::Bare.key(&[], 0).unwrap(), 0);
    for (framing, bytes, reason) in [
        (Framing::SingleObject, &b"\xc3\x02........"[..], "found C3 02"),
        (Framing::SingleObject, b"\xc3\x01.......", "found a message of 9"),
        (Framing::SingleObject, b"", "found a message of 0"),
        (Framing::Registry, b"\x01....", "found 01"),
        (
            Framing::Registry,
            b"\x00...",
            "a header of 5 bytes, found a message of 4",
        ),
    ] {
        let error = framing.key(bytes, 17).unwrap_err();
        assert_eq!(
            (error.kind(), error.location().record),
            (ErrorKind::Malformed, Some(17))
        );
        assert!(error.reason().contains(reason), "{error}");
    }
    let unknown = Framing::SingleObject.unknown(0xab, 3);
    assert!(unknown.reason().contains("00000000000000ab"), "{unknown}");
    assert_eq!(unknown.kind(), ErrorKind::Schema);
}
