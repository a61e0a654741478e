//! Which rows stand in which batch.
//!
//! # One page
//!
//! The order of samples is a pure function: which rows stand in batch `t` depends on the numbers of rows in the units
//! (the blocks of Avro files), on the seed, the epoch, the order and its parameters, and on `t`. Not on data, files,
//! threads, memory, or on what was read before. So this crate has no data, no I/O and no threads, depends on nothing of
//! ours but [draws](fastpipe_random) and hints about memory, and holds no state that couldn't be computed anew:
//!
//! - **Any batch at once.** [`Cursor::seek`] goes to any batch of any epoch.
//! - **Exact resuming.** A [`State`] is a few numbers, the same for all ranks. [`Order::resume`] goes on from it.
//! - **Elastic ranks.** Ranks decide who gets which batch and when, never what stands in it: another number of them
//!   goes on where the others stopped.
//!
//! ## Rows to batches
//!
//! Each order arranges all rows of an epoch in a line and cuts it into batches. `n` is the shuffle buffer:
//!
//! ```text
//!             as they stand   1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 ...       (rows of units 1, 2, 3, 4, ...)
//!
//! sequential                  1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 ...
//!
//! window      units drawn     3 3 3 3 1 1 1 1|4 4 4 4 2 2 2 2|...       all units of the data set, in random order,
//!             rows drawn      1 3 3 1 3 1 1 3|2 4 4 2 2 4 2 4|...       cut into windows of n rows, each one permuted
//!
//! buffer      a buffer of n   1 2 1 1 2 3 1 2 3 4 2 3 ...               each draw takes any of the n rows in the
//!                                                                       buffer, and the next row enters
//!
//! block       a pool of units 1 2 1 1 2 3 1 2 3 4 2 3 ...               the same with whole units entering; a draw
//!                                                                       takes the next row of the unit of the row
//!                                                                       that it met
//! ```
//!
//! - *Window* order needs only to know where each window starts among the units in random order. The random order of
//!   many units is a keyed permutation without a table ([`Units`](fastpipe_random::Purpose::Units)); going on from one
//!   window to the next takes a look at each of its units. To go anywhere else a table is made of the sums of every 64
//!   units, once an epoch; states hold the places that come next, so resuming needs none. Within a window rows are
//!   permuted by a Fisher-Yates shuffle.
//! - *Buffer* and *block* order look as if they needed what happened before, and don't: a row of the buffer is followed
//!   back, draw by draw, to where it came from, which takes a few dozen times as many draws as the buffer has rows (see
//!   `shuffle_pool.rs`).
//!
//! Draws are counter-based: a function of the seed, the epoch, what they are for and their place ([`fastpipe_random`]).
//! No stream of random numbers is shared, so nothing depends on who draws first.
//!
//! ## Batches to ranks
//!
//! Windows are dealt to ranks as wholes, so that no rank decodes another's rows: with windows of `K` batches, rank `r`
//! of `N` gets at its step `s` batch `t = ((s / K) * N + r) * K + s % K`. The rest, when there is no window left for
//! each, is dealt batch by batch, so that all ranks have equally many. Sequential order is dealt alike, in stretches as
//! long as a window. When the number of ranks changes, what is left of the windows that were begun is dealt first (see
//! `rank_shards.rs`). Block and buffer order give each rank units of its own instead; there ranks can't change within
//! an epoch.
//!
//! ## What a batch is
//!
//! A [`BatchPlan`]: for sequential order [`Run`]s of consecutive records, else [`Picks`] of single ones; which units
//! are no longer needed; and the state behind it.
#![forbid(unsafe_code)]

mod cursor;
mod failure;
mod fisher_yates;
mod order;
mod packed;
mod permutation;
mod plan;
mod planning_memory;
mod rank_shards;
mod reservoir;
mod sample;
mod sequential;
mod settings;
mod shuffle_pool;
mod state;
mod steps_per_rank;
mod units;
mod walker;
mod window;
mod without_units;

pub use cursor::{BatchPlan, Cursor};
pub use failure::PlanError;
pub use fastpipe_random::Key;
pub use fisher_yates::FisherYates;
pub use order::Order;
pub use plan::{Content, Picks, Row, Run};
pub use rank_shards::{PartialChunk, Remaining};
pub use reservoir::Reservoir;
pub use sample::{Drawing, Drawn, Part, drawn_within};
pub use settings::{Kind, Settings, SettingsError, ShardBy, Uneven};
pub use state::{State, StateError};
pub use units::{Units, UnitsError};
pub use window::Place;
pub use without_units::RemainingEpoch;
