//! Checks of the memory that an order needs, before any of it is allocated.
//!
//! The rows of a window, pool or buffer are kept in a list. A file may declare any number of rows that its bytes could
//! hold: for a gigabyte of compressed rows, up to 10^12. So the size of the list is checked against the user's limit,
//! or against a share of the machine's memory.

use fastpipe_batch::{Error, ErrorKind, Result};
use fastpipe_order::{Kind, Order, PlanError, State};

use crate::human_bytes::{rounded_down, rounded_up};
use fastpipe_memory::machine_memory;

/// Without a limit, the order may take at most `1 / SHARE` of the memory that is available to the process.
const SHARE: u64 = 2;

/// Bytes that are always allowed. If the limit is lower, the pass checks the order together with all its other memory.
/// Looking up a single batch takes no more than this.
const ALLOWED: u64 = 16 << 20;

/// Rejects an order that takes more than `memory_limit`. Without a limit, it may take half of the machine's memory, or
/// of the control group's memory if that is less. `seeks` means that the pass doesn't start at the beginning of an
/// epoch.
///
/// # Errors
/// Returns a limit error that says how much memory is needed and which shuffle buffer would fit.
pub fn check_order(order: &Order, memory_limit: Option<u64>, seeks: bool) -> Result<()> {
    check_within(order, memory_limit, machine_memory(), seeks)
}

/// Like [`check_order`], for resuming from a state. The numbers in the state are not trusted.
///
/// # Errors
/// Returns a limit error if resuming from the state takes more.
pub fn check_state(order: &Order, state: &State, memory_limit: Option<u64>) -> Result<()> {
    let most = memory_limit.or(machine_memory().map(|bytes| bytes / SHARE));
    let most = most.map(|most| most.max(ALLOWED));
    let needed = order.resuming_memory(state);
    if most.is_none_or(|most| needed <= most) {
        return Ok(());
    }
    let allowed = rounded_down(most.unwrap_or(0));
    let reason = format!(
        "cannot resume from this state: it needs {}, but at most {allowed} are allowed",
        rounded_up(needed)
    );
    Err(Error::new(ErrorKind::Limit, reason))
}

fn check_within(order: &Order, memory_limit: Option<u64>, machine: Option<u64>, seeks: bool) -> Result<()> {
    let Some(most) = memory_limit.or(machine.map(|bytes| bytes / SHARE)) else {
        return Ok(());
    };
    let settings = order.settings();
    let most = most.max(ALLOWED);
    let needed = order.planning_memory(settings.shuffle_buffer, seeks);
    if needed <= most {
        return Ok(());
    }
    let limit = match memory_limit {
        Some(limit) => format!("memory_limit is {}", rounded_down(limit)),
        None => format!(
            "at most {} are allowed (half of the memory of this machine or container)",
            rounded_down(most)
        ),
    };
    let mut reason = format!("{limit}, but planning batches takes at least {}", rounded_up(needed));
    if settings.kind == Kind::Sequential || order.is_given() {
        reason.push_str(". A smaller batch_size needs less");
    } else if settings.kind == Kind::Mixture {
        reason.push_str(". A smaller shuffle_buffer of the readers needs less");
    } else {
        let is_sample = matches!(settings.kind, Kind::Sample | Kind::Bootstrap);
        let what = if is_sample {
            "a sample of rows"
        } else {
            "the order of shuffle_buffer"
        };
        reason += &format!(", for {what}={}", settings.shuffle_buffer);
        let fits = largest(settings.shuffle_buffer, settings.batch_size.into(), |buffer| {
            order.planning_memory(buffer, seeks) <= most
        });
        reason += &match is_sample {
            true => format!("; rows={fits} would fit"),
            false => would_fit(fits),
        };
    }
    Err(Error::new(ErrorKind::Limit, reason))
}

/// Returns the largest multiple of `batch_size`, up to `most`, that `fits`, or 0 if none does. Every value below one
/// that fits must also fit.
pub(crate) fn largest(most: u64, batch_size: u64, fits: impl Fn(u64) -> bool) -> u64 {
    let (mut found, mut step) = (0, most / batch_size + 1);
    while step > 0 {
        if fits((found + step).saturating_mul(batch_size)) {
            found += step;
        } else {
            step /= 2;
        }
    }
    found * batch_size
}

/// Returns the end of an error message, which says which shuffle buffer would fit.
pub(crate) fn would_fit(buffer: u64) -> String {
    match buffer {
        0 => "; no shuffle_buffer fits".into(),
        buffer => format!("; shuffle_buffer={buffer} would fit"),
    }
}

/// Converts a planning error to an [`Error`].
pub fn unplanned(error: PlanError) -> Error {
    match error {
        PlanError::OutOfMemory { bytes } => {
            Error::out_of_memory(bytes, "the order of the rows; a smaller shuffle_buffer needs less")
        }
        PlanError::Interrupted => Error::new(ErrorKind::Closed, "the pass was closed"),
        PlanError::Elsewhere => Error::new(ErrorKind::Unsupported, "only the servers know the rows of a batch"),
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use fastpipe_order::{Settings, ShardBy, Units};

    use super::*;

    fn order(kind: Kind, shuffle_buffer: u64) -> Order {
        let units = Arc::new(Units::new([1 << 20; 64]).unwrap());
        let settings = Settings {
            kind,
            batch_size: 1000,
            shuffle_buffer,
            seed: 1,
            shard_by: ShardBy::Batch,
            ..Settings::default()
        };
        Order::new(&units, settings).unwrap()
    }

    #[test]
    fn the_bound_is_the_limit_or_half_of_the_memory() {
        let window = order(Kind::Window, 10_000_000);
        for (limit, machine, fits) in [
            (None, None, true),
            (None, Some(90_000_000), true),
            (None, Some(70_000_000), false),
            (Some(50_000_000), Some(1), true),
            (Some(30_000_000), Some(u64::MAX), false),
            (Some(1), None, false),
        ] {
            let checked = check_within(&window, limit, machine, false);
            assert_eq!(checked.is_ok(), fits, "{limit:?} {machine:?} {checked:?}");
            assert!(checked.is_ok() || checked.unwrap_err().kind() == ErrorKind::Limit);
        }
    }

    #[test]
    fn errors_name_the_largest_fitting_buffer() {
        for kind in [Kind::Window, Kind::Block, Kind::Buffer] {
            for seeks in [false, true] {
                let limit = 60_000_000;
                let wanted = order(kind, 60_000_000);
                let reason = check_within(&wanted, Some(limit), None, seeks).unwrap_err();
                let reason = reason.reason().to_owned();
                assert!(
                    reason.starts_with("memory_limit is 60.0 MB, but planning batches takes at least "),
                    "{reason}"
                );
                let named = reason
                    .split("; shuffle_buffer=")
                    .nth(1)
                    .unwrap_or_else(|| panic!("{reason}"));
                let named: u64 = named.split(' ').next().unwrap().parse().unwrap();
                assert!(
                    check_within(&order(kind, named), Some(limit), None, seeks).is_ok(),
                    "{reason}"
                );
                assert!(
                    check_within(&order(kind, named + 1000), Some(limit), None, seeks).is_err(),
                    "{reason}"
                );
            }
        }
        assert!(
            check_within(&order(Kind::Window, 1_000_000), Some(1), None, true).is_ok(),
            "small orders are always allowed"
        );
        let none = check_within(&order(Kind::Block, 5), Some(1000), None, false).unwrap_err();
        assert!(none.reason().ends_with("; no shuffle_buffer fits"), "{none}");
    }

    #[test]
    fn seeking_in_a_buffer_needs_more_memory() {
        let buffer = order(Kind::Buffer, 1 << 22);
        let (from_start, anywhere) = (
            buffer.planning_memory(1 << 22, false),
            buffer.planning_memory(1 << 22, true),
        );
        // Four bytes for each position within reach, rounded up to a power of two, and eight bytes for each row.
        assert!(anywhere - from_start >= (4 << 23) + (8 << 22));
        let limit = Some((from_start + anywhere) / 2);
        assert!(check_within(&buffer, limit, None, false).is_ok());
        assert!(check_within(&buffer, limit, None, true).is_err());
    }
}
