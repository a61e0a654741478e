//! Implicit feedback as rows: what users have interacted with, and, anew each epoch, items that they have not.
#![forbid(unsafe_code)]

mod alias;
mod attempts;
mod candidates;
mod parallel;
mod positives;
mod rest;
mod sampler;
mod sampling;
mod seen;
mod shards;
mod source;
mod unit;

pub use candidates::{Request, sample_negatives, sample_unseen};
pub use positives::Positives;
pub use sampler::{DENSE, ROUNDS, Sampler};
pub use sampling::Sampling;
pub use shards::{Shard, is_full};
pub use source::{InteractionsSource, Place, SHARD_POSITIVES, Settings};
