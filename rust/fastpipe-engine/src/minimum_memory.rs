//! The minimum memory that a pass needs.

use std::sync::Arc;

use fastpipe_batch::{Error, Fragment, Mark, Pass, Pick, Result, Rows, Sink, SlabPool, Unit};
use fastpipe_order::{Kind, Order};

use crate::cost::CostModel;
use crate::human_bytes::{rounded_down, rounded_up};
use crate::order_memory::{largest, would_fit};
use crate::pass::PassContext;
use crate::pass_config::PassConfig;
use crate::working_memory::WorkingMemory;

/// Number of units of each class that are probed.
const LOOKED_AT: usize = 8;

/// Rows of each probed unit that are decoded, to measure their memory.
const DECODED: u32 = 256;

/// Bytes that a probe may take even if the limit is lower. This way the error can state the required minimum, unless
/// units are larger than this.
const LOOK_BYTES: u64 = 16 << 20;

/// Rejects a limit that is too low for the pass. Some units are opened first, to learn how much memory open units take.
pub(crate) fn check(context: &Arc<PassContext>, order: &Order, limit: u64) -> Result<()> {
    probe_units(context, limit)?;
    let settings = order.settings();
    let (config, costs, working_memory) = (&context.config, &context.costs, &context.working_memory);
    let units = config.source().units();
    let statistics = UnitStatistics::of(config, costs, units);
    let classes = 0..config.source().facts().classes.len() as u32;
    // Rows for each row of the order.
    let each = order.rows_per_group().unwrap_or(1);
    let batch_rows = u64::from(settings.batch_size).saturating_mul(each);
    let rows = batch_rows.min(statistics.rows as u64);
    // One batch for each thread and one that waits for the consumer, or all batches if there are fewer.
    let batches = (config.threads() as u64 + 1).min(config.options().limit.unwrap_or(u64::MAX).max(1));
    let rows_bytes = classes.map(|class| working_memory.rows_bytes(rows, costs.arena_bytes(class, rows)));
    let batch = batches.saturating_mul(rows_bytes.max().unwrap_or(0));
    // Bytes of the units that contain `listed` rows of the order, and of the list of these rows.
    let units_of = |listed: u64| {
        let rows = listed.saturating_mul(each);
        let units = match settings.kind {
            Kind::Block | Kind::Buffer => statistics.drained(rows, units),
            Kind::Sequential | Kind::Window | Kind::Mixture => statistics.units(rows, units),
            // Each row of the batches in flight may be in another unit.
            Kind::Sample | Kind::Bootstrap if order.is_given() => {
                statistics.drawn((batches * batch_rows) as f64, units)
            }
            // The units of the batches in flight. The fewer rows are drawn, the more units they are spread over.
            Kind::Sample | Kind::Bootstrap => {
                let drawn = settings.shuffle_buffer.max(1) as f64;
                let among = statistics.rows * (batches * batch_rows) as f64 / drawn;
                statistics.units((among as u64).min(statistics.rows as u64), units)
            }
        };
        units.saturating_add(order.memory(listed))
    };
    let fetched = batches.saturating_mul(statistics.fetched);
    let needed = match settings.kind {
        Kind::Sequential => batches.saturating_mul(statistics.largest.saturating_add(statistics.fetched)),
        _ => units_of(settings.shuffle_buffer).saturating_add(fetched),
    };
    let least = batch.saturating_add(needed);
    if least <= limit {
        return Ok(());
    }
    let made = match batches {
        1 => format!("a batch of {rows} rows"),
        _ => format!(
            "{batches} batches of {rows} rows ({} in progress and one waiting)",
            batches - 1
        ),
    };
    let mut reason = format!(
        "memory_limit is {}, and this takes at least {}: {} for {made} and {} for ",
        rounded_down(limit),
        rounded_up(least),
        rounded_up(batch),
        rounded_up(needed)
    );
    match settings.kind {
        Kind::Sequential => reason.push_str("units"),
        _ if order.is_given() => reason.push_str("units, because its rows are in any sequence"),
        Kind::Mixture => {
            reason.push_str("the units and the orders of the readers");
        }
        _ => {
            reason += &format!("the units and the order of shuffle_buffer={}", settings.shuffle_buffer);
            // The memory grows with the shuffle buffer.
            let fits = largest(settings.shuffle_buffer, settings.batch_size.into(), |buffer| {
                batch.saturating_add(fetched).saturating_add(units_of(buffer)) <= limit
            });
            reason += &would_fit(fits);
        }
    }
    reason.push_str(match batches.min(config.threads() as u64) {
        1 => ". A smaller batch_size needs less",
        _ => ". A smaller batch_size or fewer threads (num_threads) need less",
    });
    Err(Error::over_memory_limit(reason))
}

/// Probes some units of every class.
fn probe_units(context: &Arc<PassContext>, limit: u64) -> Result<()> {
    if context.config.source().facts().fetches > 0 {
        // Sources that fetch estimate the size of their units.
        return Ok(());
    }
    let mut looked_at = vec![0; context.config.source().facts().classes.len().max(1)];
    let units = 0..context.config.source().units();
    for unit in spread(units.filter(|&unit| context.config.describe(unit).rows > 0)) {
        let class = context.config.describe(unit).class;
        let Some(count) = looked_at.get_mut(class as usize) else {
            continue;
        };
        if *count < LOOKED_AT {
            *count += 1;
            probe_unit(context, unit, limit)?;
        }
    }
    Ok(())
}

#[derive(Default)]
struct UnitStatistics {
    rows: f64,
    bytes: f64,
    squares: f64,
    largest: u64,
    /// Additional bytes that are fetched for a unit; the maximum over all units.
    fetched: u64,
}

impl UnitStatistics {
    /// Collects the statistics of all units from their descriptions and the learned costs.
    fn of(config: &PassConfig, costs: &CostModel, units: u64) -> UnitStatistics {
        let mut statistics = UnitStatistics::default();
        for unit in 0..units {
            let info = config.describe(unit);
            let rows = f64::from(info.rows);
            let bytes = costs.unit_bytes(&info);
            // Other units may expand slightly more than the probed ones.
            let bytes = bytes + bytes / 20;
            statistics.rows += rows;
            statistics.bytes += bytes as f64;
            statistics.squares += (bytes as f64) * (bytes as f64);
            statistics.largest = statistics.largest.max(bytes);
            statistics.fetched = statistics.fetched.max(costs.fetched_bytes(&info));
        }
        statistics
    }

    /// Bytes of the units that have rows in a pool or buffer of `rows` rows: an upper bound that holds almost
    /// certainly.
    ///
    /// Each row is drawn after a geometrically distributed time with mean `rows`, and a unit is held until its last row
    /// is drawn. A unit of `r` rows is held for `rows * H(r)` draws on average, and a new unit is added every `r`
    /// draws.
    fn drained(&self, rows: u64, units: u64) -> u64 {
        let each = (self.rows / units.max(1) as f64).max(1.0);
        let harmonic = each.ln() + 0.58;
        // Plus the unit that is being added, and the unit at the end of a batch.
        let count = rows as f64 / each * harmonic + 2.0;
        self.drawn(count + 2.0 * count.sqrt(), units)
    }

    /// Bytes of the units that contain `rows` rows, if the units are drawn at random: an upper bound that holds almost
    /// certainly.
    fn units(&self, rows: u64, units: u64) -> u64 {
        let count = rows as f64 / (self.rows / units.max(1) as f64).max(1e-9);
        // Units at the edges are only used in part.
        self.drawn(count + 2.0, units)
    }

    /// Bytes of `count` units drawn at random: an upper bound that holds almost certainly.
    fn drawn(&self, count: f64, units: u64) -> u64 {
        let n = units.max(1) as f64;
        let mean = self.bytes / n;
        let deviation = (self.squares / n - mean * mean).max(0.0).sqrt();
        let bytes = count * mean + 4.0 * deviation * count.sqrt();
        bytes.min(self.bytes).max(self.largest as f64) as u64
    }
}

/// Returns up to 512 of the units with rows, spread evenly. They include units of every class that isn't rare.
fn spread(units: impl Iterator<Item = u64> + Clone) -> impl Iterator<Item = u64> {
    let all = units.clone().count() as u64;
    let count = all.min(512);
    let mut next = 0;
    units.zip(0u64..).filter_map(move |(unit, index)| {
        let is_next = next < count && u128::from(index) == u128::from(next) * u128::from(all) / u128::from(count);
        next += u64::from(is_next);
        is_next.then_some(unit)
    })
}

/// Learns how much memory an open unit takes. The unit may take up to the limit, or [`LOOK_BYTES`] if that is more, in
/// addition to its stored bytes. A unit that can't be read is ignored here: its batch will report the error.
fn probe_unit(context: &Arc<PassContext>, unit: u64, limit: u64) -> Result<()> {
    let info = context.config.describe(unit);
    let most = limit.max(LOOK_BYTES);
    if info.range.is_some_and(|range| range.len > most) {
        // The estimate for units already includes such a large unit.
        return Ok(());
    }
    let open = match context.open_within(unit, Pass::default().epoch, None, Some(most)) {
        Ok(open) => open,
        Err(error) if error.is_over_memory_limit() => return Err(context.config.locate(unit, refused(&error, limit))),
        Err(_) => return Ok(()),
    };
    let scratch = SlabPool::bounded(usize::try_from(most).unwrap_or(usize::MAX));
    let mut rows = info.rows.min(DECODED);
    // Retry with fewer rows if the rows take too much memory.
    while rows > 0 {
        if let Some(bytes) = decode(&context.working_memory, open.get(), rows, &scratch) {
            context.costs.appended(info.class, u64::from(rows), bytes as u64);
            return Ok(());
        }
        match scratch.take_failure() {
            Some(error) if rows == 1 => return Err(context.config.locate(unit, refused(&error, limit))),
            Some(_) => rows /= 2,
            None => return Ok(()),
        }
    }
    Ok(())
}

/// Decodes the first rows of a unit and returns the bytes of their variable-size parts.
fn decode(working_memory: &WorkingMemory, open: &dyn Unit, rows: u32, scratch: &Arc<SlabPool>) -> Option<usize> {
    let batch = Rows::new(working_memory.parts().clone(), rows as usize, scratch).ok()?;
    let mut sink = Sink::new(&batch, Fragment::default()).ok()?;
    let picks: Vec<_> = (0..rows).map(|record| Pick { record, slot: record }).collect();
    open.place(Mark::START, &picks, &mut sink).ok()?;
    Some(sink.finish().arena_bytes())
}

fn refused(error: &Error, limit: u64) -> Error {
    Error::over_memory_limit(format!(
        "memory_limit is {}, and {}",
        rounded_down(limit),
        error.reason()
    ))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn probed_units_are_spread_over_the_units_with_rows() {
        assert!(spread(0..512).eq(0..512));
        let some: Vec<u64> = spread((0..10_000).filter(|unit| unit % 10 == 7)).collect();
        assert_eq!((some.len(), some[0], some[1], some[511]), (512, 7, 17, 9987));
        assert!(some.iter().all(|unit| unit % 10 == 7));
        assert_eq!(spread(0..0).count(), 0);
    }

    #[test]
    fn equal_units_need_the_memory_of_their_rows() {
        let statistics = UnitStatistics {
            rows: 1000.0,
            bytes: 100_000.0,
            squares: 10.0 * 1e8,
            largest: 10_000,
            fetched: 0,
        };
        // Three units and two at the edges, but never more than all units.
        assert_eq!(statistics.units(300, 10), 50_000);
        assert_eq!(statistics.units(5000, 10), 100_000);
    }
}
