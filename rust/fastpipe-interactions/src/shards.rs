//! Shards: the units of sampling.

use fastpipe_batch::{Result, try_reserve};

use crate::positives::Positives;
use crate::sampler::Sampler;

/// Maximum number of users in a shard: the users of a shard are counted in 16 bits.
const MOST_USERS: u32 = 1 << 16;

/// Consecutive users. Each user is in exactly one shard.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Shard {
    /// The first user.
    pub first_user: u32,
    /// The user after the last one.
    pub end_user: u32,
    /// Number of the users' positives, without users who are left out.
    pub positives: u64,
}

/// Splits users into shards. A shard has at least one user, and further users while they have at most `most` positives
/// together. Users for whom the sampler has too few items count as having no positives.
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

/// Whether a user has positives, but too few other items to draw negatives from.
pub fn is_full(positives: &Positives, sampler: &Sampler, user: u32) -> bool {
    let items = positives.of(user);
    !items.is_empty() && sampler.left(items) < sampler.needed()
}
