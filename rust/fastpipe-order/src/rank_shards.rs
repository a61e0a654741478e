//! Assigns batches to ranks and steps.
//!
//! Batches are assigned in *chunks*, which have the same number of batches as a window. No rank therefore decodes rows
//! of another. In each round, every rank gets a chunk: at step `s`, rank `r` of `N` gets batch `t = ((s / K) * N + r) *
//! K + s % K`. When fewer chunks than ranks are left, the remaining batches are assigned one by one. All ranks
//! therefore have the same number of batches, except for fewer than `N` batches at the end.
//!
//! The set of assigned batches doesn't depend on the number of ranks, so a different number of ranks can continue. The
//! rest of each partial chunk is then assigned first, batch by batch. The earliest batches of all partial chunks come
//! first. Batches that can't be divided evenly are deferred to the end.

use std::collections::HashMap;

use crate::failure::{PlanError, Result, collected, copied, reserve};

/// A chunk that is partially assigned: its batches from `from` to the end are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartialChunk {
    /// Index of the chunk.
    pub chunk: u64,
    /// Index of its next batch within the chunk.
    pub from: u64,
}

/// The unassigned batches of an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// Partial chunks that are assigned first.
    pub partial: Vec<PartialChunk>,
    /// Partial chunks that are assigned last.
    pub deferred: Vec<PartialChunk>,
    /// The first untouched chunk. All chunks after it are also untouched.
    pub next: u64,
}

impl Remaining {
    /// Returns a copy, or an error if memory can't be allocated.
    pub(crate) fn copied(&self) -> Result<Remaining> {
        Ok(Remaining {
            partial: copied(&self.partial)?,
            deferred: copied(&self.deferred)?,
            next: self.next,
        })
    }
}

/// The batches of an epoch, or the remaining ones, and their assignment to ranks.
#[derive(Clone, Debug)]
pub(crate) struct RankShards {
    ranks: u64,
    /// Batches per chunk. The last chunk may have fewer.
    per_chunk: u64,
    /// Number of batches in the epoch.
    batches: u64,
    remaining: Remaining,
    /// Batches that are assigned first. Their number is a multiple of `ranks`.
    first: Vec<u64>,
    /// Rounds in which every rank gets a whole chunk.
    rounds: u64,
    /// Batches that are assigned last: first these chunks, which `deferred_batches` lists as batches, and then all
    /// batches after the rounds.
    deferred: Vec<PartialChunk>,
    deferred_batches: Vec<u64>,
}

impl RankShards {
    /// Assigns the batches of a whole epoch.
    pub(crate) fn whole(ranks: u64, per_chunk: u64, batches: u64) -> RankShards {
        let (ranks, per_chunk) = (ranks.max(1), per_chunk.max(1));
        RankShards {
            ranks,
            per_chunk,
            batches,
            remaining: Remaining::default(),
            first: Vec::new(),
            rounds: batches / ranks.saturating_mul(per_chunk),
            deferred: Vec::new(),
            deferred_batches: Vec::new(),
        }
    }

    /// Assigns the remaining batches of an epoch.
    pub(crate) fn new(ranks: u64, per_chunk: u64, batches: u64, remaining: Remaining) -> Result<RankShards> {
        let (ranks, per_chunk) = (ranks.max(1), per_chunk.max(1));
        let mut shards = RankShards {
            ranks,
            per_chunk,
            batches,
            first: Vec::new(),
            rounds: batches.saturating_sub(remaining.next.saturating_mul(per_chunk)) / ranks.saturating_mul(per_chunk),
            deferred: copied(&remaining.deferred)?,
            deferred_batches: Vec::new(),
            remaining,
        };
        shards.first = shards.interleaved()?;
        let even = shards.first.len() / ranks as usize * ranks as usize;
        let mut uneven = shards.chunks_of(&shards.first[even..])?;
        shards.first.truncate(even);
        reserve(&mut shards.deferred, uneven.len())?;
        shards.deferred.append(&mut uneven);
        shards.deferred_batches = collected(shards.deferred.iter().flat_map(|open| shards.batches_of(*open)))?;
        Ok(shards)
    }

    /// Returns the chunks of these batches in order of first appearance, each from its first listed batch on.
    fn chunks_of(&self, batches: &[u64]) -> Result<Vec<PartialChunk>> {
        let mut remaining: Vec<PartialChunk> = Vec::new();
        let mut places = HashMap::new();
        let refused = |_| PlanError::OutOfMemory {
            bytes: batches.len() * size_of::<(u64, usize)>(),
        };
        places
            .try_reserve(batches.len().min(self.remaining.partial.len()))
            .map_err(refused)?;
        for batch in batches {
            let (chunk, from) = (batch / self.per_chunk, batch % self.per_chunk);
            let place = *places.entry(chunk).or_insert(remaining.len());
            if let Some(open) = remaining.get_mut(place) {
                open.from = open.from.min(from);
            } else {
                reserve(&mut remaining, 1)?;
                remaining.push(PartialChunk { chunk, from });
            }
        }
        Ok(remaining)
    }

    /// Whether no batch was assigned before.
    pub(crate) fn is_whole(&self) -> bool {
        self.remaining == Remaining::default()
    }

    /// Returns the remaining batches of a partial chunk.
    fn batches_of(&self, open: PartialChunk) -> std::ops::Range<u64> {
        let start = open.chunk.saturating_mul(self.per_chunk);
        let end = start.saturating_add(self.per_chunk).min(self.batches);
        start.saturating_add(open.from).min(end)..end
    }

    /// Returns the batches of the partial chunks: first the next batch of each chunk, then the second one of each, and
    /// so on.
    fn interleaved(&self) -> Result<Vec<u64>> {
        let chunks = collected(self.remaining.partial.iter().map(|open| self.batches_of(*open)))?;
        let longest = chunks.iter().map(|c| c.end - c.start).max().unwrap_or(0);
        let nth = |n: u64| chunks.iter().map(move |c| c.start + n).zip(&chunks);
        collected((0..longest).flat_map(|n| {
            nth(n)
                .filter(|(batch, chunk)| *batch < chunk.end)
                .map(|(batch, _)| batch)
        }))
    }

    /// Returns the first batch after the rounds.
    fn rest(&self) -> u64 {
        let chunks = self.remaining.next.saturating_add(self.rounds * self.ranks);
        chunks.saturating_mul(self.per_chunk).min(self.batches)
    }

    /// Returns the number of steps in which every rank has a batch, and the number of batches left after them, which is
    /// less than the number of ranks.
    pub(crate) fn steps(&self) -> (u64, u64) {
        let last = self.deferred_batches.len() as u64 + (self.batches - self.rest());
        let even = self.first.len() as u64 / self.ranks + self.rounds * self.per_chunk;
        (even + last / self.ranks, last % self.ranks)
    }

    /// Returns the batch of a rank at a step, or `None` if the rank has no batch there.
    pub(crate) fn batch(&self, rank: u64, step: u64) -> Option<u64> {
        let first = self.first.len() as u64 / self.ranks;
        if step < first {
            return self.first.get((step * self.ranks + rank) as usize).copied();
        }
        let step = step - first;
        if step < self.rounds * self.per_chunk {
            let chunk = self.remaining.next + step / self.per_chunk * self.ranks + rank;
            return Some(chunk * self.per_chunk + step % self.per_chunk);
        }
        let place = (step - self.rounds * self.per_chunk)
            .saturating_mul(self.ranks)
            .saturating_add(rank);
        match self.deferred_batches.get(usize::try_from(place).unwrap_or(usize::MAX)) {
            Some(batch) => Some(*batch),
            None => {
                let batch = self.rest().saturating_add(place - self.deferred_batches.len() as u64);
                (batch < self.batches).then_some(batch)
            }
        }
    }

    /// Returns a compact form of a step for the same number of ranks: the remaining batches and the step within them.
    /// Finished rounds are omitted.
    pub(crate) fn at(&self, step: u64) -> Result<(Remaining, u64)> {
        let first = self.first.len() as u64 / self.ranks;
        if step < first {
            return Ok((self.remaining.copied()?, step));
        }
        let step = step - first;
        let rounds = (step / self.per_chunk).min(self.rounds);
        let remaining = Remaining {
            partial: Vec::new(),
            deferred: copied(&self.deferred)?,
            next: self.remaining.next + rounds * self.ranks,
        };
        Ok((remaining, step - rounds * self.per_chunk))
    }

    /// Returns the remaining batches after every rank has had `step` batches, for any number of ranks.
    pub(crate) fn remaining(&self, step: u64) -> Result<Remaining> {
        let done = usize::try_from(step.saturating_mul(self.ranks)).unwrap_or(usize::MAX);
        if done < self.first.len() || (step > 0 && done == self.first.len()) {
            let undone = self.first[done..].iter().chain(&self.deferred_batches).copied();
            return self.begun(undone, self.remaining.next);
        }
        let (remaining, step) = self.at(step)?;
        let shards = RankShards::new(self.ranks, self.per_chunk, self.batches, remaining)?;
        if shards.rounds > 0 {
            let started = if step > 0 {
                shards.remaining.next..shards.remaining.next + shards.ranks
            } else {
                0..0
            };
            let next = started.end.max(shards.remaining.next);
            let begun = started.flat_map(|chunk| shards.batches_of(PartialChunk { chunk, from: step }));
            return shards.begun(shards.deferred_batches.iter().copied().chain(begun), next);
        }
        let done = step.saturating_mul(shards.ranks);
        let deferred = shards
            .deferred_batches
            .iter()
            .skip(usize::try_from(done).unwrap_or(usize::MAX))
            .copied();
        let rest = (shards.rest() + done.saturating_sub(shards.deferred_batches.len() as u64)).min(shards.batches);
        let whole = rest.next_multiple_of(shards.per_chunk).min(shards.batches);
        shards.begun(deferred.chain(rest..whole), whole.div_ceil(shards.per_chunk))
    }

    /// Groups remaining batches, which reach to the ends of their chunks, into partial chunks.
    fn begun(&self, batches: impl Iterator<Item = u64>, next: u64) -> Result<Remaining> {
        let mut open: Vec<PartialChunk> = collected(batches.map(|batch| PartialChunk {
            chunk: batch / self.per_chunk,
            from: batch % self.per_chunk,
        }))?;
        open.sort_unstable();
        open.dedup_by_key(|open| open.chunk);
        Ok(Remaining {
            partial: open,
            deferred: Vec::new(),
            next,
        })
    }

    /// Whether `remaining` is valid for an epoch with these chunks.
    pub(crate) fn is_possible(remaining: &Remaining, per_chunk: u64, batches: u64) -> Result<bool> {
        let chunks = batches.div_ceil(per_chunk.max(1));
        let mut begun: Vec<u64> = collected(
            remaining
                .partial
                .iter()
                .chain(&remaining.deferred)
                .map(|open| open.chunk),
        )?;
        begun.sort_unstable();
        let once = begun.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = |open: &PartialChunk| open.from < per_chunk.min(batches - (open.chunk * per_chunk).min(batches));
        let before = begun.last().is_none_or(|&chunk| chunk < remaining.next);
        Ok(once
            && before
            && remaining.next <= chunks
            && remaining.partial.iter().chain(&remaining.deferred).all(inside))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The number of ranks changes at random steps. Every batch is assigned once, and all ranks get the same number
        /// of batches.
        #[test]
        fn every_batch_is_dealt_once(
            per_chunk in 1..7u64,
            batches in 0..120u64,
            worlds in proptest::collection::vec((1..10u64, 0..20u64), 1..8),
        ) {
            let mut remaining = Remaining::default();
            let mut seen = BTreeSet::new();
            for (i, (ranks, steps)) in worlds.iter().enumerate() {
                prop_assert_eq!(RankShards::is_possible(&remaining, per_chunk, batches), Ok(true));
                let shards = RankShards::new(*ranks, per_chunk, batches, remaining).unwrap();
                let (even, odd) = shards.steps();
                let last = i + 1 == worlds.len();
                let stop = if last { even } else { even.min(*steps) };
                let mut take = |shards: &RankShards, rank, step| {
                    let batch = shards.batch(rank, step).unwrap();
                    assert!(batch < batches);
                    assert!(seen.insert(batch), "batch {batch} is assigned twice");
                };
                for step in 0..stop {
                    // Shards that start at this step continue in the same way.
                    let (from, within) = shards.at(step).unwrap();
                    let again = RankShards::new(*ranks, per_chunk, batches, from).unwrap();
                    for rank in 0..*ranks {
                        prop_assert_eq!(again.batch(rank, within), shards.batch(rank, step));
                        take(&shards, rank, step);
                    }
                }
                if last {
                    (0..odd).for_each(|rank| take(&shards, rank, even));
                    prop_assert!((odd..*ranks).all(|rank| shards.batch(rank, even).is_none()));
                    prop_assert!((0..*ranks).all(|rank| shards.batch(rank, even + 1).is_none()));
                }
                remaining = shards.remaining(stop).unwrap();
                // The size of the state is bounded by the number of ranks.
                prop_assert!(remaining.partial.len() as u64 <= 10 + worlds.len() as u64 * 10);
            }
            prop_assert_eq!(seen.len() as u64, batches);
        }

        #[test]
        fn whole_rounds_follow_the_formula(per_chunk in 1..7u64, ranks in 1..6u64, rounds in 1..5u64) {
            let batches = per_chunk * ranks * rounds;
            let shards = RankShards::whole(ranks, per_chunk, batches);
            let of_all = RankShards::new(ranks, per_chunk, batches, Remaining::default()).unwrap();
            prop_assert_eq!(of_all.steps(), shards.steps());
            prop_assert_eq!(shards.steps(), (batches / ranks, 0));
            for step in 0..batches / ranks {
                for rank in 0..ranks {
                    let formula = ((step / per_chunk) * ranks + rank) * per_chunk + step % per_chunk;
                    prop_assert_eq!(shards.batch(rank, step), Some(formula));
                }
            }
        }
    }
}
