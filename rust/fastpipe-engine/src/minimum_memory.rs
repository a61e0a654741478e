//! The least memory that a pass can do with.

use std::sync::Arc;

use fastpipe_batch::{Error, Fragment, Mark, Pass, Pick, Result, Rows, Sink, SlabPool, Unit};
use fastpipe_order::{Kind, Order};

use crate::cost::CostModel;
use crate::human_bytes::{rounded_down, rounded_up};
use crate::order_memory::{largest, would_fit};
use crate::pass::PassContext;
use crate::pass_config::PassConfig;
use crate::working_memory::WorkingMemory;

/// Units that are looked at, of each class.
const LOOKED_AT: usize = 8;

/// Rows of each that are decoded, to see what memory they take.
const DECODED: u32 = 256;

/// Bytes that a look may take where the limit is less: so that the least is known and named, unless units are larger.
const LOOK_BYTES: u64 = 16 << 20;

/// Refuses a limit in which the pass can't be run. So that it is known beforehand what units take when they are open,
/// some are looked at.
pub(crate) fn check(context: &Arc<PassContext>, order: &Order, limit: u64) -> Result<()> {
    probe_units(context, limit)?;
    let settings = order.settings();
    let (config, costs, working_memory) = (&context.config, &context.costs, &context.working_memory);
    let units = config.source().units();
    let statistics = UnitStatistics::of(config, costs, units);
    let classes = 0..config.source().facts().classes.len() as u32;
    let rows = u64::from(settings.batch_size).min(statistics.rows as u64);
    // One that each thread makes, and one that waits for the consumer; or all, if they are fewer.
    let batches = (config.threads() as u64 + 1).min(config.options().limit.unwrap_or(u64::MAX).max(1));
    let rows_bytes = classes.map(|class| working_memory.rows_bytes(rows, costs.arena_bytes(class, rows)));
    let batch = batches.saturating_mul(rows_bytes.max().unwrap_or(0));
    // The units of this many rows, and the list of these.
    let units_of = |rows: u64| {
        let units = match settings.kind {
            Kind::Block | Kind::Buffer => statistics.drained(rows, units),
            Kind::Sequential | Kind::Window => statistics.units(rows, units),
            // Those that batches under way lie in: the more, the fewer rows are drawn.
            Kind::Sample | Kind::Bootstrap => {
                let drawn = settings.shuffle_buffer.max(1) as f64;
                let among = statistics.rows * (batches * u64::from(settings.batch_size)) as f64 / drawn;
                statistics.units((among as u64).min(statistics.rows as u64), units)
            }
        };
        units.saturating_add(order.memory(rows))
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
            "{batches} batches of {rows} rows ({} being made, and one that waits)",
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
        _ => {
            reason += &format!("the units and the order of shuffle_buffer={}", settings.shuffle_buffer);
            // What it takes grows with it.
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

/// Looks at some units of every class.
fn probe_units(context: &Arc<PassContext>, limit: u64) -> Result<()> {
    if context.fetches.are_needed() {
        // They take what their source guesses.
        return Ok(());
    }
    let mut looked_at = vec![0; context.config.source().facts().classes.len().max(1)];
    for unit in spread(context.config.source().units()) {
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
    /// Bytes that are fetched besides, of the unit for which they are most.
    fetched: u64,
}

impl UnitStatistics {
    /// Of all units, as far as they are known.
    fn of(config: &PassConfig, costs: &CostModel, units: u64) -> UnitStatistics {
        let mut statistics = UnitStatistics::default();
        for unit in 0..units {
            let info = config.describe(unit);
            let rows = f64::from(info.rows);
            let bytes = costs.unit_bytes(&info);
            // Others may expand a little more than those that were looked at.
            let bytes = bytes + bytes / 20;
            statistics.rows += rows;
            statistics.bytes += bytes as f64;
            statistics.squares += (bytes as f64) * (bytes as f64);
            statistics.largest = statistics.largest.max(bytes);
            statistics.fetched = statistics.fetched.max(costs.fetched_bytes(&info));
        }
        statistics
    }

    /// Bytes of the units of which a pool or buffer of this many rows holds some: all but certainly no more.
    ///
    /// Each row is drawn after a geometrically distributed time of mean `rows`, and a unit is held until its last row
    /// is: that of `r` rows for `rows * H(r)` draws on average, while a new one is taken every `r` draws.
    fn drained(&self, rows: u64, units: u64) -> u64 {
        let each = (self.rows / units.max(1) as f64).max(1.0);
        let harmonic = each.ln() + 0.58;
        // And one that is begun, and one that a batch ends with.
        let count = rows as f64 / each * harmonic + 2.0;
        self.drawn(count + 2.0 * count.sqrt(), units)
    }

    /// Bytes of the open units of this many rows, drawn at random: all but certainly no more.
    fn units(&self, rows: u64, units: u64) -> u64 {
        let count = rows as f64 / (self.rows / units.max(1) as f64).max(1e-9);
        // Those at the edges are only used in part.
        self.drawn(count + 2.0, units)
    }

    /// Bytes of this many units, drawn at random: all but certainly no more.
    fn drawn(&self, count: f64, units: u64) -> u64 {
        let n = units.max(1) as f64;
        let mean = self.bytes / n;
        let deviation = (self.squares / n - mean * mean).max(0.0).sqrt();
        let bytes = count * mean + 4.0 * deviation * count.sqrt();
        bytes.min(self.bytes).max(self.largest as f64) as u64
    }
}

/// Numbers below `units`, far apart first: those of every class that isn't rare are among the first few hundred.
fn spread(units: u64) -> impl Iterator<Item = u64> {
    let count = units.min(512);
    (0..count).map(move |i| (u128::from(i) * u128::from(units) / u128::from(count)) as u64)
}

/// Learns what a unit takes when it is open, in no more memory than the limit, or [`LOOK_BYTES`], besides its bytes as
/// stored. One that can't be read says nothing: its batch will say what is wrong.
fn probe_unit(context: &Arc<PassContext>, unit: u64, limit: u64) -> Result<()> {
    let info = context.config.describe(unit);
    let most = limit.max(LOOK_BYTES);
    if info.range.is_some_and(|range| range.len > most) {
        // Known without a look: what units take includes it.
        return Ok(());
    }
    let open = match context.open_within(unit, Pass::default().epoch, None, Some(most)) {
        Ok(open) => open,
        Err(error) if error.is_over_memory_limit() => return Err(context.config.locate(unit, refused(&error, limit))),
        Err(_) => return Ok(()),
    };
    let scratch = SlabPool::bounded(usize::try_from(most).unwrap_or(usize::MAX));
    let mut rows = info.rows.min(DECODED);
    // Fewer where a row takes much.
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

/// Decodes the first rows of a unit. Says what their parts of no fixed size take.
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
    fn equal_units_take_what_their_rows_take() {
        let statistics = UnitStatistics {
            rows: 1000.0,
            bytes: 100_000.0,
            squares: 10.0 * 1e8,
            largest: 10_000,
            fetched: 0,
        };
        // 3 units and two at the edges; never more than all.
        assert_eq!(statistics.units(300, 10), 50_000);
        assert_eq!(statistics.units(5000, 10), 100_000);
    }
}
