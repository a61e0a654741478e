//! How many rows are shuffled together.

use fastpipe_order::{Kind, Settings, Units};

/// Rows of a window, pool or buffer at most: their places are counted in 32 bits.
const LARGEST: u64 = 1 << 31;

/// Rows of a window, a pool or a buffer of no given size: the larger of 16 batches and 64 average units. The cut
/// of large units doesn't count, since orders don't depend on it: `uncut` is the number of units before.
pub fn default_window(units: &Units, uncut: Option<u64>, batch_size: u64) -> u64 {
    let average = units.total().div_ceil(uncut.unwrap_or(units.len() as u64).max(1));
    let rows = batch_size.saturating_mul(16).max(average.saturating_mul(64));
    rows.clamp(1, LARGEST)
}

/// Rows of the window, pool or buffer of an order with these settings. Windows hold whole batches.
pub fn window_rows(settings: &Settings) -> u64 {
    let rows = settings.shuffle_buffer.min(LARGEST);
    match settings.kind {
        Kind::Sequential | Kind::Window => rows.next_multiple_of(settings.batch_size.into()),
        Kind::Block | Kind::Buffer | Kind::Sample | Kind::Bootstrap => rows,
    }
}
