//! Which rank gets which batch, and when.
//!
//! Batches are dealt in *chunks* of as many batches as a window has, so that no rank decodes another's rows. In a round
//! each rank gets a chunk: at step `s` rank `r` of `N` gets batch `t = ((s / K) * N + r) * K + s % K`. What is left
//! when no round can be filled any more is dealt batch by batch. So all ranks have the same number of batches, but for
//! fewer than `N` at the end.
//!
//! What was dealt and what wasn't doesn't depend on the number of ranks, so another number of them can go on: the rest
//! of the chunks that were begun is dealt first, batch by batch, the earliest batches of all of them before the next
//! ones; what remains of that when it can't be shared out evenly is put to the end.

use std::collections::HashMap;

use crate::failure::{PlanError, Result, collected, copied, reserve};

/// A chunk of which some batches are not dealt: from `from` to its last.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PartialChunk {
    /// The chunk.
    pub chunk: u64,
    /// Its next batch.
    pub from: u64,
}

/// What is not dealt in an epoch.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Remaining {
    /// Chunks that were begun and are dealt first.
    pub partial: Vec<PartialChunk>,
    /// Chunks that were begun and are dealt last.
    pub deferred: Vec<PartialChunk>,
    /// The first chunk that wasn't begun; none of those behind it was.
    pub next: u64,
}

impl Remaining {
    /// The same, in other memory.
    pub(crate) fn copied(&self) -> Result<Remaining> {
        Ok(Remaining {
            partial: copied(&self.partial)?,
            deferred: copied(&self.deferred)?,
            next: self.next,
        })
    }
}

/// The batches of an epoch, or what is left of them, dealt to ranks.
#[derive(Clone, Debug)]
pub(crate) struct RankShards {
    ranks: u64,
    /// Batches of a chunk; the last chunk may have fewer.
    per_chunk: u64,
    /// Batches of the epoch.
    batches: u64,
    remaining: Remaining,
    /// Batches that are dealt first: a multiple of `ranks`.
    first: Vec<u64>,
    /// Chunks of which every rank gets one.
    rounds: u64,
    /// What is dealt last: these chunks, as batches, and then all batches behind the rounds.
    deferred: Vec<PartialChunk>,
    deferred_batches: Vec<u64>,
}

impl RankShards {
    /// The batches of a whole epoch.
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

    /// What is left of an epoch.
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

    /// The chunks of these batches, in the order in which they come first, each from the first of its batches.
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

    /// Whether nothing was dealt before.
    pub(crate) fn is_whole(&self) -> bool {
        self.remaining == Remaining::default()
    }

    /// The batches of a chunk from one on.
    fn batches_of(&self, open: PartialChunk) -> std::ops::Range<u64> {
        let start = open.chunk.saturating_mul(self.per_chunk);
        let end = start.saturating_add(self.per_chunk).min(self.batches);
        start.saturating_add(open.from).min(end)..end
    }

    /// The batches of open chunks: the next of each, then the ones behind those.
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

    /// The first batch behind the rounds.
    fn rest(&self) -> u64 {
        let chunks = self.remaining.next.saturating_add(self.rounds * self.ranks);
        chunks.saturating_mul(self.per_chunk).min(self.batches)
    }

    /// Steps of which every rank has a batch, and how many batches are left then: fewer than there are ranks.
    pub(crate) fn steps(&self) -> (u64, u64) {
        let last = self.deferred_batches.len() as u64 + (self.batches - self.rest());
        let even = self.first.len() as u64 / self.ranks + self.rounds * self.per_chunk;
        (even + last / self.ranks, last % self.ranks)
    }

    /// The batch of a rank at a step; `None` if there is none left for it.
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

    /// Where a step stands: what is dealt to as many ranks, and the step there. Small: finished rounds are
    /// left out.
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

    /// What is left when every rank has had `step` batches, for any number of ranks to share.
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

    /// Chunks of which these batches are left, to their ends.
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

    /// Whether `remaining` may be what is left of an epoch with these chunks.
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
        /// Any number of ranks, changed at any steps: every batch once, and all ranks equally many.
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
                    assert!(seen.insert(batch), "batch {batch} is dealt twice");
                };
                for step in 0..stop {
                    // Shards that start here go on alike.
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
                // What is stored is as small as the number of ranks.
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
