//! Formatting of sizes in messages, in the units that `memory_limit` accepts.

/// Names of the units, in powers of a thousand.
const UNITS: [&str; 5] = ["B", "KB", "MB", "GB", "TB"];

/// Formats a size to a tenth of the largest unit that fits, or in bytes. `round(bytes, tenth)` returns the number of
/// tenths.
fn in_tenths(bytes: u64, round: impl Fn(u64, u64) -> u64) -> String {
    let (mut unit, mut size) = (0, 1u64);
    // A size that rounds up to a thousand of a unit is shown in the next unit.
    while unit + 1 < UNITS.len() && round(bytes, (size / 10).max(1)) >= if unit == 0 { 1000 } else { 10_000 } {
        (unit, size) = (unit + 1, size * 1000);
    }
    match unit {
        0 => format!("{bytes} {}", UNITS[0]),
        unit => {
            let tenths = round(bytes, size / 10);
            format!("{}.{} {}", tenths / 10, tenths % 10, UNITS[unit])
        }
    }
}

/// Formats a number of required bytes. The result is never less than `bytes`.
pub(crate) fn rounded_up(bytes: u64) -> String {
    in_tenths(bytes, u64::div_ceil)
}

/// Formats a number of allowed bytes. The result is never more than `bytes`.
pub(crate) fn rounded_down(bytes: u64) -> String {
    in_tenths(bytes, |bytes, tenth| bytes / tenth)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn parsed(text: &str) -> u128 {
        let (number, unit) = text.split_once(' ').unwrap();
        let (whole, tenths) = number.split_once('.').unwrap_or((number, "0"));
        let unit = UNITS.iter().position(|name| *name == unit).unwrap() as u32;
        let tenths = whole.parse::<u128>().unwrap() * 10 + tenths.parse::<u128>().unwrap();
        tenths * 1000u128.pow(unit) / 10
    }

    #[test]
    fn units_fit() {
        for (bytes, least, most) in [
            (0, "0 B", "0 B"),
            (999, "999 B", "999 B"),
            (1000, "1.0 KB", "1.0 KB"),
            (1001, "1.1 KB", "1.0 KB"),
            (999_901, "1.0 MB", "999.9 KB"),
            (152_345, "152.4 KB", "152.3 KB"),
            (64_000_000, "64.0 MB", "64.0 MB"),
            (8_589_934_592, "8.6 GB", "8.5 GB"),
            (5_000_000_000_000_000, "5000.0 TB", "5000.0 TB"),
        ] {
            assert_eq!(
                (rounded_up(bytes).as_str(), rounded_down(bytes).as_str()),
                (least, most)
            );
        }
    }

    proptest! {
        #[test]
        fn what_is_named_is_enough_and_what_is_allowed_is_not_exceeded(bytes in prop_oneof![0..10_000_000u64, any::<u64>()]) {
            prop_assert!(parsed(&rounded_up(bytes)) >= bytes.into());
            prop_assert!(parsed(&rounded_down(bytes)) <= bytes.into());
        }
    }
}
