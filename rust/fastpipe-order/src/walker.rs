//! Iteration over the batches of an epoch, for any kind of order.

use std::sync::Arc;

use crate::composed::ComposedWalker;
use crate::failure::{Patience, Result};
use crate::order::Order;
use crate::plan::Planned;
use crate::sample::SampleWalker;
use crate::sequential::SequentialWalker;
use crate::settings::{Kind, Settings};
use crate::shuffle_pool::{Grain, ShufflePool, ShufflePoolWalker};
use crate::window::{WindowWalker, Windows};

/// Iterates over the batches of an epoch.
#[derive(Debug)]
pub(crate) enum Walker {
    Sequential(SequentialWalker),
    Window(WindowWalker),
    ShufflePool(ShufflePoolWalker),
    Sample(SampleWalker),
    Composed(Box<dyn ComposedWalker>),
}

impl Walker {
    /// Creates a walker at the start of an epoch.
    pub(crate) fn new(order: &Order, epoch: u64) -> Result<Walker> {
        let Settings {
            shuffle_buffer,
            batch_size,
            rank,
            ..
        } = order.settings;
        let (units, key) = (order.units.clone(), order.settings.key(epoch));
        let shard = if order.own_steps.is_some() { rank } else { 0 };
        let sliding = |units, grain| {
            ShufflePoolWalker::new(Arc::new(ShufflePool::new(
                units,
                grain,
                key,
                shard,
                shuffle_buffer,
                batch_size,
            )))
        };
        if let Some(composed) = &order.composed {
            return Ok(Walker::Composed(composed.clone().walk(epoch, batch_size)?));
        }
        Ok(match order.settings.kind {
            // Without members there are no batches.
            Kind::Sequential | Kind::Mixture => Walker::Sequential(SequentialWalker::new(units, batch_size)),
            Kind::Window => {
                let windows = Windows::new(units, key, shuffle_buffer, batch_size)?;
                Walker::Window(WindowWalker::new(Arc::new(windows)))
            }
            Kind::Block => Walker::ShufflePool(sliding(units, Grain::Unit)),
            Kind::Buffer => Walker::ShufflePool(sliding(units, Grain::Row)),
            Kind::Sample | Kind::Bootstrap => {
                let sample = order.drawn();
                Walker::Sample(SampleWalker::new(units, sample, key, batch_size, order.given.clone()))
            }
        })
    }

    /// Returns an existing batch. If rows of the order are groups, the batch has groups.
    pub(crate) fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<Planned> {
        match self {
            Walker::Sequential(walker) => walker.batch(batch).map(Planned::from),
            Walker::Window(walker) => walker.batch(batch, patience).map(Planned::from),
            Walker::ShufflePool(walker) => walker.batch(batch, patience).map(Planned::from),
            Walker::Sample(walker) => walker.batch(batch).map(Planned::from),
            Walker::Composed(walker) => walker.batch(batch, patience),
        }
    }

    /// Forgets the current position. The next batch needs a seek.
    pub(crate) fn forget(&mut self) {
        match self {
            Walker::Sequential(walker) => walker.forget(),
            Walker::Window(walker) => walker.forget(),
            Walker::ShufflePool(walker) => walker.forget(),
            Walker::Sample(walker) => walker.forget(),
            Walker::Composed(walker) => walker.forget(),
        }
    }
}
