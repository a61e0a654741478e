use proptest::prelude::*;

use super::*;
use crate::decode::{Coordinates, Indices};
use crate::number::{Ints, Longs, Number};

/// A naive encoder that follows the specification's definition of zigzag and varint.
fn encode(value: i64) -> Vec<u8> {
    let mut n = ((value << 1) ^ (value >> 63)) as u64;
    let mut out = Vec::new();
    while n >= 0x80 {
        out.push(n as u8 | 0x80);
        n >>= 7;
    }
    out.push(n as u8);
    out
}

proptest! {
    #[test]
    fn longs_of_all_lengths_round_trip(bits in 0..64u32, raw: i64, padding in 0..12usize) {
        let value = raw >> bits;
        let mut data = encode(value);
        let len = data.len();
        data.resize(len + padding, 0xff);
        let mut cursor = Cursor::new(&data, 0);
        prop_assert_eq!(cursor.long(), Ok(value));
        prop_assert_eq!(cursor.position(), len);
        let mut skipped = Cursor::new(&data, 0);
        prop_assert_eq!(skipped.skip_long(), Ok(()));
        prop_assert_eq!(skipped.position(), len);
    }

    #[test]
    fn many_longs_are_read_like_single_ones(
        values in proptest::collection::vec((0..64u32, any::<i64>()).prop_map(|(bits, raw)| raw >> bits), 0..60),
        shift in prop_oneof![Just(0u32), 30..64u32],
        cut in 0..20usize,
    ) {
        let values: Vec<i64> = values.iter().map(|v| v >> shift).collect();
        let mut data: Vec<u8> = values.iter().flat_map(|v| encode(*v)).collect();
        data.truncate(data.len().saturating_sub(cut));
        let mut many = Vec::new();
        let mut cursor = Cursor::new(&data, 0);
        let all = cursor.longs(values.len(), |i, value| {
            assert_eq!(i, many.len());
            many.push(value);
            Ok(())
        });
        let mut single = Cursor::new(&data, 0);
        let expected: Result<Vec<i64>> = values.iter().map(|_| single.long()).collect();
        prop_assert_eq!(all.is_ok(), expected.is_ok());
        prop_assert_eq!(&many[..], &values[..many.len()]);
        let mut skipped = Cursor::new(&data, 0);
        prop_assert_eq!(skipped.skip_longs(values.len()).is_ok(), expected.is_ok());
        if expected.is_ok() {
            prop_assert_eq!(cursor.position(), data.len());
            prop_assert_eq!(skipped.position(), data.len());
        }
    }

    #[test]
    fn the_last_of_those_skipped_is_checked(
        before in proptest::collection::vec(any::<i64>(), 0..40),
        continued in 0..13usize,
        last in 0..4u8,
        behind in 0..20usize,
    ) {
        let mut data: Vec<u8> = before.iter().flat_map(|v| encode(*v)).collect();
        let start = data.len();
        data.extend(vec![0xFF; continued]);
        data.push(last);
        let end = data.len();
        data.extend(vec![0; behind]);
        let single = Cursor::new(&data, start).long();
        let mut cursor = Cursor::new(&data, 0);
        let skipped = cursor.skip_longs(before.len() + 1);
        prop_assert_eq!(skipped, single.map(drop));
        prop_assert!(skipped.is_err() || cursor.position() == end);
    }

    #[test]
    fn any_bytes_are_read_alike_with_and_without_room_behind(data in proptest::collection::vec(any::<u8>(), 0..12)) {
        let short = Cursor::new(&data, 0).long();
        let mut padded = data.clone();
        padded.resize(data.len() + 12, 0);
        match short {
            Err(DecodeError::End { .. }) => {}
            _ => prop_assert_eq!(short, Cursor::new(&padded, 0).long()),
        }
    }
}

#[test]
fn overlong_varints_are_refused() {
    for extra in [0, 10] {
        let mut eleven = vec![0x80; 10];
        eleven.resize(11 + extra, 0);
        assert_eq!(Cursor::new(&eleven, 0).long(), Err(DecodeError::Varint));
        let mut wide = vec![0xff; 9];
        wide.push(2);
        wide.resize(10 + extra, 0);
        assert_eq!(Cursor::new(&wide, 0).long(), Err(DecodeError::Varint));
    }
    assert_eq!(
        Cursor::new(&[0x80], 0).long(),
        Err(DecodeError::End { need: 2, left: 1 })
    );
}

#[test]
fn counts_are_checked_against_the_remaining_bytes() {
    let hostile = encode(1 << 62);
    assert!(matches!(
        Cursor::new(&hostile, 0).items(1),
        Err(DecodeError::ItemCount { .. })
    ));
    assert!(matches!(Cursor::new(&hostile, 0).items(0), Err(DecodeError::ZeroWidth)));
    let negative = encode(i64::MIN);
    assert!(matches!(
        Cursor::new(&negative, 0).items(1),
        Err(DecodeError::End { .. })
    ));
    let mut sized = encode(-2);
    sized.extend(encode(-5));
    assert!(matches!(Cursor::new(&sized, 0).items(1), Err(DecodeError::Length(-5))));
}

/// Generates valid and invalid bytes: numbers of all lengths, numbers that are too long, and arbitrary bytes.
fn varint_bytes() -> impl Strategy<Value = Vec<u8>> {
    let piece = prop_oneof![
        6 => (0..64u32, any::<i64>()).prop_map(|(bits, raw)| encode(raw >> bits)),
        6 => (0..40u32).prop_map(|bits| encode((1i64 << bits) - 7)),
        1 => (1..12usize, 0..3u8).prop_map(|(n, last)| {
            let mut long = vec![0x80; n];
            long.push(last);
            long
        }),
    ];
    let alike = (0..9usize, 0..100usize).prop_map(|(width, n)| encode((1i64 << (7 * width)) - 1).repeat(n));
    let mixed = proptest::collection::vec(piece, 0..90).prop_map(|pieces| pieces.concat());
    let short = (36..64u32, any::<i64>()).prop_map(|(bits, raw)| encode(raw >> bits));
    let short = proptest::collection::vec(short, 0..90).prop_map(|pieces| pieces.concat());
    prop_oneof![3 => mixed, 1 => alike, 2 => short]
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(2000))]

    #[test]
    fn all_instructions_read_alike(
        mut data in varint_bytes(),
        start in 0..20usize,
        n in 0..100usize,
        slack in 0..10usize,
        limit in prop_oneof![
            2 => Just(1 << 63),
            // Truncated to 32 bits, most negative numbers would be below this limit.
            1 => Just((1 << 32) - 1),
            2 => (8..64u32, any::<u64>()).prop_map(|(bits, n)| n >> bits),
        ],
        damage in proptest::option::weighted(0.3, (any::<prop::sample::Index>(), any::<u8>())),
        cut in 0..12usize,
        padding in 0..100usize,
    ) {
        data.truncate(data.len().saturating_sub(cut));
        data.resize(data.len() + padding, 3);
        if let (Some((at, byte)), false) = (damage, data.is_empty()) {
            let at = at.index(data.len());
            data[at] = byte;
        }
        let skip = |isa: Isa| {
            let mut cursor = Cursor::new(&data, start).with_isa(isa);
            (cursor.skip_longs(n), cursor.position())
        };
        // The reference result, read one number at a time.
        let mut single = Cursor::new(&data, start);
        let expected: Result<Vec<i64>> = (0..n).map(|_| single.long()).collect();
        let bounded = |value: i64| if value as u64 >= limit { Err(DecodeError::Int(value)) } else { Ok(value) };
        let pair = |value: i64| Ok([17, bounded(value)?]);
        let room = Room { data: &data, start, n, slack };
        for isa in Isa::all() {
            let (read, end) = room.read(isa, Longs::<i64>::new(), Ok);
            prop_assert_eq!(&read, &expected);
            if read.is_ok() {
                prop_assert_eq!(end, single.position());
            }
            room.agrees(isa, &expected, Indices { limit }, bounded)?;
            room.agrees(isa, &expected, Coordinates { slot: 17, limit }, pair)?;
            room.agrees(isa, &expected, Longs::<i16>::new(), i16::from_long)?;
            room.agrees(isa, &expected, Longs::<u64>::new(), u64::from_long)?;
            room.agrees(isa, &expected, Longs::<f32>::new(), f32::from_long)?;
            room.agrees(isa, &expected, Longs::<f64>::new(), f64::from_long)?;
            room.agrees(isa, &expected, Ints::<i32>::new(), |value| i32::from_long(int(value)?))?;
            prop_assert_eq!(&skip(isa), &skip(Isa::Portable));
            prop_assert_eq!(skip(isa).0, expected.clone().map(drop));
        }
    }
}

/// The input of a read, and the size of its output.
struct Room<'a> {
    data: &'a [u8],
    start: usize,
    n: usize,
    slack: usize,
}

impl Room<'_> {
    fn read<M: Convert>(
        &self,
        isa: Isa,
        convert: M,
        check: impl Fn(i64) -> Result<M::To>,
    ) -> (Result<Vec<M::To>>, usize)
    where
        M::To: Clone + Default,
    {
        let mut cursor = Cursor::new(self.data, self.start).with_isa(isa);
        let mut out = vec![M::To::default(); self.n + self.slack];
        let read = cursor.longs_to(self.n, &mut out, convert, check);
        out.truncate(self.n);
        (read.map(|()| out), cursor.position())
    }

    /// Checks that reading returns the same numbers as reading one at a time, and ends at the same offset with all
    /// instruction sets.
    fn agrees<M: Convert + Clone>(
        &self,
        isa: Isa,
        numbers: &Result<Vec<i64>>,
        convert: M,
        check: impl Fn(i64) -> Result<M::To>,
    ) -> std::result::Result<(), TestCaseError>
    where
        M::To: Clone + Default + PartialEq + std::fmt::Debug,
    {
        let found = self.read(isa, convert.clone(), &check);
        match numbers {
            Ok(numbers) => prop_assert_eq!(&found.0, &numbers.iter().map(|&value| check(value)).collect()),
            // If there are several errors, any of them may be found first.
            Err(_) => prop_assert!(found.0.is_err()),
        }
        prop_assert_eq!(found, self.read(Isa::Portable, convert, check));
        Ok(())
    }
}

proptest! {
    #[test]
    fn arrays_of_a_known_length_are_found_whole(
        count in prop_oneof![1..9000usize, Just(63), Just(64), Just(8191), Just(8192)],
        other in prop_oneof![1..9000i64, Just(0)],
        before in 0..4usize,
        width in 1..9usize,
        behind in prop_oneof![Just(0u8), any::<u8>()],
        fill in prop_oneof![Just(0u8), any::<u8>()],
        cut in 0..3usize,
    ) {
        let Some(head) = Head::of(count) else {
            prop_assert!(count >= 8192);
            return Ok(());
        };
        let array = |written: i64| {
            let items = vec![fill; count * width];
            [vec![0xff; before], encode(written), items, vec![behind; 4 - cut]].concat()
        };
        let same = count as i64;
        for written in [same, other, -same, same + (1 << 6), same + (1 << 13), same + (1 << 40)] {
            let data = array(written);
            let mut cursor = Cursor::new(&data, before);
            let start = before + encode(written).len();
            let found = cursor.whole_array(head, count * width);
            if written == same && behind == 0 {
                prop_assert_eq!(found, Some(&data[start..]));
                prop_assert_eq!(cursor.position(), start + count * width + 1);
            } else {
                prop_assert_eq!((found, cursor.position()), (None, before));
            }
        }
    }
}

#[test]
fn an_array_at_the_end_of_a_block_is_complete() {
    let data = [&encode(3)[..], &[1, 2, 3], &[0]].concat();
    let head = Head::of(3).unwrap();
    assert_eq!(Cursor::new(&data, 0).whole_array(head, 3), Some(&[1, 2, 3, 0][..]));
    assert_eq!(Cursor::new(&data[..4], 0).whole_array(head, 3), None);
    assert_eq!(Cursor::new(&data, 0).whole_array(head, 4), None);
    assert_eq!((Head::of(0), Head::of(usize::MAX)), (None, None));
}
