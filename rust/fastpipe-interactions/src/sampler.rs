//! Draws items that a user has not seen.
//!
//! # The scheme
//!
//! The `k`-th negative of positive `p` has position `p * negatives + k`. The draw at a position depends only on the
//! seed, the epoch, the position, and the items that the user has seen. It doesn't depend on other users, or on the
//! sequence of draws. First attempts at neighboring positions share the words of [`Draws`], most of which are used. If
//! an attempt is rejected, the next attempts use separate words of the position, eight or four at once:
//!
//! | attempts | stream | words |
//! |---|---|---|
//! | first | 0 | the bits at `position`: halves of words, the lower first; whole words if items have weights |
//! | next 8 (4) | 1 | block `position` |
//! | next 8 (4) | 2 | block `position`, and so on |
//!
//! **Uniform.** The draws are exactly uniform. A half `h` of a word maps to `h * n / 2^32` to select one of `n` values.
//! It is rejected if the lower half of the product is below `2^32 mod n` (Lemire: "Fast random integer generation in an
//! interval", ACM Transactions on Modeling and Computer Simulation 29, 2019). For a user who has seen `s` of `i` items,
//! the method is
//!
//! - *by rejection*, if `s <= i / 8`: draws from all items until one is unseen;
//! - *by rank* otherwise: draws from a list of the unseen items.
//!
//! Without repeats, the `n` negatives of one positive are distinct. This equals drawing them one after another from the
//! remaining items. If `s + n <= i / 8`, items that were already drawn are rejected like seen ones. Otherwise the first
//! `n` steps of a Fisher-Yates shuffle draw them from the list. The steps are undone for the next positive.
//!
//! **By weight.** An alias table maps a word to an item. The attempt is rejected if the item is seen or already drawn.
//! After [`ROUNDS`] rounds of separate words, a position draws from the cumulative weights of all remaining items, with
//! the first word of the next round. So users who have seen almost all of the weight don't take forever. The last step
//! changes no probability, because rejections contain no information about later words.
//!
//! Files of this version are in use for training, so the scheme must not change. Golden tests pin it.

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::alias::Weights;

/// Unseen items are listed for users who have seen more than one in this many items.
pub const DENSE: u64 = 8;

/// Rounds of attempts with a position's own words, before all remaining items are weighed.
pub const ROUNDS: u64 = 3;

/// Maximum number of negatives per positive.
const MOST_NEGATIVES: u32 = i32::MAX as u32 - 1;

/// The parameters of drawing negatives.
#[derive(Clone, Debug, PartialEq)]
pub struct Sampler {
    num_items: u32,
    negatives: u32,
    repeats: bool,
    weights: Option<Weights>,
}

impl Sampler {
    /// Creates a sampler that draws `negatives` of `num_items` items for each positive. The probabilities
    /// of the items are equal or, if there are `weights`, in proportion to their weights. With `repeats`, each draw is
    /// independent.
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

    /// Number of negatives per positive.
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

    /// Whether the unseen items are listed for users who have seen this many items.
    pub(crate) fn is_listed(&self, seen: usize) -> bool {
        let besides = if self.repeats { 0 } else { u64::from(self.negatives) };
        (seen as u64 + besides) * DENSE > u64::from(self.num_items)
    }

    /// Number of items that can be drawn for a user who has seen these items.
    pub fn left(&self, seen: &[u32]) -> u32 {
        match &self.weights {
            None => self.num_items - seen.len() as u32,
            Some(weights) if weights.positive() as usize == weights.len() => self.num_items - seen.len() as u32,
            Some(weights) => weights.positive() - seen.iter().filter(|item| weights.of(**item) > 0.0).count() as u32,
        }
    }

    /// Number of drawable items that a user must have.
    pub fn needed(&self) -> u32 {
        match (self.negatives, self.repeats) {
            (0, _) => 0,
            (_, true) => 1,
            (negatives, false) => negatives,
        }
    }
}
