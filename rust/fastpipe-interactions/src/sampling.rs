//! The state of a sampler while it draws. The module [`sampler`](crate::sampler) describes the scheme.

use fastpipe_batch::{Error, ErrorKind, Result};
use fastpipe_random::{Key, Purpose};

use crate::alias::Weights;
use crate::rejection::{Attempts, Proposal, Uniform};
use crate::sampler::{ROUNDS, Sampler};
use crate::seen::Seen;
use crate::unseen::Unseen;

/// A sampler with its working memory, which is reused for each user.
#[derive(Debug)]
pub struct Sampling<'s> {
    sampler: &'s Sampler,
    attempts: Attempts,
    seen: Seen,
    unseen: Unseen,
    /// Indices of the draws whose first attempt was rejected.
    rejected: Vec<u32>,
    /// The changes to undo after a positive: items that were marked, or steps of a shuffle.
    undo: Vec<u32>,
}

/// Draws items by weight.
#[derive(Clone, Copy)]
struct Weighted<'a> {
    weights: &'a Weights,
    seen: &'a [u32],
    /// Whether an item may be drawn again.
    repeats: bool,
}

impl Proposal for Weighted<'_> {
    const PER_WORD: usize = 1;
    type Spent = u64;

    #[inline(always)]
    fn item(&self, bits: u64) -> (u32, bool) {
        (self.weights.item(bits), true)
    }

    fn spent(&self, round: u64, words: &[u64; 4]) -> Option<u64> {
        (round > ROUNDS).then_some(words[0])
    }

    fn last(&self, word: u64, unseen: &mut Unseen, drawn: impl Fn(u32) -> bool) -> u32 {
        unseen.list(self.seen, self.weights.len() as u32);
        match self.repeats {
            true => unseen.weigh(self.weights, word),
            false => unseen.weigh_without(self.weights, word, drawn),
        }
    }
}

impl Sampler {
    /// Creates the state for draws with a key.
    pub fn start(&self, key: Key, purpose: Purpose) -> Sampling<'_> {
        Sampling::new(self, key, purpose)
    }
}

impl<'s> Sampling<'s> {
    fn new(sampler: &'s Sampler, key: Key, purpose: Purpose) -> Sampling<'s> {
        Sampling {
            sampler,
            attempts: Attempts::new(key, purpose),
            seen: Seen::default(),
            unseen: Unseen::default(),
            rejected: Vec::new(),
            undo: Vec::new(),
        }
    }

    /// Draws items for the positions from `first` on, for a user who has seen the items `seen`. They are grouped by
    /// positive; a group has the sampler's number of negatives. `seen` must ascend, without duplicates.
    ///
    /// Returns an error if there are too few unseen items.
    pub fn draw(&mut self, seen: &[u32], first: u64, out: &mut [u32]) -> Result<()> {
        let sampler = self.sampler;
        let (left, needed) = (sampler.left(seen), sampler.needed());
        if left < needed {
            let reason = format!("{needed} unseen items are needed, but the user has only {left}");
            return Err(Error::new(ErrorKind::ValueRange, reason));
        }
        if needed == 0 || out.is_empty() {
            return Ok(());
        }
        self.unseen.clear();
        match sampler.weights() {
            Some(weights) => {
                let repeats = sampler.repeats();
                self.by_rejection(Weighted { weights, seen, repeats }, seen, first, out);
            }
            None if sampler.is_listed(seen.len()) => self.by_rank(seen, first, out),
            None => self.by_rejection(Uniform::below(sampler.num_items()), seen, first, out),
        }
        Ok(())
    }

    /// Draws from all items until the item is unseen.
    #[inline(always)]
    fn by_rejection<P: Proposal>(&mut self, proposal: P, items: &[u32], first: u64, out: &mut [u32]) {
        let sampler = self.sampler;
        let (attempts, seen, rejected) = (&mut self.attempts, &mut self.seen, &mut self.rejected);
        seen.resize(items.len() + sampler.needed() as usize, sampler.num_items());
        items.iter().for_each(|&item| {
            seen.insert(item);
        });
        let exact = seen.is_exact();
        let is_new = |item| !seen.may_have(item) || !(exact || items.binary_search(&item).is_ok());
        if exact {
            attempts.first(proposal, first, out, rejected, |item| (item, !seen.may_have(item)));
        } else {
            attempts.first(proposal, first, out, rejected, |item| (item, is_new(item)));
        }
        if sampler.repeats() {
            attempts.again(proposal, first, rejected, is_new, |i, found| {
                out[i as usize] = found.unwrap_or_else(|spent| proposal.last(spent, &mut self.unseen, |_| false));
            });
        } else {
            self.make_distinct(proposal, items, first, out);
        }
        items.iter().for_each(|&item| self.seen.clear(item));
    }

    /// Checks the first attempts in order. Draws again if one was rejected, or repeats an item of the same positive.
    fn make_distinct<P: Proposal>(&mut self, proposal: P, items: &[u32], first: u64, out: &mut [u32]) {
        let negatives = self.sampler.negatives() as usize;
        let (attempts, seen) = (&self.attempts, &mut self.seen);
        let exact = seen.is_exact();
        let mut rejected = self.rejected.iter().peekable();
        for (from, group) in (0..).step_by(negatives).zip(out.chunks_mut(negatives)) {
            for k in 0..group.len() {
                let (before, behind) = group.split_at_mut(k);
                let i: usize = from + k;
                let has = |item| {
                    seen.may_have(item) && (exact || before.contains(&item) || items.binary_search(&item).is_ok())
                };
                let item = &mut behind[0];
                if rejected.next_if(|next| **next as usize == i).is_some() || has(*item) {
                    let found = attempts.later(proposal, first + i as u64, 1, &|item| !has(item));
                    *item = found.unwrap_or_else(|spent| proposal.last(spent, &mut self.unseen, has));
                }
                if seen.insert(*item) {
                    self.undo.push(*item);
                }
            }
            self.undo.drain(..).for_each(|item| seen.clear(item));
        }
    }

    /// Draws from a list of the unseen items.
    fn by_rank(&mut self, items: &[u32], first: u64, out: &mut [u32]) {
        let sampler = self.sampler;
        let (attempts, rejected) = (&mut self.attempts, &mut self.rejected);
        let list = self.unseen.list(items, sampler.num_items());
        let count = list.len() as u32;
        if sampler.repeats() {
            let any = Uniform::below(count);
            attempts.first(any, first, out, rejected, |rank| (list[rank as usize], true));
            attempts.again(
                any,
                first,
                rejected,
                |_| true,
                |i, found| {
                    let Ok(rank) = found;
                    out[i as usize] = list[rank as usize];
                },
            );
            return;
        }
        let negatives = sampler.negatives() as usize;
        for (from, group) in (first..).step_by(negatives).zip(out.chunks_mut(negatives)) {
            for (k, item) in (0..).zip(group) {
                let other = k + attempts.below(from + u64::from(k), count - k);
                list.swap(k as usize, other as usize);
                *item = list[k as usize];
                self.undo.push(other);
            }
            while let Some(other) = self.undo.pop() {
                list.swap(self.undo.len(), other as usize);
            }
        }
    }
}
