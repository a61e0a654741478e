//! For any bytes in a file, sequential reading and picking return the same rows, and each error has a location.

use proptest::prelude::*;

#[path = "../../fuzz/bodies/csv.rs"]
mod body;

fn pieces() -> impl Strategy<Value = Vec<u8>> {
    let piece = proptest::sample::select(vec![
        &b"1"[..],
        b"2.5",
        b"-9",
        b"255",
        b"256",
        b"true",
        b"2024-02-29",
        b"2024-02-29 10:00:00",
        b"NA",
        b"x",
        b"",
        b" ",
        b",",
        b",",
        b",",
        b"\n",
        b"\n",
        b"\r\n",
        b"\r",
        b"\"",
        b"\"\"",
        b"#",
        b";",
        b"\xff",
        b"e5",
        b"inf",
        b"99999999999999999999",
    ]);
    proptest::collection::vec(piece, 0..120).prop_map(|pieces| pieces.concat())
}

/// Rows of a few fields that most features can read.
fn tables() -> impl Strategy<Value = Vec<u8>> {
    let field = proptest::sample::select(vec!["1", "0", "-9", "", "NA", "\"1\"", "1 ", "\"0\n\""]);
    let row = proptest::collection::vec(field, 2).prop_map(|fields| fields.join(","));
    proptest::collection::vec(row, 1..60).prop_map(|rows| rows.join("\n").into_bytes())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(1000))]

    #[test]
    fn any_file_is_read_alike_in_every_way(
        bytes in prop_oneof![pieces(), tables(), any::<Vec<u8>>()],
        choices in any::<u8>(),
        chosen in 0u8..9,
        goal in any::<u8>(),
        ends in proptest::collection::vec(0u16..400, 0..5),
    ) {
        body::run(&(choices, chosen, goal, ends, bytes));
    }
}
