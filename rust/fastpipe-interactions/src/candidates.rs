//! Sampling for calls that want all of it at once: items to rank held-out ones among, or the negatives of an epoch.

use fastpipe_batch::{Error, ErrorKind, Result};
use fastpipe_random::{Key, Purpose};

use crate::parallel::do_all;
use crate::positives::Positives;
use crate::sampler::Sampler;
use crate::shards::cut;

/// A user, and an item that counts as seen though it isn't among the user's positives: the one that was held out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The user.
    pub user: u32,
    /// The item.
    pub exclude: Option<u32>,
}

/// Requests that a thread takes at once.
const AT_ONCE: usize = 16;

/// Positives of users that a thread takes at once, about.
const POSITIVES_AT_ONCE: u64 = 4096;

/// Draws items that users haven't seen, as many for each request as the sampler draws for a positive: of request `i` to
/// the `i`-th stretch of `out`, the same for whatever number of threads. `first` is the number of the first request, by
/// which draws are keyed.
pub fn sample_unseen(
    positives: &Positives,
    sampler: &Sampler,
    requests: &[Request],
    (seed, first): (u64, u64),
    threads: usize,
    out: &mut [u32],
) -> Result<()> {
    let negatives = (sampler.negatives() as usize).max(1);
    let tasks = requests.chunks(AT_ONCE).zip(out.chunks_mut(AT_ONCE * negatives));
    let start = || (sampler.start(Key { seed, epoch: 0 }, Purpose::Candidates), Vec::new());
    do_all(
        tasks.collect(),
        threads,
        start,
        |(sampling, seen), task, (requests, out)| {
            for (i, (request, out)) in (0..).zip(requests.iter().zip(out.chunks_mut(negatives))) {
                let number = first.wrapping_add((task * AT_ONCE + i) as u64);
                let items = with(positives.of(request.user), request.exclude, seen);
                let drawn = sampling.draw(items, number.wrapping_mul(negatives as u64), out);
                drawn.map_err(|error| of_user(request.user, &error))?;
            }
            Ok(())
        },
    )
}

/// Draws the negatives of all positives: what rows of an [`InteractionsSource`](crate::InteractionsSource) of them hold
/// in the epoch of the key, in the order of the positives. `out` has room for as many.
pub fn sample_negatives(
    positives: &Positives,
    sampler: &Sampler,
    (key, first_positive): (Key, u64),
    threads: usize,
    out: &mut [u32],
) -> Result<()> {
    let negatives = sampler.negatives() as usize;
    if positives.len().checked_mul(negatives) != Some(out.len()) {
        let (found, positives) = (out.len(), positives.len());
        let reason =
            format!("expected room for {negatives} negatives for each of {positives} positives, found {found}");
        return Err(Error::new(ErrorKind::Shape, reason));
    }
    let mut left = out;
    let mut tasks = Vec::new();
    for shard in cut(positives, sampler, POSITIVES_AT_ONCE)? {
        let users = shard.first_user..shard.end_user;
        let count = users.clone().map(|user| positives.of(user).len()).sum::<usize>();
        let (here, behind) = left.split_at_mut(count * negatives);
        left = behind;
        tasks.push((users, here));
    }
    let start = || sampler.start(key, Purpose::Negatives);
    do_all(tasks, threads, start, |sampling, _, (users, out)| {
        let mut left = out;
        for user in users {
            let (items, range) = (positives.of(user), positives.range(user));
            let (here, behind) = left.split_at_mut(items.len() * negatives);
            left = behind;
            let first = first_positive.wrapping_add(range.start as u64);
            let drawn = match items {
                [] => Ok(()),
                items => sampling.draw(items, first.wrapping_mul(negatives as u64), here),
            };
            drawn.map_err(|error| of_user(user, &error))?;
        }
        Ok(())
    })
}

#[cold]
pub(crate) fn of_user(user: u32, error: &Error) -> Error {
    Error::new(error.kind(), format!("user {user}: {}", error.reason()))
}

/// Items with one more, in their order.
fn with<'a>(items: &'a [u32], exclude: Option<u32>, seen: &'a mut Vec<u32>) -> &'a [u32] {
    match exclude.map(|item| (item, items.binary_search(&item))) {
        Some((item, Err(at))) => {
            seen.clear();
            seen.extend_from_slice(&items[..at]);
            seen.push(item);
            seen.extend_from_slice(&items[at..]);
            seen
        }
        _ => items,
    }
}
