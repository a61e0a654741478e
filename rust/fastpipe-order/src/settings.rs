//! What an order depends on, besides the units: its kind, its parameters, and how ranks share it.

/// The orders.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    /// Units and records as they stand.
    Sequential,
    /// Windows of units in random order, each a uniform permutation.
    Window,
    /// Draws from a pool of units, each of which is read in sequence.
    Block,
    /// Draws from a buffer of rows.
    Buffer,
    /// A uniform sample of this many rows as the buffer has, as they stand; another one in each epoch. For one rank.
    Sample {
        /// Draws of the epoch in front of the sample's: those of others, which it shares no row with.
        skipped: u64,
        /// Whether a row may be drawn several times, and be of several samples.
        replace: bool,
    },
}

/// What ranks share out among them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ShardBy {
    /// Windows, or stretches as long as one: no rank decodes another's rows. For sequential and window order.
    Window,
    /// Units: rank `r` of `N` has units `r`, `r + N`, ... and an order of its own. For block and buffer order.
    Unit,
    /// Batches: at each step the ranks together have the next ones. Every rank decodes the rows of all.
    Batch,
}

/// What becomes of batches that can't be shared out evenly.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Uneven {
    /// They are left out: fewer than there are ranks (by units: what ranks have above the one that has fewest).
    Drop,
    /// Ranks without one get one of rows that are not valid; batches are filled up alike.
    Pad,
    /// Some ranks have more batches than others.
    Allow,
}

/// What an order depends on, besides the units.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Settings {
    /// Which order.
    pub kind: Kind,
    /// Rows of a batch; at least 1.
    pub batch_size: u32,
    /// Whether a last batch of fewer rows is left out.
    pub drop_last: bool,
    /// Rows of a window (a multiple of the batch size), a pool, a buffer or a sample. Sequential order is dealt to
    /// ranks in stretches of that many.
    pub shuffle_buffer: u64,
    /// The user's seed.
    pub seed: u64,
    /// This rank.
    pub rank: u64,
    /// Number of ranks.
    pub ranks: u64,
    /// What they share out.
    pub shard_by: ShardBy,
    /// What becomes of the rest.
    pub uneven: Uneven,
    /// How many ranks have equally many batches, as `uneven` says: `ranks`, or a divisor of it. Then ranks `m`, `m +
    /// in_step`, `m + 2 * in_step`, ... share what would be rank `m`'s of `in_step`, and among themselves may have
    /// differently many.
    pub in_step: u64,
}
