//! The interface of orders that take their rows from other orders, such as mixtures.
//!
//! An [`Order`](crate::Order) knows only this interface, because a composed order consists of orders.

use std::fmt::Debug;
use std::sync::Arc;

use crate::failure::{Patience, Result};
use crate::plan::Planned;

/// An order of the rows of other orders.
pub(crate) trait Composed: Debug + Send + Sync {
    /// Returns the number of rows of an epoch.
    fn rows(&self) -> u64;

    /// Returns the average number of rows of a group, rounded up. `None` if rows aren't groups.
    fn rows_per_group(&self) -> Option<u64>;

    /// Returns how many numbers of units occur in batches. `None` if they are too many.
    fn unit_numbers(&self) -> Option<u64>;

    /// Returns the approximate maximum bytes for planning. Set `seeks` if the first batch isn't at the start of an
    /// epoch.
    fn memory(&self, seeks: bool) -> u64;

    /// Returns a walker at the start of an epoch.
    fn walk(self: Arc<Self>, epoch: u64, batch_size: u32) -> Result<Box<dyn ComposedWalker>>;
}

/// Iterates over the batches of a composed order.
pub(crate) trait ComposedWalker: Debug + Send + Sync {
    /// Returns an existing batch.
    fn batch(&mut self, batch: u64, patience: &mut Patience<'_>) -> Result<Planned>;

    /// Forgets the current position and frees the memory for it. The next batch needs a seek.
    fn forget(&mut self);
}
