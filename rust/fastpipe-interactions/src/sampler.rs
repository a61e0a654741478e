//! Items that a user has not seen.
//!
//! # The scheme
//!
//! The `k`-th negative of positive `p` stands at position `p * negatives + k`. What is drawn there depends on the seed,
//! the epoch, that position, and which items the user has seen, and on nothing else: neither on other users, nor on who
//! draws first. First attempts at neighbouring positions share the words of [`Draws`], of which most are used. Where
//! one is rejected, the next ones come from words of the position's own, eight or four at once:
//!
//! | attempts | stream | words |
//! |---|---|---|
//! | first | 0 | the bits at `position`: halves of words, the lower first; whole words where items have weights |
//! | next 8 (4) | 1 | block `position` |
//! | next 8 (4) | 2 | block `position`, and so on |
//!
//! **Uniform** (exactly: no item is more frequent than another by any amount). A half `h` stands for `h * n / 2^32` of
//! `n` things; it is rejected if the lower half of the product is below `2^32 mod n` (Lemire: "Fast random integer
//! generation in an interval", ACM Transactions on Modeling and Computer Simulation 29, 2019). A user who has seen `s`
//! of `i` items draws
//!
//! - *by rejection*, if `s <= i / 8`: an item of all, until it is one that isn't seen;
//! - *by rank*, else: one of the items that aren't seen, which are listed for that.
//!
//! Without repeats the `n` negatives of one positive are distinct, which is the same as drawing them one after the
//! other from what is left. With `s + n <= i / 8` they are rejected like items that are seen; else they are taken from
//! the list, by the first `n` steps of a Fisher-Yates shuffle of it, which are undone for the next positive.
//!
//! **By weight.** A word stands for an item by an alias table, and is rejected if that is seen, or drawn already. After
//! [`ROUNDS`] rounds of words of its own a position draws from the sums of the weights of all that is left to draw,
//! with the first word of the next round. So those who have seen almost all of the weight don't take for ever; and it
//! changes no probability, since rejections say nothing of what comes next.
//!
//! Files are in training somewhere, so the scheme doesn't change; golden tests pin it.

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::alias::Weights;

/// Items are listed for users who have seen more than one in that many.
pub const DENSE: u64 = 8;

/// Rounds of attempts with words of a position's own before all that can be drawn is weighed.
pub const ROUNDS: u64 = 3;

/// Negatives of a positive at most.
const MOST_NEGATIVES: u32 = i32::MAX as u32 - 1;

/// How negatives are drawn.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    num_items: u32,
    negatives: u32,
    repeats: bool,
    weights: Option<Weights>,
}

impl Sampler {
    /// Draws `negatives` of `num_items` items for each positive: with the same probability each or, if there are
    /// `weights`, in proportion to them; with `repeats`, each independently.
    pub fn new(num_items: u32, negatives: u32, repeats: bool, weights: Option<&[f64]>) -> Result<Sampler> {
        if negatives > MOST_NEGATIVES {
            let reason = format!("expected at most {MOST_NEGATIVES} negatives for each positive, found {negatives}");
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        Ok(Sampler {
            num_items,
            negatives,
            repeats,
            weights: weights.map(|weights| Weights::new(weights, num_items)).transpose()?,
        })
    }

    /// Negatives of each positive.
    pub fn negatives(&self) -> u32 {
        self.negatives
    }

    pub(crate) fn num_items(&self) -> u32 {
        self.num_items
    }

    pub(crate) fn repeats(&self) -> bool {
        self.repeats
    }

    pub(crate) fn weights(&self) -> Option<&Weights> {
        self.weights.as_ref()
    }

    /// Whether what isn't seen is listed for users who have seen this many items.
    pub(crate) fn is_listed(&self, seen: usize) -> bool {
        let besides = if self.repeats { 0 } else { u64::from(self.negatives) };
        (seen as u64 + besides) * DENSE > u64::from(self.num_items)
    }

    /// How many items can be drawn for a user who has seen these.
    pub fn left(&self, seen: &[u32]) -> u32 {
        match &self.weights {
            None => self.num_items - seen.len() as u32,
            Some(weights) if weights.positive() as usize == weights.len() => self.num_items - seen.len() as u32,
            Some(weights) => weights.positive() - seen.iter().filter(|item| weights.of(**item) > 0.0).count() as u32,
        }
    }

    /// How many there must be of them.
    pub fn needed(&self) -> u32 {
        match (self.negatives, self.repeats) {
            (0, _) => 0,
            (_, true) => 1,
            (negatives, false) => negatives,
        }
    }
}
