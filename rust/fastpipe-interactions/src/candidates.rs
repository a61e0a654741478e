//! Samples in one call: candidates that held-out items are ranked among, or all negatives of an epoch.

use fastpipe_batch::{Error, ErrorKind, Result};
use fastpipe_random::{Key, Purpose};

use crate::parallel::do_all;
use crate::positives::Positives;
use crate::sampler::Sampler;
use crate::shards::cut;

/// A user, and optionally a held-out item that counts as seen although it isn't among the user's positives.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Request {
    /// The user.
    pub user: u32,
    /// The held-out item.
    pub exclude: Option<u32>,
}

/// Number of requests in a task.
const AT_ONCE: usize = 16;

/// Approximate number of positives in a task.
const POSITIVES_AT_ONCE: u64 = 4096;

/// Draws items that users haven't seen. The number per request is the sampler's number of negatives. The items of
/// request `i` are stored in the `i`-th group of `out`. The result doesn't depend on the number of threads. `first` is
/// the number of the first request, which keys the draws.
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

/// Draws the negatives of all positives, in the order of the positives. They equal the negatives that an
/// [`InteractionsSource`](crate::InteractionsSource) yields in the epoch of the key. `out` must have exactly that size.
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

/// Returns the items with `exclude` inserted in order.
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
