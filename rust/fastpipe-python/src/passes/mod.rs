//! Orders of rows, and the passes that yield batches in such an order.

pub(crate) mod arrow_batches;
pub(crate) mod batch_feed;
pub(crate) mod dropped_keys;
mod lost_units;
pub(crate) mod mixture;
pub(crate) mod order;
pub(crate) mod pass;
pub(crate) mod pass_memory;
pub(crate) mod pass_options;
pub(crate) mod progress;
pub(crate) mod reader_totals;
pub(crate) mod stats;
pub(crate) mod stratified_draws;
