//! Parses the values of fields: numbers, bools, dates and times.
//!
//! Numbers are converted to the nearest value of their type, like `strtof` and `strtod` do.

mod times;

use fast_float2::FastFloat;

pub(crate) use times::{in_unit, short_time, time, unit_of};

/// The powers of 10 with up to seven zeros.
const POWERS: [u64; 8] = [1, 10, 100, 1000, 10_000, 100_000, 1_000_000, 10_000_000];

/// Parses the digits at the start of eight bytes. Returns their value and their count.
///
/// All bytes are processed together. The number of digits is unpredictable, and a mispredicted branch would take longer
/// than all other work.
#[inline(always)]
fn digits(bytes: [u8; 8]) -> (u64, usize) {
    const LOW: u64 = 0x0000_00ff_0000_00ff;
    // Maps digits to the values 0 to 9. The first byte that isn't a digit gets a high bit, and later ones may get one.
    let values = u64::from_le_bytes(bytes) ^ 0x3030_3030_3030_3030;
    let others = (values.wrapping_add(0x7676_7676_7676_7676) | values) & 0x8080_8080_8080_8080;
    let count = others.trailing_zeros() / 8;
    // Shifts the digits so that zeros precede them. Then combines them to pairs, groups of four, and eight.
    let aligned = values.checked_shl(64 - 8 * count).unwrap_or(0);
    let pairs = aligned.wrapping_mul(10).wrapping_add(aligned >> 8);
    let high = (pairs & LOW).wrapping_mul(100 + (1_000_000 << 32));
    let low = ((pairs >> 16) & LOW).wrapping_mul(1 + (10_000 << 32));
    (high.wrapping_add(low) >> 32, count as usize)
}

/// A float type with a fast path for numbers with few digits.
pub(crate) trait Short: FastFloat {
    /// Divides an integer below 10^14 by 10^`places`, where `places` is below 8. The result is the nearest float if
    /// both operands are exact, because a division rounds once (W. D. Clinger, How to Read Floating Point Numbers
    /// Accurately, 1990). Returns `None` if the integer isn't exact.
    fn quotient(integer: u64, places: usize) -> Option<Self>;
    fn negated(self) -> Self;
    /// Whether the value is so large that neighboring floats may be more than one apart.
    fn is_large(self) -> bool;
}

impl Short for f64 {
    #[inline(always)]
    fn quotient(integer: u64, places: usize) -> Option<f64> {
        const POWERS: [f64; 8] = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7];
        Some(integer as f64 / POWERS[places])
    }

    #[inline(always)]
    fn negated(self) -> f64 {
        -self
    }

    #[inline(always)]
    fn is_large(self) -> bool {
        self.abs() >= (1u64 << 53) as f64
    }
}

impl Short for f32 {
    #[inline(always)]
    fn quotient(integer: u64, places: usize) -> Option<f32> {
        const POWERS: [f32; 8] = [1e0, 1e1, 1e2, 1e3, 1e4, 1e5, 1e6, 1e7];
        (integer <= 1 << 24).then(|| integer as f32 / POWERS[places])
    }

    #[inline(always)]
    fn negated(self) -> f32 {
        -self
    }

    #[inline(always)]
    fn is_large(self) -> bool {
        self.abs() >= (1u32 << 24) as f32
    }
}

/// Parses a float with up to seven digits before and up to seven after its decimal mark. Returns its value and its
/// length in bytes. Returns `None` for other texts.
#[inline(always)]
pub(crate) fn short_float<T: Short>(bytes: &[u8], decimal: u8) -> Option<(T, usize)> {
    let signs = usize::from(*bytes.first()? == b'-');
    let (mut integer, whole) = digits(bytes.get(signs..)?.first_chunk().copied()?);
    let (mut at, mut places) = (signs + whole, 0);
    if whole < 8 && bytes[at] == decimal {
        let fraction;
        (fraction, places) = digits(bytes.get(at + 1..)?.first_chunk().copied()?);
        integer = integer * POWERS.get(places)? + fraction;
        at += 1 + places;
    }
    if whole == 8 || whole + places == 0 {
        return None;
    }
    let value = T::quotient(integer, places)?;
    Some((if signs > 0 { value.negated() } else { value }, at))
}

/// Parses a float at the start of the bytes. Returns its value and its length in bytes.
#[inline(always)]
pub(crate) fn float<T: FastFloat>(bytes: &[u8], decimal: u8) -> Option<(T, usize)> {
    if decimal == b'.' {
        fast_float2::parse_partial(bytes).ok()
    } else {
        float_behind(bytes, decimal)
    }
}

/// Parses a float with another decimal mark than a point.
#[cold]
fn float_behind<T: FastFloat>(bytes: &[u8], decimal: u8) -> Option<(T, usize)> {
    // Longer numbers don't occur in practice: at most 767 digits of a double are significant.
    let mut text = [0; 1100];
    let n = bytes.len().min(text.len());
    for (to, &byte) in text.iter_mut().zip(bytes) {
        *to = match byte {
            b'.' => b',',
            _ if byte == decimal => b'.',
            _ => byte,
        };
    }
    fast_float2::parse_partial(&text[..n]).ok()
}

/// Whether a float keeps the number in a text. An integer must be represented exactly. Other numbers must be finite.
pub(crate) fn is_kept(number: &[u8], value: f64) -> bool {
    let signs = usize::from(matches!(number.first(), Some(b'-' | b'+')));
    let digits = &number[signs..];
    if !digits.iter().all(u8::is_ascii_digit) {
        return value.is_finite() || !digits.iter().any(u8::is_ascii_digit);
    }
    let zeros = digits.iter().take_while(|&&digit| digit == b'0').count();
    // Formatting without decimal places prints all digits of a float.
    (value == 0.0 && zeros == digits.len()) || format!("{:.0}", value.abs()).as_bytes() == &digits[zeros..]
}

/// Parses an integer of at most 15 digits at the start of the bytes. Returns its value and its length in bytes. Returns
/// `None` for other texts.
#[inline(always)]
pub(crate) fn short_integer(bytes: &[u8]) -> Option<(i64, usize)> {
    let signs = usize::from(*bytes.first()? == b'-');
    let (mut value, mut n) = digits(bytes.get(signs..)?.first_chunk().copied()?);
    if n == 8 {
        let (more, count) = digits(bytes.get(signs + 8..)?.first_chunk().copied()?);
        value = value * POWERS.get(count)? + more;
        n += count;
    }
    let value = value as i64;
    (n > 0).then_some((if signs > 0 { -value } else { value }, signs + n))
}

/// Parses an integer at the start of the bytes. Returns its value and its length in bytes. Returns `None` if the bytes
/// don't begin with an integer, or if its digits don't fit 64 bits.
#[inline(always)]
pub(crate) fn integer(bytes: &[u8]) -> Option<(i128, usize)> {
    if let Some((value, n @ 1..8)) = bytes.first_chunk().map(|&eight| digits(eight)) {
        return Some((value.into(), n));
    }
    let (negative, signs) = match bytes.first()? {
        b'-' => (true, 1),
        b'+' => (false, 1),
        _ => (false, 0),
    };
    let (mut value, mut at) = (0u64, signs);
    while let Some(digit) = bytes
        .get(at)
        .map(|byte| byte.wrapping_sub(b'0'))
        .filter(|&digit| digit < 10)
    {
        // 19 digits always fit.
        if at < signs + 19 {
            value = value * 10 + u64::from(digit);
        } else {
            value = value.checked_mul(10)?.checked_add(u64::from(digit))?;
        }
        at += 1;
    }
    let value = i128::from(value);
    (at > signs).then_some((if negative { -value } else { value }, at))
}

/// Parses a bool.
pub(crate) fn boolean(text: &[u8]) -> Option<bool> {
    match text {
        b"1" => Some(true),
        b"0" => Some(false),
        _ if text.eq_ignore_ascii_case(b"true") => Some(true),
        _ if text.eq_ignore_ascii_case(b"false") => Some(false),
        _ => None,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    #[test]
    fn floats_represent_integers_exactly_or_are_refused() {
        let kept = |text: &str| {
            let (single, double): (f32, f64) = (text.parse().unwrap(), text.parse().unwrap());
            (
                is_kept(text.as_bytes(), single.into()),
                is_kept(text.as_bytes(), double),
            )
        };
        for text in [
            "0",
            "-0",
            "000",
            "16777216",
            "+016777218",
            "-16777218",
            "0.1",
            "16777217.5",
            "1e38",
            "inf",
            "NaN",
        ] {
            assert_eq!(kept(text), (true, true), "{text}");
        }
        for text in ["16777217", "-16777219", "1e39", "9007199254740992001024"] {
            assert_eq!(kept(text), (false, text != "9007199254740992001024"), "{text}");
        }
        for text in ["9007199254740993", "1e309", &"9".repeat(400)] {
            assert_eq!(kept(text), (false, false), "{text}");
        }
        assert_eq!(kept("18446744073709551616"), (true, true));
    }

    #[test]
    fn integers_of_any_length_are_read_or_refused() {
        let cases = [
            ("0", Some((0, 1))),
            ("-12,5", Some((-12, 3))),
            ("+7x", Some((7, 2))),
            ("0000000000000000000000000001", Some((1, 28))),
            ("18446744073709551615", Some((u64::MAX.into(), 20))),
            ("18446744073709551616", None),
            ("-9223372036854775808", Some((i64::MIN.into(), 20))),
            ("", None),
            ("-", None),
            ("x", None),
        ];
        for (text, expected) in cases {
            assert_eq!(integer(text.as_bytes()), expected, "{text}");
        }
    }

    proptest! {
        #[test]
        fn integers_are_those_of_the_standard_library(value in any::<i64>(), behind in "[,\n]?") {
            let text = format!("{value}{behind}");
            prop_assert_eq!(integer(text.as_bytes()), Some((value.into(), value.to_string().len())));
        }

        #[test]
        fn floats_are_those_of_the_standard_library(bits in any::<u64>(), single in any::<u32>()) {
            let (value, single) = (f64::from_bits(bits), f32::from_bits(single));
            prop_assume!(value.is_finite() && single.is_finite());
            for text in [format!("{value}"), format!("{value:e}"), format!("{value:.3}")] {
                let (found, n) = float::<f64>(text.as_bytes(), b'.').unwrap();
                prop_assert_eq!((found.to_bits(), n), (text.parse::<f64>().unwrap().to_bits(), text.len()));
                if let Some((found, n)) = short_float::<f64>(format!("{text};;;;;;;;;").as_bytes(), b'.') {
                    // The caller detects exponents, because the field doesn't end there.
                    prop_assert_eq!(found.to_bits(), text[..n].parse::<f64>().unwrap().to_bits());
                }
                let (found, _) = float::<f32>(text.as_bytes(), b'.').unwrap();
                prop_assert_eq!(found.to_bits(), text.parse::<f32>().unwrap().to_bits());
            }
            let text = format!("{single};").replace('.', ",");
            let (found, n) = float::<f32>(text.as_bytes(), b',').unwrap();
            prop_assert_eq!((found.to_bits(), n), (single.to_bits(), text.len() - 1));
        }

        #[test]
        fn short_integers_are_those_of_any_length(text in "-?[0-9]{0,20}[-+0-9.,e\u{e9}]{0,4}", others in any::<[u8; 32]>()) {
            let long = format!("{text};;;;;;;;;;;;;;;;;").into_bytes();
            // Digits and any other bytes.
            let mixed: Vec<u8> = others.iter().map(|&byte| if byte < 224 { b'0' + byte % 10 } else { byte }).collect();
            for bytes in [long, mixed] {
                if let Some((value, n)) = short_integer(&bytes) {
                    prop_assert_eq!(integer(&bytes), Some((value.into(), n)));
                }
            }
        }
    }

    proptest! {
        #[test]
        fn short_floats_are_those_of_the_standard_library(text in "-?[0-9]{0,9}(\\.[0-9]{0,9})?") {
            let long = format!("{text},;;;;;;;;;");
            if let Some((found, n)) = short_float::<f64>(long.as_bytes(), b'.') {
                prop_assert_eq!((found.to_bits(), n), (text.parse::<f64>().unwrap().to_bits(), text.len()));
            }
            if let Some((found, n)) = short_float::<f32>(long.as_bytes(), b'.') {
                prop_assert_eq!((found.to_bits(), n), (text.parse::<f32>().unwrap().to_bits(), text.len()));
            }
        }
    }

    #[test]
    fn most_integers_are_short() {
        let of = |text: &str| short_integer(format!("{text};;;;;;;;").as_bytes());
        for value in [
            0,
            7,
            -7,
            1_234_567,
            -12_345_678,
            123_456_789_012_345,
            -123_456_789_012_345,
        ] {
            assert_eq!(of(&format!("{value}")), Some((value, value.to_string().len())));
        }
        for other in ["1234567890123456", "+7", "-", "x", ""] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn most_floats_are_short() {
        let of = |text: &str| short_float::<f64>(text.as_bytes(), b'.');
        assert_eq!(of("-12.5,;;;;;;;;"), Some((-12.5, 5)));
        assert_eq!(of("7\n;;;;;;;;"), Some((7.0, 1)));
        assert_eq!(of(".5\n;;;;;;;;"), Some((0.5, 2)));
        assert_eq!(of("5.\n;;;;;;;;"), Some((5.0, 2)));
        assert!(of("-0,;;;;;;;;;;").is_some_and(|(zero, _)| zero.to_bits() == (-0f64).to_bits()));
        for other in [
            "12345678,;;;;;;;;",
            "1.12345678;;;;;;;;;",
            ".,;;;;;;;;;;;;",
            "-;;;;;;;;;;;",
            "x;;;;;;;;;;;",
            "1",
            "",
        ] {
            assert_eq!(of(other), None, "{other}");
        }
    }

    #[test]
    fn bools_have_several_spellings() {
        assert_eq!(
            (boolean(b"TRUE"), boolean(b"false"), boolean(b"1")),
            (Some(true), Some(false), Some(true))
        );
        assert_eq!((boolean(b"yes"), boolean(b"")), (None, None));
    }
}
