//! Items to rank a held-out one among.

use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

use fastpipe_batch::{Error, Result};
use fastpipe_random::{Key, Purpose};

use crate::positives::Positives;
use crate::sampler::Sampler;

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

/// Draws items that users haven't seen, as many for each request as the sampler draws for a positive: of request `i` to the
/// `i`-th stretch of `out`, the same for whatever number of threads. `first` is the number of the first request, by which
/// draws are keyed.
pub fn sample_unseen(
    positives: &Positives,
    sampler: &Sampler,
    requests: &[Request],
    (seed, first): (u64, u64),
    threads: usize,
    out: &mut [u32],
) -> Result<()> {
    let negatives = (sampler.negatives() as usize).max(1);
    let tasks: Vec<_> = requests
        .chunks(AT_ONCE)
        .zip(out.chunks_mut(AT_ONCE * negatives))
        .collect();
    let tasks: Vec<_> = tasks.into_iter().map(|task| Mutex::new(Some(task))).collect();
    let next = AtomicUsize::new(0);
    // Of the earliest request.
    let failed: Mutex<Option<(u64, Error)>> = Mutex::default();
    let work = || {
        let mut sampling = sampler.start(Key { seed, epoch: 0 }, Purpose::Candidates);
        let mut seen = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(task) = tasks.get(at) else { return };
            let Some((requests, out)) = task.lock().unwrap_or_else(PoisonError::into_inner).take() else {
                continue;
            };
            for (i, (request, out)) in (0..).zip(requests.iter().zip(out.chunks_mut(negatives))) {
                let number = first.wrapping_add((at * AT_ONCE + i) as u64);
                let items = with(positives.of(request.user), request.exclude, &mut seen);
                if let Err(error) = sampling.draw(items, number.wrapping_mul(negatives as u64), out) {
                    let error = Error::new(error.kind(), format!("user {}: {}", request.user, error.reason()));
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(earlier, _)| number < *earlier) {
                        *failed = Some((number, error));
                    }
                    // Those in front of it are under way already.
                    next.store(tasks.len(), Ordering::Relaxed);
                    return;
                }
            }
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads.min(tasks.len()) {
            // Where no thread can be started, fewer do the work.
            let builder = std::thread::Builder::new().name("fastpipe-sampler".into());
            if builder.spawn_scoped(scope, work).is_err() {
                break;
            }
        }
        work();
    });
    match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
        Some((_, error)) => Err(error),
        None => Ok(()),
    }
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
