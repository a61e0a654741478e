//! Parses dates and times.

use arrow_cast::parse::string_to_datetime;
use chrono::{Timelike, Utc};
use fastpipe_batch::TimeUnit;

/// Parses a date, or a date with a time, in ISO 8601 or with a space instead of the `T`. Returns the number of units
/// since 1970, or `None` if the unit can't represent the time exactly. Times without an offset are UTC.
pub(crate) fn time(text: &[u8], unit: TimeUnit) -> Option<i64> {
    if let Some(days) = date(text) {
        return days.checked_mul(per_day(unit));
    }
    let (seconds, nanoseconds) = usual_time(text).or_else(|| rare_time(text))?;
    in_unit(seconds, nanoseconds, unit)
}

/// Returns the number of units since 1970, or `None` if the unit can't represent the time exactly.
#[inline]
pub(crate) fn in_unit(seconds: i64, nanoseconds: i64, unit: TimeUnit) -> Option<i64> {
    if unit == TimeUnit::Days {
        // A time within a day can't be represented in days.
        return (seconds % 86_400 == 0 && nanoseconds == 0).then_some(seconds / 86_400);
    }
    let per_second = per_day(unit) / 86_400;
    let lengths = 1_000_000_000 / per_second;
    let fraction = (nanoseconds % lengths == 0).then_some(nanoseconds / lengths)?;
    i64::try_from(i128::from(seconds) * i128::from(per_second) + i128::from(fraction)).ok()
}

/// Reads eight characters that must be like `pattern`, in which zeros stand for any digit and spaces for any character.
/// Returns in each byte the number of two digits that begins there.
#[inline(always)]
fn pairs_like(pattern: [u8; 8], bytes: [u8; 8]) -> Option<[u8; 8]> {
    // Added to a byte, this sets its high bit unless the byte is a digit or equals the pattern.
    let limits = pattern.map(|byte| match byte {
        b' ' => 0,
        b'0' => 0x76,
        _ => 0x7f,
    });
    let any = pattern.map(|byte| if byte == b' ' { 0 } else { 0xff });
    let values = (u64::from_le_bytes(bytes) ^ u64::from_le_bytes(pattern)) & u64::from_le_bytes(any);
    let others = (values.wrapping_add(u64::from_le_bytes(limits)) | values) & 0x8080_8080_8080_8080;
    (others == 0).then_some((values.wrapping_mul(10).wrapping_add(values >> 8)).to_le_bytes())
}

/// Parses a date such as `2024-02-29`, or a date and a time such as `2024-02-29 12:30:00`, at the start of the bytes.
/// Returns the seconds since 1970, and the length in bytes. Returns `None` for other texts.
#[inline]
pub(crate) fn short_time(bytes: &[u8]) -> Option<(i64, usize)> {
    let [front, middle, back] = *bytes.first_chunk::<24>()?.as_chunks::<8>().0 else {
        return None;
    };
    let [century, _, year, _, _, month, ..] = pairs_like(*b"0000-00-", front)?;
    let year = 100 * i64::from(century) + i64::from(year);
    if !matches!(middle[2], b'T' | b't' | b' ') {
        let [day, ..] = pairs_like(*b"00      ", middle)?;
        return Some((86_400 * days(year, month.into(), day.into())?, 10));
    }
    let [day, _, _, hour, _, _, minute, _] = pairs_like(*b"00 00:00", middle)?;
    let [_, second, ..] = pairs_like(*b":00     ", back)?;
    let day = days(year, month.into(), day.into())?;
    let time = 3600 * i64::from(hour) + 60 * i64::from(minute) + i64::from(second);
    (hour < 24 && minute < 60 && second < 60).then_some((86_400 * day + time, 19))
}

/// Returns the number of days from January 1, 1970 to a date, or `None` if the date doesn't exist.
#[inline]
fn days(year: i64, month: usize, day: i64) -> Option<i64> {
    // The days before each month, from January on, of a year that begins in March.
    const BEFORE: [i64; 12] = [306, 337, 0, 31, 61, 92, 122, 153, 184, 214, 245, 275];
    const LENGTHS: [i64; 12] = [31, 28, 31, 30, 31, 30, 31, 31, 30, 31, 30, 31];
    let leap = month == 2 && year % 4 == 0 && (year % 100 != 0 || year % 400 == 0);
    let number = month.wrapping_sub(1);
    if day < 1 || day > LENGTHS.get(number)? + i64::from(leap) {
        return None;
    }
    // Counted from March of a year that is a multiple of 400, because leap days are then at the ends of years.
    let years = year + 400 - i64::from(month <= 2);
    let before = 365 * years + years / 4 - years / 100 + years / 400 + BEFORE[number];
    Some(before + day - 1 - 865_565)
}

/// Parses a time in the format that nearly all files use, such as `2024-02-29T12:30`. It has a space or a `T`, optional
/// seconds with up to nine decimal places, and an optional offset. Returns the seconds since 1970 and the nanoseconds.
#[inline]
fn usual_time(text: &[u8]) -> Option<(i64, i64)> {
    let (day, rest) = text.split_first_chunk::<10>()?;
    let &[b'T' | b't' | b' ', h0, h1, b':', m0, m1, ref rest @ ..] = rest else {
        return None;
    };
    let (hour, minute) = (below(24, h0, h1)?, below(60, m0, m1)?);
    let (second, rest) = match rest {
        &[b':', s0, s1, ref rest @ ..] => (below(60, s0, s1)?, rest),
        _ => (0, rest),
    };
    let (nanoseconds, rest) = match rest {
        // Only seconds may have decimal places.
        [b'.', digits @ ..] if text[16] == b':' => {
            let count = digits.iter().take_while(|digit| digit.is_ascii_digit()).count();
            if !(1..=9).contains(&count) {
                return None;
            }
            let fraction = digits[..count]
                .iter()
                .fold(0, |sum, digit| 10 * sum + i64::from(digit - b'0'));
            (fraction * 10i64.pow(9 - count as u32), &digits[count..])
        }
        _ => (0, rest),
    };
    let offset = match *rest {
        [] | [b'Z' | b'z'] => 0,
        [sign @ (b'+' | b'-'), h0, h1, b':', m0, m1] | [sign @ (b'+' | b'-'), h0, h1, m0, m1] => {
            let offset = 3600 * below(24, h0, h1)? + 60 * below(60, m0, m1)?;
            if sign == b'-' { -offset } else { offset }
        }
        _ => return None,
    };
    let seconds = 86_400 * date(day)? + 3600 * hour + 60 * minute + second;
    Some((seconds - offset, nanoseconds))
}

/// Parses a time in other formats.
#[cold]
fn rare_time(text: &[u8]) -> Option<(i64, i64)> {
    let decimals = text.get(20..30).filter(|_| text[19] == b'.');
    // The parser would drop digits after the ninth.
    if decimals.is_some_and(|decimals| decimals.iter().all(u8::is_ascii_digit)) {
        return None;
    }
    let found = string_to_datetime(&Utc, std::str::from_utf8(text).ok()?).ok()?;
    // A leap second is read as the following second.
    let nanoseconds = i64::from(found.nanosecond());
    Some((
        found.timestamp() + nanoseconds / 1_000_000_000,
        nanoseconds % 1_000_000_000,
    ))
}

/// Parses a number of two digits that must be less than `end`.
#[inline(always)]
fn below(end: i64, tens: u8, ones: u8) -> Option<i64> {
    let value = 10 * i64::from(tens.wrapping_sub(b'0')) + i64::from(ones.wrapping_sub(b'0'));
    (tens.is_ascii_digit() && ones.is_ascii_digit() && value < end).then_some(value)
}

/// Returns the coarsest of the units used for inference that can represent a time exactly.
pub(crate) fn unit_of(text: &[u8]) -> Option<TimeUnit> {
    let units = [TimeUnit::Days, TimeUnit::Microseconds, TimeUnit::Nanoseconds];
    // A text with "00:00" is a time and not a date.
    let units = if date(text).is_some() { &units[..1] } else { &units[1..] };
    units.iter().copied().find(|&unit| time(text, unit).is_some())
}

fn per_day(unit: TimeUnit) -> i64 {
    match unit {
        TimeUnit::Days => 1,
        TimeUnit::Seconds => 86_400,
        TimeUnit::Milliseconds => 86_400_000,
        TimeUnit::Microseconds => 86_400_000_000,
        TimeUnit::Nanoseconds => 86_400_000_000_000,
    }
}

/// Parses `YYYY-MM-DD` as the number of days since 1970.
#[inline]
fn date(text: &[u8]) -> Option<i64> {
    let &[y0, y1, y2, y3, b'-', m0, m1, b'-', d0, d1] = text else {
        return None;
    };
    let year = 100 * below(100, y0, y1)? + below(100, y2, y3)?;
    let (month, day) = (below(13, m0, m1)?, below(32, d0, d1)?);
    days(year, month as usize, day)
}

#[cfg(test)]
mod tests {
    use chrono::{Datelike, NaiveDate};
    use proptest::prelude::*;

    use super::*;

    /// The number of days from January 1 of year 1 to January 1, 1970.
    const DAYS_BEFORE_1970: i32 = 719_163;

    proptest! {
        #[test]
        fn days_are_chronos(year in 0i32..10_000, month in 0u32..14, day in 0u32..33) {
            let date = NaiveDate::from_ymd_opt(year, month, day);
            let expected = date.map(|date| i64::from(date.num_days_from_ce() - DAYS_BEFORE_1970));
            let text = format!("{year:04}-{month:02}-{day:02}");
            prop_assert_eq!(time(text.as_bytes(), TimeUnit::Days), expected);
            prop_assert_eq!(time(text.as_bytes(), TimeUnit::Seconds), expected.map(|days| days * 86_400));
            let short = short_time(format!("{text},;;;;;;;;;;;;;;").as_bytes());
            prop_assert_eq!(short, expected.map(|days| (days * 86_400, 10)));
        }

        #[test]
        fn short_times_are_those_of_any_length(
            text in "(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9]",
            changed in 0usize..40,
            to in any::<u8>(),
        ) {
            let mut bytes = format!("{text},;;;;;;;;").into_bytes();
            if let Some(byte) = bytes.get_mut(changed) {
                *byte = to;
            }
            match short_time(&bytes) {
                Some((seconds, n)) => prop_assert_eq!(time(&bytes[..n], TimeUnit::Seconds), Some(seconds)),
                None => prop_assert_eq!(usual_time(&bytes[..19]), None),
            }
        }
    }

    #[test]
    fn times_are_exact_in_their_unit() {
        let at = |text: &str, unit| time(text.as_bytes(), unit);
        assert_eq!(at("1970-01-02T00:00:01", TimeUnit::Seconds), Some(86_401));
        assert_eq!(at("1970-01-01 00:00:00.25Z", TimeUnit::Milliseconds), Some(250));
        assert_eq!(at("1970-01-01 00:00:00.25", TimeUnit::Seconds), None);
        assert_eq!(at("1970-01-01T01:00:00+01:00", TimeUnit::Microseconds), Some(0));
        assert_eq!(at("1969-12-31T23:59:59.999999999", TimeUnit::Nanoseconds), Some(-1));
        assert_eq!(at("1970-01-03T00:00:00", TimeUnit::Days), Some(2));
        assert_eq!(at("1970-01-03T12:00:00", TimeUnit::Days), None);
        assert_eq!(at("9999-01-01", TimeUnit::Nanoseconds), None);
        for wrong in ["", "1970", "1970-02-30", "x970-01-01", "1970-01-01T25:00:00", "today"] {
            assert_eq!(at(wrong, TimeUnit::Microseconds), None, "{wrong}");
        }
        assert_eq!(unit_of(b"2024-02-29"), Some(TimeUnit::Days));
        assert_eq!(unit_of(b"2024-02-29 00:00:00"), Some(TimeUnit::Microseconds));
        assert_eq!(unit_of(b"2024-02-29 00:00:00.123456789"), Some(TimeUnit::Nanoseconds));
        assert_eq!(unit_of(b"2024-02-29 00:00"), Some(TimeUnit::Microseconds));
        for other in ["12:00", "11/6/18", "2024-02-29 00:00:00.1234567890", "2024-02-29 00"] {
            assert_eq!(unit_of(other.as_bytes()), None, "{other}");
        }
    }

    #[test]
    fn times_without_seconds_are_valid() {
        let at = |text: &str| time(text.as_bytes(), TimeUnit::Seconds);
        for text in [
            "1970-01-02 03:04",
            "1970-01-02T03:04Z",
            "1970-01-02T04:04+01:00",
            "1970-01-02 00:34-0230",
        ] {
            assert_eq!(at(text), Some(86_400 + 3 * 3600 + 4 * 60), "{text}");
        }
        assert_eq!(at("1970-01-01T23:59:60"), Some(86_400));
        for wrong in [
            "1970-01-01 24:00",
            "1970-01-01 03:60",
            "1970-01-01 03:4",
            "1970-01-01 03:04.5",
            "1970-02-30 03:04",
        ] {
            assert_eq!(at(wrong), None, "{wrong}");
        }
    }

    proptest! {
        #[test]
        fn usual_times_are_those_of_arrow(
            text in "(19|20)[0-9]{2}-[01][0-9]-[0-3][0-9][T ][0-2][0-9]:[0-6][0-9]:[0-6][0-9](\\.[0-9]{1,9})?(Z|[+-][0-2][0-9]:?[0-6][0-9])?",
        ) {
            if let Some((seconds, nanoseconds)) = usual_time(text.as_bytes()) {
                let found = string_to_datetime(&Utc, &text).unwrap();
                prop_assert_eq!((seconds, nanoseconds), (found.timestamp(), i64::from(found.nanosecond())));
            }
        }
    }
}
