//! Shards: what is sampled at once.

use fastpipe_batch::{Result, try_reserve};

use crate::positives::Positives;
use crate::sampler::Sampler;

/// Users of a shard at most: within it they are counted in 16 bits.
const MOST_USERS: u32 = 1 << 16;

/// Consecutive users, none of whom is in another shard too.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The first of them.
    pub first_user: u32,
    /// The user behind the last.
    pub end_user: u32,
    /// Their positives, without those of users who are left out.
    pub positives: u64,
}

/// Cuts users into shards: each has users as long as they have at most `most` positives together, and at least one
/// user. Users for whom the sampler has too few items count as if they had no positives.
pub(crate) fn cut(positives: &Positives, sampler: &Sampler, most: u64) -> Result<Vec<Shard>> {
    let mut shards: Vec<Shard> = Vec::new();
    for user in 0..positives.users() {
        let count = if is_full(positives, sampler, user) {
            0
        } else {
            positives.of(user).len() as u64
        };
        match shards.last_mut() {
            Some(shard) if shard.positives + count <= most && user - shard.first_user < MOST_USERS => {
                shard.end_user = user + 1;
                shard.positives += count;
            }
            _ => {
                try_reserve(&mut shards, 1, "shards")?;
                shards.push(Shard {
                    first_user: user,
                    end_user: user + 1,
                    positives: count,
                });
            }
        }
    }
    Ok(shards)
}

/// Whether a user has positives, and too few items besides to draw negatives from.
pub fn is_full(positives: &Positives, sampler: &Sampler, user: u32) -> bool {
    let items = positives.of(user);
    !items.is_empty() && sampler.left(items) < sampler.needed()
}
