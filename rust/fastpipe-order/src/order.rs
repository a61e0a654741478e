//! An order of the rows of a dataset: the number of batches, and the number that each rank gets.

use std::iter::zip;
use std::sync::Arc;

use crate::composed::Composed;
use crate::failure::{Result, collected, copied, filled};
use crate::left_out_steps::LeftOutSteps;
use crate::packing::Packing;
use crate::rank_shards::{RankShards, Remaining};
use crate::sample::Sample;
use crate::settings::{Kind, Settings, ShardBy, Uneven};
use crate::steps_per_rank::steps_per_rank;
use crate::units::Units;

/// An order of the rows of a dataset.
#[derive(Debug)]
pub struct Order {
    pub(crate) settings: Settings,
    /// Units that this rank reads.
    pub(crate) units: Arc<Units>,
    /// Number of batches per epoch of these units.
    pub(crate) batches: u64,
    /// Set if ranks have separate units: steps per epoch of this rank, and of the rank with the most steps.
    pub(crate) own_steps: Option<(u64, u64)>,
    pub(crate) left_out_steps: LeftOutSteps,
    fair: bool,
    /// Rows of an epoch that are in no batch of any rank.
    left_out: u64,
    /// Set if ranks have separate units: the row count of the rank with the fewest rows.
    own_rows: Option<u64>,
    /// The rows of each epoch, if the caller specified them.
    pub(crate) given: Option<Arc<Vec<u64>>>,
    /// Set if other orders have the rows.
    pub(crate) composed: Option<Arc<dyn Composed>>,
    /// Set if each row is a group of rows. Units are then its sections.
    pub(crate) packing: Option<Arc<Packing>>,
}

impl Order {
    /// Creates an order of units with these settings.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the row counts of a rank's units can't be allocated.
    pub fn new(units: &Arc<Units>, settings: Settings) -> Result<Order> {
        Order::made(units, settings, None, None)
    }

    /// Creates an order whose rows are groups of rows.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory can't be allocated, as for [`Order::new`].
    pub fn of_packing(packing: &Arc<Packing>, settings: Settings) -> Result<Order> {
        let order = Order::made(packing.sections(), settings, None, None)?;
        Ok(order.with_packing(Some(packing.clone())))
    }

    fn with_packing(self, packing: Option<Arc<Packing>>) -> Order {
        Order { packing, ..self }
    }

    /// Creates an order of the rows of other orders.
    pub(crate) fn of_composed(units: &Arc<Units>, settings: Settings, composed: Arc<dyn Composed>) -> Result<Order> {
        Order::made(units, settings, None, Some(composed))
    }

    /// Creates an order in which each epoch has these rows in this sequence. They are indices over all units.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory can't be allocated, as for [`Order::new`].
    pub fn of_rows(units: &Arc<Units>, settings: Settings, rows: Arc<Vec<u64>>) -> Result<Order> {
        let settings = Settings {
            kind: Kind::Bootstrap,
            ..settings
        };
        Order::made(units, settings, Some(rows), None)
    }

    fn made(
        units: &Arc<Units>,
        settings: Settings,
        given: Option<Arc<Vec<u64>>>,
        composed: Option<Arc<dyn Composed>>,
    ) -> Result<Order> {
        let ranks = settings.ranks.max(1) as usize;
        let mut order = Order {
            left_out_steps: LeftOutSteps::new(&settings.without_steps)?,
            settings: settings.clone(),
            units: units.clone(),
            batches: 0,
            own_steps: None,
            fair: true,
            left_out: 0,
            own_rows: None,
            given,
            composed,
            packing: None,
        };
        if settings.shard_by == ShardBy::Unit && ranks > 1 {
            let mut totals = filled(0u64, ranks)?;
            for unit in 0..units.len() {
                totals[unit % ranks] += u64::from(units.rows(unit));
            }
            order.units = Arc::new(units.share(settings.rank as usize, ranks)?);
            let batches = collected(totals.iter().map(|&rows| order.batches_of(rows)))?;
            let all = || batches.iter().copied();
            let each = all().all(|batches| batches > 0) || all().all(|batches| batches == 0);
            order.fair = each || settings.in_step() < settings.ranks;
            let steps = steps_per_rank(&batches, settings.in_step().max(1) as usize, settings.on_uneven)?;
            let own = steps.get(settings.rank as usize).copied().unwrap_or(0);
            order.own_rows = totals.iter().copied().min();
            // Steps beyond a rank's own batches repeat rows.
            let dealt = zip(&batches, &steps).map(|(&batches, &steps)| batches.min(steps));
            order.left_out = zip(&totals, dealt)
                .map(|(&rows, dealt)| order.outside(rows, dealt))
                .sum();
            order.own_steps = Some((own, steps.into_iter().max().unwrap_or(0)));
        } else {
            let (all, in_step) = (order.batches_of(order.epoch_rows()), settings.in_step().max(1));
            // With `Drop`, a last round of batches that doesn't reach all ranks in step is dropped.
            let dealt = match settings.on_uneven {
                Uneven::Drop => all / in_step * in_step,
                Uneven::Pad | Uneven::Allow => all,
            };
            order.left_out = order.outside(order.epoch_rows(), dealt);
        }
        order.batches = order.batches_of(order.epoch_rows());
        Ok(order)
    }

    /// Returns the rows of an epoch, including rows of a dropped last batch. If ranks have separate units, these are
    /// this rank's rows.
    pub fn epoch_rows(&self) -> u64 {
        if let Some(given) = &self.given {
            return given.len() as u64;
        }
        let total = self.units.total();
        let Settings {
            kind,
            shuffle_buffer,
            skipped,
            ..
        } = self.settings;
        match kind {
            Kind::Bootstrap if total > 0 => shuffle_buffer,
            Kind::Sample | Kind::Bootstrap => shuffle_buffer.min(total.saturating_sub(skipped)),
            Kind::Mixture => self.composed.as_ref().map_or(0, |composed| composed.rows()),
            _ => total,
        }
    }

    /// Returns the rows of an epoch's sample as ascending indices over all units, or `None` if the order has all rows.
    /// The rows of [`Order::of_rows`] keep their sequence.
    ///
    /// # Errors
    ///
    /// [`PlanError`](crate::PlanError) if memory for the rows can't be allocated.
    pub fn sample(&self, epoch: u64) -> Result<Option<Vec<u64>>> {
        if !matches!(self.settings.kind, Kind::Sample | Kind::Bootstrap) {
            return Ok(None);
        }
        if let Some(given) = &self.given {
            return copied(given).map(Some);
        }
        self.drawn()
            .draw(self.units.total(), self.settings.key(epoch))
            .map(Some)
    }

    /// Returns the parameters of the sample.
    pub(crate) fn drawn(&self) -> Sample {
        Sample {
            rows: self.epoch_rows(),
            skipped: self.settings.skipped,
            replace: self.settings.kind == Kind::Bootstrap,
        }
    }

    /// Returns the number of rows left over after this many batches.
    fn outside(&self, rows: u64, batches: u64) -> u64 {
        rows.saturating_sub(batches.saturating_mul(u64::from(self.settings.batch_size.max(1))))
    }

    fn batches_of(&self, rows: u64) -> u64 {
        let size = u64::from(self.settings.batch_size.max(1));
        if self.settings.drop_last {
            rows / size
        } else {
            rows.div_ceil(size)
        }
    }

    /// Returns how many numbers of units occur in batches. A mixture numbers units anew in each pass over a member.
    /// `None` if they are too many.
    pub(crate) fn unit_numbers(&self) -> Option<u64> {
        match (&self.composed, &self.packing) {
            (Some(composed), _) => composed.unit_numbers(),
            (None, Some(packing)) => Some(packing.units() as u64),
            (None, None) => Some(self.units.len() as u64),
        }
    }

    /// Returns the average number of rows of a group, rounded up. `None` if rows of the order aren't groups.
    pub fn rows_per_group(&self) -> Option<u64> {
        match &self.composed {
            Some(composed) => composed.rows_per_group(),
            None => self.packing.as_ref().map(|packing| packing.items_per_group().max(1)),
        }
    }

    /// Returns the number of rows in a unit of a batch.
    pub(crate) fn rows_of(&self, unit: u64) -> u32 {
        self.units.rows((unit % (self.units.len() as u64).max(1)) as usize)
    }

    /// Whether the caller specified the rows: see [`Order::of_rows`].
    pub fn is_given(&self) -> bool {
        self.given.is_some()
    }

    /// Returns the settings of the order.
    pub fn settings(&self) -> &Settings {
        &self.settings
    }

    /// Whether every rank gets a batch, or none does.
    pub fn is_fair(&self) -> bool {
        self.fair
    }

    /// Returns the rows of an epoch that are in no batch of any rank. These are rows of a dropped last batch, and of
    /// batches that can't be divided evenly.
    pub fn left_out(&self) -> u64 {
        self.left_out
    }

    /// Returns the row count of the rank with the fewest rows, if ranks have separate units.
    pub fn own_rows(&self) -> Option<u64> {
        self.own_rows
    }

    /// Returns the number of batches that this rank gets in an epoch.
    pub fn steps(&self) -> u64 {
        self.left_out_steps.remaining_before(self.steps_of(&self.whole(), 0).0)
    }

    /// Returns the steps that are left out of every epoch.
    pub fn left_out_steps(&self) -> &LeftOutSteps {
        &self.left_out_steps
    }

    /// Returns the index of this rank's batch at a step of an epoch among the batches of all ranks. Steps that are left
    /// out have no number. A step without a batch, which repeats the last batch, has that batch's index.
    pub fn index(&self, step: u64) -> u64 {
        let step = self.left_out_steps.step(step);
        let rank = if self.own_steps.is_some() {
            0
        } else {
            self.settings.rank
        };
        let batch = self.whole().batch(rank, step);
        self.among_all(batch.unwrap_or(self.batches.saturating_sub(1)))
    }

    /// Returns the index of a batch of this rank's units among the batches of all ranks.
    pub(crate) fn among_all(&self, batch: u64) -> u64 {
        let Settings { rank, ranks, .. } = self.settings;
        match self.own_steps {
            Some(_) => batch.saturating_mul(ranks).saturating_add(rank),
            None => batch,
        }
    }

    /// Returns the remaining steps of shards that begin after `before` steps of the epoch: of this rank, and of the
    /// rank with the most steps. Steps that are left out count.
    pub(crate) fn steps_of(&self, shards: &RankShards, before: u64) -> (u64, u64) {
        if let Some((own, most)) = self.own_steps {
            return (own.saturating_sub(before), most.saturating_sub(before));
        }
        let (even, odd) = shards.steps();
        let more = |rank: u64| even + u64::from(rank < odd);
        let Settings { rank, on_uneven, .. } = self.settings;
        let in_step = self.settings.in_step().max(1);
        // The first `odd` ranks have one more batch. Check the first and last rank of the group in step with this one.
        let first = rank - rank % in_step;
        let last = first + in_step - 1;
        match on_uneven {
            Uneven::Drop => (more(last), more(in_step - 1)),
            Uneven::Pad => (more(first), more(0)),
            Uneven::Allow => (more(rank), more(0)),
        }
    }

    /// Returns the number of batches per chunk.
    pub(crate) fn per_chunk(&self) -> u64 {
        match self.settings.shard_by {
            ShardBy::Window => (self.settings.shuffle_buffer / u64::from(self.settings.batch_size.max(1))).max(1),
            ShardBy::Unit | ShardBy::Batch => 1,
        }
    }

    /// Returns the number of ranks that share the batches.
    fn dealt_to(&self) -> u64 {
        if self.own_steps.is_some() {
            1
        } else {
            self.settings.ranks
        }
    }

    pub(crate) fn whole(&self) -> RankShards {
        RankShards::whole(self.dealt_to(), self.per_chunk(), self.batches)
    }

    pub(crate) fn shards(&self, remaining: Remaining) -> Result<RankShards> {
        RankShards::new(self.dealt_to(), self.per_chunk(), self.batches, remaining)
    }

    /// Returns the same order, but with an incomplete last batch included.
    pub(crate) fn with_last(self: &Arc<Self>) -> Result<Arc<Order>> {
        if !self.settings.drop_last {
            return Ok(self.clone());
        }
        let settings = Settings {
            drop_last: false,
            ..self.settings.clone()
        };
        let (given, composed) = (self.given.clone(), self.composed.clone());
        let order = Order::made(&self.units, settings, given, composed)?;
        Ok(Arc::new(order.with_packing(self.packing.clone())))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn steps(rows: u32, in_step: u64, workers: u64, shard_by: ShardBy, on_uneven: Uneven) -> Vec<u64> {
        let units = Arc::new(Units::new((0..rows).map(|_| 1)).unwrap());
        let ranks = in_step * workers;
        let of = |rank| {
            let settings = Settings {
                kind: if shard_by == ShardBy::Unit {
                    Kind::Block
                } else {
                    Kind::Sequential
                },
                batch_size: 1,
                shuffle_buffer: 2,
                seed: 1,
                rank,
                ranks,
                shard_by,
                on_uneven,
                in_step: Some(in_step),
                ..Settings::default()
            };
            let order = Arc::new(Order::new(&units, settings).unwrap());
            assert_eq!(order.epoch(0).unwrap().count() as u64, order.steps());
            assert!(order.is_fair() || workers == 1);
            order.steps()
        };
        let each: Vec<u64> = (0..ranks).map(of).collect();
        (0..in_step as usize)
            .map(|member| each.iter().skip(member).step_by(in_step as usize).sum())
            .collect()
    }

    /// Ranks get the same number of batches with workers as without, and equal numbers except with `Allow`.
    #[test]
    fn workers_of_ranks_keep_ranks_in_step() {
        for on_uneven in [Uneven::Drop, Uneven::Pad, Uneven::Allow] {
            for shard_by in [ShardBy::Window, ShardBy::Batch, ShardBy::Unit] {
                for rows in 0..40 {
                    // With fewer rows than ranks, `ShardBy::Unit` is refused.
                    for ranks in (1..4).filter(|&ranks| shard_by != ShardBy::Unit || u64::from(rows) >= ranks) {
                        let alone = steps(rows, ranks, 1, shard_by, on_uneven);
                        for workers in 2..6 {
                            let shared = steps(rows, ranks, workers, shard_by, on_uneven);
                            assert_eq!(
                                shared, alone,
                                "{rows} rows, {ranks} ranks, {workers}, {on_uneven:?}, {shard_by:?}"
                            );
                        }
                    }
                }
            }
        }
    }
}
