//! Implicit feedback as rows: the items that users have interacted with, and sampled items that they haven't seen. The
//! sample changes each epoch.
//!
//! # Overview
//!
//! [`Positives`] contain the items of each user, in 4 bytes each. A [`Sampler`] draws items that a user has not seen.
//! Each draw depends only on the seed, the epoch and the position. An [`InteractionsSource`] combines both:
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
//! - **A unit is a [`Shard`]**: consecutive users. Each user is in exactly one shard. Opening a shard draws its
//!   negatives. So an epoch holds only the negatives of its current window, and any batch can be made independently.
//! - **Threads, ranks and cuts change nothing.** Draws are keyed by the position of the negative in the whole data, and
//!   no user's draws depend on other users. A part of the data draws the same as the whole, given its first position.
//! - **Exactly uniform.** The module `sampler` proves it. Tests compare the sampler with a naive one, draw by draw.
//! - **Compact.** Open shards take 2 bytes per item while the item fits. Rows get their types when they are copied to
//!   their batch, a few hundred at a time, column by column.
//!
//! Before that, [`dense_ids`] maps ids to dense numbers, [`to_csr`] sorts interactions into rows by user, and [`Rows`]
//! leaves out positives. [`sample_unseen`] draws the candidates that held-out items are ranked among, and
//! [`sample_negatives`] draws an epoch's negatives as one array.
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
