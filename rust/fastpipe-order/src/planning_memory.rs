//! Estimates of the memory for planning, before any of it is allocated.

use crate::order::Order;
use crate::plan::{Row, Run};
use crate::rank_shards::PartialChunk;
use crate::sample::Sample;
use crate::settings::{Kind, Settings, Uneven};
use crate::shuffle_pool::{self, Grain};
use crate::state::State;
use crate::window::Windows;

impl Order {
    /// Returns the bytes for the list of rows in a window, pool or buffer of `shuffle_buffer` rows. Memory for the
    /// units isn't included.
    pub fn memory(&self, shuffle_buffer: u64) -> u64 {
        match self.settings.kind {
            Kind::Sequential => 0,
            _ if self.given.is_some() => 0,
            Kind::Window => Windows::list_bytes(&self.units, shuffle_buffer),
            Kind::Block => shuffle_pool::list_bytes(&self.units, Grain::Unit, shuffle_buffer),
            Kind::Buffer => shuffle_pool::list_bytes(&self.units, Grain::Row, shuffle_buffer),
            Kind::Sample | Kind::Bootstrap => Sample::list_bytes(self.units.total(), shuffle_buffer),
            Kind::Mixture => self.composed.as_ref().map_or(0, |composed| composed.memory(false)),
        }
    }

    /// Returns the approximate maximum bytes for planning with a buffer of `shuffle_buffer` rows. It is the sum of
    /// [`memory`](Order::memory), lists of units, and one batch plan. Set `seeks` if the first batch isn't at the start
    /// of an epoch. Going past steps that are left out is a seek, too.
    pub fn planning_memory(&self, shuffle_buffer: u64, seeks: bool) -> u64 {
        let units = &*self.units;
        let seeks = seeks || !self.left_out_steps().is_empty();
        let streamed = |grain| {
            let seek = if seeks {
                shuffle_pool::seek_bytes(units, grain, shuffle_buffer)
            } else {
                0
            };
            shuffle_pool::unit_bytes(units, grain, shuffle_buffer).saturating_add(seek)
        };
        let besides = match self.settings.kind {
            Kind::Sequential | Kind::Sample | Kind::Bootstrap => 0,
            // Seeking needs more than [`Order::memory`].
            Kind::Mixture => self
                .composed
                .as_ref()
                .map_or(0, |composed| composed.memory(seeks) - composed.memory(false)),
            Kind::Window => Windows::unit_bytes(units, shuffle_buffer),
            Kind::Block => streamed(Grain::Unit),
            Kind::Buffer => streamed(Grain::Row),
        };
        let groups = self.packing.as_ref().map_or(0, |packing| {
            packing.bytes(shuffle_buffer.saturating_add(self.settings.batch_size.into()))
        });
        self.memory(shuffle_buffer)
            .saturating_add(besides)
            .saturating_add(groups)
            .saturating_add(self.batch_memory())
    }

    /// Returns the approximate maximum bytes for resuming from a state while the partially read chunks of all ranks are
    /// examined.
    pub fn resuming_memory(&self, state: &State) -> u64 {
        let per_chunk = self.per_chunk();
        let open = state
            .remaining
            .partial
            .len()
            .saturating_add(state.remaining.deferred.len()) as u64;
        // If the number of ranks has changed, the partially read chunk of each former rank is divided.
        let begun = if state.ranks == self.settings.ranks {
            0
        } else {
            state.ranks
        };
        let batches = open.saturating_add(begun).saturating_mul(per_chunk).min(self.batches);
        // Each batch is in several lists, which may grow to twice the required size.
        let lists = 2 * (size_of::<PartialChunk>() + 2 * size_of::<u64>()) as u64;
        batches
            .saturating_mul(lists)
            .saturating_add(open.saturating_mul(4 * lists))
    }

    /// Returns the bytes of a batch plan.
    fn batch_memory(&self) -> u64 {
        let Settings {
            kind,
            batch_size,
            on_uneven,
            ..
        } = self.settings;
        let size = u64::from(batch_size).saturating_mul(self.rows_per_group().unwrap_or(1));
        let pads = on_uneven == Uneven::Pad;
        let rows = if pads { size } else { size.min(self.units.total()) };
        let units = (self.units.len() as u64).min(rows);
        let picks = rows * size_of::<Row>() as u64 + units * size_of::<u64>() as u64;
        match kind {
            // A growing list may have twice the required capacity. A padded batch may have runs of one row.
            Kind::Sequential => (if pads { rows } else { units }) * 2 * size_of::<Run>() as u64,
            Kind::Window | Kind::Sample | Kind::Bootstrap | Kind::Mixture => picks,
            // The rows of a batch enter the pool before the batch is drawn.
            Kind::Block | Kind::Buffer => picks + shuffle_pool::entering_bytes(rows),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::*;
    use crate::settings::ShardBy;
    use crate::units::Units;

    fn memory(kind: Kind, units: &[u32], shuffle_buffer: u64) -> u64 {
        let settings = Settings {
            kind,
            batch_size: 10,
            shuffle_buffer,
            seed: 1,
            shard_by: ShardBy::Batch,
            on_uneven: Uneven::Allow,
            ..Settings::default()
        };
        let units = Units::new(units.iter().copied()).unwrap();
        Order::new(&Arc::new(units), settings).unwrap().memory(shuffle_buffer)
    }

    #[test]
    fn a_list_needs_the_memory_of_its_rows() {
        assert_eq!(memory(Kind::Sequential, &[100; 10], 500), 0);
        assert_eq!(memory(Kind::Window, &[100; 10], 500), 4 * 500);
        assert_eq!(memory(Kind::Window, &[100; 10], 5000), 4 * 1000);
        assert_eq!(memory(Kind::Window, &[1 << 31, 5], 500), 4 * 500);
        assert_eq!(memory(Kind::Window, &[1 << 31, 5, 5], 500), 8 * 500);
        assert_eq!(memory(Kind::Buffer, &[100; 10], 500), 16 * 500);
        assert_eq!(memory(Kind::Buffer, &[100; 10], 5000), 16 * 1000);
        assert_eq!(
            memory(Kind::Block, &[100; 10], 500),
            16 * 600,
            "all rows of the last unit enter"
        );
        assert_eq!(
            memory(Kind::Block, &[1 << 31, 5], 1),
            16 * (1 + (1 << 31)),
            "a unit enters as a whole even if one row is needed"
        );
    }
}
