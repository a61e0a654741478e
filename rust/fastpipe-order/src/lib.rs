//! Decides which rows each batch contains.
//!
//! # Overview
//!
//! The order of rows is a pure function. The rows of batch `t` depend only on the row counts of the units (such as Avro
//! blocks), the seed, the epoch, the order and its parameters, and `t`. They don't depend on data, files, threads,
//! memory, or earlier reads. This crate therefore contains no data, no I/O and no threads. Of fastpipe's crates, it
//! uses only [random draws](fastpipe_random) and memory helpers. All its state can be recomputed:
//!
//! - **Any batch at once.** [`Cursor::seek`] goes to any batch of any epoch.
//! - **Exact resuming.** A [`State`] is a few numbers, the same for all ranks. [`Order::resume`] continues from it.
//! - **Elastic ranks.** Ranks determine which process gets a batch and when, but never its contents. A different number
//!   of ranks can resume from the same state.
//!
//! ## Rows to batches
//!
//! Each order arranges all rows of an epoch in a line and cuts it into batches. `n` is the shuffle buffer:
//!
//! ```text
//!             storage order   1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 ...       (rows of units 1, 2, 3, 4, ...)
//!
//! sequential                  1 1 1 1 2 2 2 2 3 3 3 3 4 4 4 4 ...
//!
//! window      units drawn     3 3 3 3 1 1 1 1|4 4 4 4 2 2 2 2|...       all units of the dataset, in random order,
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
//! - *Window* order needs only the start of each window in the random order of units. The random order of many units is
//!   a keyed permutation that needs no table ([`Units`](fastpipe_random::Purpose::Units)). Moving from one window to
//!   the next visits each of its units. Seeking to any other window needs a table of row sums, one for every 64 units,
//!   which is built once per epoch. States contain the positions of the next windows, so resuming needs no table.
//!   Within a window, rows are permuted by a Fisher-Yates shuffle.
//! - *Buffer* and *block* order appear to depend on all earlier draws, but they don't. To seek, each row of the buffer
//!   is traced back, draw by draw, to its origin. This takes a few dozen times more draws than the buffer has rows (see
//!   `shuffle_pool.rs`).
//!
//! Draws are counter-based: each is a function of the seed, the epoch, its purpose and its index ([`fastpipe_random`]).
//! No stream of random numbers is shared, so the results don't depend on the sequence in which threads draw.
//!
//! ## Batches to ranks
//!
//! Each rank gets whole windows, so that it never decodes rows of another rank. With windows of `K` batches, rank `r`
//! of `N` gets at its step `s` batch `t = ((s / K) * N + r) * K + s % K`. When fewer windows than ranks are left, the
//! remaining batches are assigned one by one, so that all ranks get equal numbers. Sequential order is divided in the
//! same way, into ranges as long as a window. If the number of ranks changes, the remaining batches of partially read
//! windows are assigned first (see `rank_shards.rs`). In block and buffer order, each rank has separate units instead,
//! and the number of ranks can't change within an epoch.
//!
//! An order may leave out steps. Every rank then goes past the same steps without planning them, so all other batches
//! keep their rows. [`State::step`] counts all steps; all other numbers of batches count the steps that remain.
//!
//! ## Batch plans
//!
//! A [`BatchPlan`] contains the positions of the rows, the units that are no longer needed, and the state after the
//! batch. The positions are [`Run`]s of consecutive rows in sequential order, and [`Picks`] of single rows in all other
//! orders.
#![forbid(unsafe_code)]

mod assignment;
mod composed;
mod counted;
mod cursor;
mod failure;
mod fisher_yates;
mod group_walker;
mod grouping;
mod left_out_steps;
mod mixture;
mod mixture_walker;
mod order;
mod packed;
mod packing;
mod permutation;
mod plan;
mod planning_memory;
mod rank_shards;
mod reservoir;
mod sample;
mod schedule;
mod sequential;
mod settings;
mod shuffle_pool;
mod state;
mod steps_per_rank;
mod units;
mod walker;
mod window;
mod without_units;

pub use assignment::{LONGEST_PERIOD, MOST_MEMBERS};
pub use cursor::{BatchPlan, Cursor};
pub use failure::PlanError;
pub use fastpipe_random::Key;
pub use fisher_yates::FisherYates;
pub use grouping::Grouping;
pub use left_out_steps::LeftOutSteps;
pub use mixture::{Mixture, MixtureError, Stop};
pub use order::Order;
pub use packing::{Packing, PackingError};
pub use permutation::Permutation;
pub use plan::{Content, Groups, Picks, Row, Run};
pub use rank_shards::{PartialChunk, Remaining};
pub use reservoir::Reservoir;
pub use sample::{Drawing, Drawn, Part, drawn_within};
pub use schedule::MOST_PHASES;
pub use settings::{Kind, Settings, SettingsError, ShardBy, Uneven};
pub use state::{State, StateError};
pub use units::{Units, UnitsError};
pub use window::Place;
pub use without_units::RemainingEpoch;
