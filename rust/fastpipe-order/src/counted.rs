//! Orders of which only the number of rows is known, because another process plans their batches.

use std::sync::Arc;

use crate::composed::{Composed, ComposedWalker};
use crate::failure::{Patience, PlanError, Result};
use crate::order::Order;
use crate::plan::Planned;
use crate::settings::Settings;
use crate::units::Units;

impl Order {
    /// Creates an order with `rows` rows per epoch, whose batches another process plans. It numbers steps, ranks and
    /// states as the order there does. Planning a batch fails with [`PlanError::Elsewhere`].
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory can't be allocated, as for [`Order::new`].
    pub fn of_count(units: &Arc<Units>, settings: Settings, rows: u64) -> Result<Order> {
        Order::of_composed(units, settings, Arc::new(Counted(rows)))
    }
}

#[derive(Debug)]
struct Counted(u64);

impl Composed for Counted {
    fn rows(&self) -> u64 {
        self.0
    }

    fn rows_per_group(&self) -> Option<u64> {
        None
    }

    fn unit_numbers(&self) -> Option<u64> {
        Some(0)
    }

    fn memory(&self, _seeks: bool) -> u64 {
        0
    }

    fn walk(self: Arc<Self>, _epoch: u64, _batch_size: u32) -> Result<Box<dyn ComposedWalker>> {
        Ok(Box::new(Elsewhere))
    }
}

#[derive(Debug)]
struct Elsewhere;

impl ComposedWalker for Elsewhere {
    fn batch(&mut self, _batch: u64, _patience: &mut Patience<'_>) -> Result<Planned> {
        Err(PlanError::Elsewhere)
    }

    fn forget(&mut self) {}
}
