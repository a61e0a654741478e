//! For any bytes in a record, sequential reading and picking return the same rows, and each error has a location.

use proptest::prelude::*;

#[path = "../../fuzz/bodies/tfrecord.rs"]
mod body;

/// Returns a length-delimited field.
fn field(number: u8, value: &[u8]) -> Vec<u8> {
    let mut out = vec![number << 3 | 2];
    let mut length = value.len();
    while length >= 0x80 {
        out.push(length as u8 | 0x80);
        length >>= 7;
    }
    out.push(length as u8);
    out.extend(value);
    out
}

/// The message of a list, whose numbers may be packed or not.
fn list() -> impl Strategy<Value = Vec<u8>> {
    let text = proptest::sample::select(vec![&b""[..], b"a", b"text", b"\xff"]);
    let texts = proptest::collection::vec(text.prop_map(|text| field(1, text)), 0..4);
    let floats = proptest::collection::vec(any::<f32>(), 0..5);
    let number = proptest::sample::select(vec![
        &b"\0"[..],
        b"\x01",
        b"\xff\x01",
        b"\xff\xff\xff\xff\xff\xff\xff\xff\xff\x01",
    ]);
    let numbers = proptest::collection::vec(number, 0..5);
    prop_oneof![
        texts.prop_map(|texts| field(1, &texts.concat())),
        floats.prop_map(|floats| field(
            2,
            &field(1, &floats.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>())
        )),
        numbers
            .clone()
            .prop_map(|numbers| field(3, &field(1, &numbers.concat()))),
        numbers.prop_map(|numbers| field(
            3,
            &numbers
                .iter()
                .map(|n| [b"\x08", *n].concat())
                .collect::<Vec<_>>()
                .concat()
        )),
        Just(Vec::new()),
    ]
}

/// A message, of which a byte may be changed.
fn example() -> impl Strategy<Value = Vec<u8>> {
    let key = proptest::sample::select(vec!["a", "b", "c", "d", "e"]);
    let entry = (key, list(), 0..20).prop_map(|(key, list, other)| {
        let mut entry = [field(1, key.as_bytes()), field(2, &list)].concat();
        if other == 0 {
            entry.extend(field(7, b"unknown"));
        }
        field(1, &entry)
    });
    let features = proptest::collection::vec(entry, 0..6).prop_map(|entries| field(1, &entries.concat()));
    let change = proptest::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>()));
    (features, change).prop_map(|(mut message, change)| {
        if let Some((at, byte)) = change {
            let at = at.index(message.len());
            message[at] = byte;
        }
        message
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1500))]

    #[test]
    fn any_records_are_read_alike_in_every_way(
        records in proptest::collection::vec(prop_oneof![6 => example(), 1 => any::<Vec<u8>>()], 0..6),
        rest in prop_oneof![3 => Just(Vec::new()), 1 => any::<Vec<u8>>()],
        chosen in 0u8..12,
    ) {
        body::run(&(chosen, records, rest));
    }
}
