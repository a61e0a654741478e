//! The random words of a position, attempt by attempt. The module [`sampler`](crate::sampler) describes the scheme.

use std::convert::Infallible;

use fastpipe_random::{AT_ONCE, Blocks, Draws, Key, LANES, Purpose};

use crate::unseen::Unseen;

/// Maps random bits to items.
pub(crate) trait Proposal: Copy {
    /// Number of attempts that one word has enough bits for.
    const PER_WORD: usize;

    /// The data for the last draw, after the attempts are exhausted.
    type Spent;

    /// Returns `Some` if no attempt is made with the words of a round.
    fn spent(&self, round: u64, words: &[u64; 4]) -> Option<Self::Spent>;

    /// Draws after the attempts are exhausted: one of `unseen`, except the items that are `drawn`.
    fn last(&self, spent: Self::Spent, unseen: &mut Unseen, drawn: impl Fn(u32) -> bool) -> u32;

    /// Returns the item that the lower bits of a word map to, and whether the attempt is valid.
    fn item(&self, bits: u64) -> (u32, bool);

    /// Returns the first acceptable item that the words of one position map to.
    #[inline(always)]
    fn first(&self, words: [u64; 4], will_do: &impl Fn(u32) -> bool) -> Option<u32> {
        for word in words {
            for part in 0..Self::PER_WORD {
                let (item, counts) = self.item(word >> (64 / Self::PER_WORD * part));
                if counts && will_do(item) {
                    return Some(item);
                }
            }
        }
        None
    }
}

/// Draws numbers below a count with equal probability.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Uniform {
    count: u32,
    /// 2^32 modulo the count.
    excess: u32,
}

impl Uniform {
    #[inline(always)]
    pub(crate) fn below(count: u32) -> Uniform {
        let excess = count.wrapping_neg() % count;
        Uniform { count, excess }
    }
}

impl Proposal for Uniform {
    const PER_WORD: usize = 2;
    /// Attempts continue until one succeeds. At least 7 of 16 do.
    type Spent = Infallible;

    fn spent(&self, _round: u64, _words: &[u64; 4]) -> Option<Infallible> {
        None
    }

    fn last(&self, spent: Infallible, _rest: &mut Unseen, _drawn: impl Fn(u32) -> bool) -> u32 {
        match spent {}
    }

    #[inline(always)]
    fn item(&self, bits: u64) -> (u32, bool) {
        let product = u64::from(bits as u32) * u64::from(self.count);
        ((product >> 32) as u32, product as u32 >= self.excess)
    }
}

/// The random words of all positions.
#[derive(Debug)]
pub(crate) struct Attempts {
    key: Key,
    purpose: Purpose,
    first: Blocks,
    second: Blocks,
    /// The current block of words for first attempts, and the index of its first word.
    words: [u64; AT_ONCE as usize],
    from: Option<u64>,
}

impl Attempts {
    pub(crate) fn new(key: Key, purpose: Purpose) -> Attempts {
        Attempts {
            key,
            purpose,
            first: Draws::new(key, purpose, 0).blocks(),
            second: Draws::new(key, purpose, 1).blocks(),
            words: [0; AT_ONCE as usize],
            from: None,
        }
    }

    /// Returns words of first attempts, and the index of word `word` among them.
    #[inline(always)]
    fn words(&mut self, word: u64) -> (&[u64; AT_ONCE as usize], usize) {
        let from = match self.from {
            Some(from) if word.wrapping_sub(from) < AT_ONCE => from,
            _ => {
                let from = word / 4 * 4;
                self.words = self.first.words(from);
                self.from = Some(from);
                from
            }
        };
        (&self.words, (word - from) as usize)
    }

    /// Makes the first attempt at each position from `position` on, and records the positions that are rejected.
    #[inline(always)]
    pub(crate) fn first<P: Proposal>(
        &mut self,
        proposal: P,
        position: u64,
        out: &mut [u32],
        rejected: &mut Vec<u32>,
        take: impl Fn(u32) -> (u32, bool),
    ) {
        if rejected.len() < out.len() {
            rejected.resize(out.len(), 0);
        }
        let per_word = P::PER_WORD;
        let (mut done, mut count) = (0, 0);
        while done < out.len() {
            let at = position + done as u64;
            let (words, skip) = self.words(at / per_word as u64);
            let start = skip * per_word + (at % per_word as u64) as usize;
            let some = (AT_ONCE as usize * per_word - start).min(out.len() - done);
            for (k, slot) in out[done..done + some].iter_mut().enumerate() {
                let i = start + k;
                let word = words[i / per_word % AT_ONCE as usize];
                let (number, counts) = proposal.item(word >> (64 / per_word * (i % per_word)));
                let (item, will_do) = take(number);
                *slot = item;
                // Most attempts succeed, but which ones is unpredictable. So this code has no branch.
                rejected[count] = (done + k) as u32;
                count += usize::from(!(counts & will_do));
            }
            done += some;
        }
        rejected.truncate(count);
    }

    /// Makes further attempts at the positions that the first attempt rejected.
    #[inline(always)]
    pub(crate) fn again<P: Proposal>(
        &self,
        proposal: P,
        position: u64,
        rejected: &[u32],
        will_do: impl Fn(u32) -> bool,
        mut found: impl FnMut(u32, Result<u32, P::Spent>),
    ) {
        for some in rejected.chunks(LANES) {
            let blocks = std::array::from_fn(|lane| position + u64::from(some[lane.min(some.len() - 1)]));
            let words: [_; LANES] = self.second.at(blocks);
            for (&i, words) in some.iter().zip(words) {
                let item = match proposal.first(words, &will_do) {
                    Some(item) => Ok(item),
                    None => self.later(proposal, position + u64::from(i), 2, &will_do),
                };
                found(i, item);
            }
        }
    }

    /// Makes further attempts at a position, starting from a round.
    pub(crate) fn later<P: Proposal>(
        &self,
        proposal: P,
        position: u64,
        round: u64,
        will_do: &impl Fn(u32) -> bool,
    ) -> Result<u32, P::Spent> {
        let mut round = round;
        loop {
            let [words] = Draws::new(self.key, self.purpose, round).blocks().at([position]);
            if let Some(spent) = proposal.spent(round, &words) {
                return Err(spent);
            }
            if let Some(item) = proposal.first(words, will_do) {
                return Ok(item);
            }
            round += 1;
        }
    }

    /// Returns a number below a count. The count may differ between positions.
    #[inline(always)]
    pub(crate) fn below(&mut self, position: u64, count: u32) -> u32 {
        let (words, skip) = self.words(position / 2);
        let product = u64::from((words[skip % AT_ONCE as usize] >> (position % 2 * 32)) as u32) * u64::from(count);
        // A division is needed to decide whether the attempt is valid, but only rarely.
        if (product as u32) < count {
            let uniform = Uniform::below(count);
            if (product as u32) < uniform.excess {
                let Ok(number) = self.later(uniform, position, 1, &|_| true);
                return number;
            }
        }
        (product >> 32) as u32
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The same number of halves of words maps to each number.
    #[test]
    fn random_numbers_are_exactly_uniform() {
        for count in [1, 2, 3, 7, 1000, 26_744, 65_537, 1 << 20, 0x5555_5556, i32::MAX as u32] {
            let uniform = Uniform::below(count);
            let first = |number: u64| (number << 32).div_ceil(u64::from(count));
            let numbers = [0, 1, count / 3, count / 2, count.wrapping_sub(2), count - 1];
            for number in numbers.into_iter().filter(|number| *number < count) {
                let halves = first(u64::from(number))..first(u64::from(number) + 1);
                // Only the first half may be invalid. Checking every half would take too long.
                let (start, end) = (halves.start, halves.end);
                let seen = (start..end.min(start + 3)).filter(|half| uniform.item(*half).1).count() as u64;
                let all = seen + end.saturating_sub(start + 3);
                assert_eq!(all, (1 << 32) / u64::from(count), "{number} of {count}");
                assert!(end == start || uniform.item(start).0 == number && uniform.item(end - 1).0 == number);
            }
        }
    }
}
