//! Implicit feedback as rows: what users have interacted with, and, anew each epoch, items that they have not.
//!
//! # One page
//!
//! [`Positives`] are the items of each user, in 4 bytes each. A [`Sampler`] draws items that a user has not seen; it
//! says what is drawn where, which depends on the seed, the epoch and the position alone. An [`InteractionsSource`]
//! puts both together:
//!
//! ```text
//!             positives, by user                a shard, open                         rows
//!
//! shard 0     user 0   3 8 9              user 0   3 | 5 1 7 2                 0 3 1   0 5 0   0 1 0 ...
//!             user 1   2                  user 0   8 | 0 4 4 6      picked     1 6 0
//! shard 1     user 2   0 1 4 7 ...        user 0   9 | 7 2 1 1      ------>    0 8 1   ...
//!                                         user 1   2 | 8 6 0 3
//! ```
//!
//! - **A unit is a [`Shard`]**: consecutive users, none of whom is in two. To open one is to draw its negatives, so an
//!   epoch needs no more of them at once than its window does, and any batch can be made by itself.
//! - **Threads, ranks and cuts change nothing.** Draws are keyed by the position of the negative in the whole data, and
//!   no user's depend on another's. A part of the data draws what it draws in the whole, if it is told where it starts.
//! - **Exactly uniform.** The sampler's own page proves it; tests hold it against a naive one, draw by draw.
//! - **No more memory than it takes.** Open shards keep 2 bytes an item while that is enough, and rows get their types
//!   when they are copied to their batch, some hundred at a time, column by column.
//!
//! Before that, [`dense_ids`] gives ids dense numbers, [`to_csr`] brings interactions into rows by user, and [`Rows`]
//! leaves some out. [`sample_unseen`] draws what held-out items are ranked among, and [`sample_negatives`] an epoch's
//! negatives as one array.
#![forbid(unsafe_code)]

mod alias;
mod candidates;
mod csr;
mod dense_ids;
mod k_core;
mod parallel;
mod positives;
mod rejection;
mod sampler;
mod sampling;
mod seen;
mod shards;
mod source;
mod unit;
mod unseen;

pub use candidates::{Request, sample_negatives, sample_unseen};
pub use csr::{Csr, Interactions, Stays, Time, to_csr};
pub use dense_ids::{DenseIds, Id, dense_ids};
pub use k_core::Rows;
pub use positives::Positives;
pub use sampler::{DENSE, ROUNDS, Sampler};
pub use sampling::Sampling;
pub use shards::{Shard, is_full};
pub use source::{InteractionsSource, Place, SHARD_POSITIVES, Settings};
