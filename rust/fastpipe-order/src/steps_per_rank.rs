//! The number of batches of each rank if ranks have separate units.

use crate::failure::{Result, collected, copied, with_room};
use crate::settings::Uneven;

/// Returns the steps of all ranks. `batches` lists the number of batches in each rank's units.
pub(crate) fn steps_per_rank(batches: &[u64], in_step: usize, on_uneven: Uneven) -> Result<Vec<u64>> {
    let members = |member: usize| batches.iter().copied().skip(member).step_by(in_step);
    let totals = (0..in_step.min(batches.len())).map(|member| members(member).sum::<u64>());
    let mut steps = copied(batches)?;
    let Some(total) = (match on_uneven {
        Uneven::Drop => totals.min(),
        Uneven::Pad => totals.max(),
        Uneven::Allow => None,
    }) else {
        return Ok(steps);
    };
    for member in 0..in_step {
        let own = collected(members(member))?;
        let leveled = match on_uneven {
            // A rank without rows has none to repeat.
            Uneven::Pad => level(&own, total, |own, level| if own == 0 { 0 } else { own.max(level) })?,
            _ => level(&own, total, u64::min)?,
        };
        for (steps, leveled) in steps.iter_mut().skip(member).step_by(in_step).zip(leveled) {
            *steps = leveled;
        }
    }
    Ok(steps)
}

/// Caps or raises numbers to a common level so that they add up to `total`. `at` returns a number at a given level.
fn level(numbers: &[u64], total: u64, at: fn(u64, u64) -> u64) -> Result<Vec<u64>> {
    let sum = |level: u64| numbers.iter().map(|&number| at(number, level)).sum::<u64>();
    let (mut low, mut high) = (0, total + 1);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if sum(middle) <= total {
            low = middle;
        } else {
            high = middle;
        }
    }
    let mut missing = total.saturating_sub(sum(low));
    let mut leveled = with_room(numbers.len())?;
    for &number in numbers {
        let more = u64::from(missing > 0 && at(number, low + 1) > at(number, low));
        missing -= more;
        leveled.push(at(number, low) + more);
    }
    Ok(leveled)
}
