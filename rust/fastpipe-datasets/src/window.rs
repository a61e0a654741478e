//! The number of rows that are shuffled together.

use fastpipe_order::{Kind, Settings, Units};

/// Maximum number of rows in a window, pool or buffer, because their indices have 32 bits.
const LARGEST: u64 = 1 << 31;

/// Returns the default size of a window, pool or buffer in rows: the larger of 16 batches and 64 average units. If
/// large units were split, `uncut` is the number of units before. The size doesn't depend on splitting, because orders
/// don't.
pub fn default_window(units: &Units, uncut: Option<u64>, batch_size: u64) -> u64 {
    let average = units.total().div_ceil(uncut.unwrap_or(units.len() as u64).max(1));
    let rows = batch_size.saturating_mul(16).max(average.saturating_mul(64));
    rows.clamp(1, LARGEST)
}

/// Returns the size of the window, pool or buffer of an order in rows. Windows consist of whole batches.
pub fn window_rows(settings: &Settings) -> u64 {
    let rows = settings.shuffle_buffer.min(LARGEST);
    match settings.kind {
        Kind::Sequential | Kind::Window => rows.next_multiple_of(settings.batch_size.into()),
        Kind::Block | Kind::Buffer | Kind::Sample | Kind::Bootstrap | Kind::Mixture => rows,
    }
}
