//! Draws items by weight with one table access each.

use fastpipe_batch::{Error, ErrorKind, Result, try_collect, try_with_capacity};

/// The weights of items, and Walker's alias table. The table has one column per item. Each column has room for a share
/// of that item and, above it, for a share of another item. (Vose: "A linear algorithm for generating random numbers
/// with a given distribution", IEEE Transactions on Software Engineering 17, 1991.)
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Weights {
    weights: Vec<f64>,
    /// For each column: the height up to which it belongs to its own item, out of 2^64, and the item of the rest.
    columns: Vec<(u64, u32)>,
    /// Number of items that can be drawn.
    positive: u32,
}

impl Weights {
    pub(crate) fn new(weights: &[f64], num_items: u32) -> Result<Weights> {
        let fault = |kind, reason: String| Err(Error::new(kind, reason));
        if weights.len() != num_items as usize {
            let found = weights.len();
            return fault(
                ErrorKind::Shape,
                format!("expected a weight for each of {num_items} items, found {found} weights"),
            );
        }
        if let Some(item) = weights.iter().position(|weight| !weight.is_finite() || *weight < 0.0) {
            let found = weights[item];
            return fault(
                ErrorKind::ValueRange,
                format!("weights must be finite and not negative, found {found} for item {item}"),
            );
        }
        let heaviest = (0..).zip(weights).fold(
            (0, 0.0),
            |most, (item, &weight)| {
                if weight > most.1 { (item, weight) } else { most }
            },
        );
        if heaviest.1 == 0.0 {
            return fault(ErrorKind::ValueRange, "all weights are 0: no item can be drawn".into());
        }
        // Scaled, so that neither the sum nor its reciprocal overflows.
        let weights = try_collect(weights.iter().map(|weight| weight / heaviest.1), WEIGHTS)?;
        Ok(Weights {
            columns: columns(&weights, heaviest.0)?,
            positive: weights.iter().filter(|weight| **weight > 0.0).count() as u32,
            weights,
        })
    }

    /// Number of items.
    pub(crate) fn len(&self) -> usize {
        self.weights.len()
    }

    /// Number of items with a positive weight.
    pub(crate) fn positive(&self) -> u32 {
        self.positive
    }

    /// Returns the weight of an item. The largest weight is 1.
    #[inline]
    pub(crate) fn of(&self, item: u32) -> f64 {
        self.weights[item as usize]
    }

    /// Returns the item of a word. Its product with the number of items selects a column, and the height in the column.
    #[inline(always)]
    pub(crate) fn item(&self, word: u64) -> u32 {
        let product = u128::from(word) * self.columns.len() as u128;
        let column = (product >> 64) as u32;
        let (own, other) = self.columns[column as usize];
        if (product as u64) < own { column } else { other }
    }
}

/// The purpose of memory, for error messages.
const WEIGHTS: &str = "the weights of items";

/// Fills the columns. Items without weight get no share of any column.
fn columns(weights: &[f64], heaviest: u32) -> Result<Vec<(u64, u32)>> {
    const FULL: f64 = 18_446_744_073_709_551_616.0; // 2^64
    let scale = weights.len() as f64 / weights.iter().sum::<f64>();
    let mut left = try_collect(weights.iter().map(|weight| weight * scale), WEIGHTS)?;
    let mut columns = try_collect((0..weights.len() as u32).map(|item| (u64::MAX, item)), WEIGHTS)?;
    // Either list may grow to contain all items.
    let mut low = try_with_capacity(weights.len(), WEIGHTS)?;
    let mut high = try_with_capacity(weights.len(), WEIGHTS)?;
    for item in 0..weights.len() as u32 {
        let side = if left[item as usize] < 1.0 { &mut low } else { &mut high };
        side.push(item);
    }
    while let (Some(&small), Some(&large)) = (low.last(), high.last()) {
        low.pop();
        let (own, rest) = (left[small as usize], left[large as usize]);
        columns[small as usize] = ((own * FULL) as u64, large);
        left[large as usize] = (rest + own) - 1.0;
        if left[large as usize] < 1.0 {
            high.pop();
            low.push(large);
        }
    }
    // Rounding leaves some columns that should be full. They keep their own item, unless it has no weight.
    for &item in &low {
        if weights[item as usize] == 0.0 {
            columns[item as usize] = (0, heaviest);
        }
    }
    Ok(columns)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Computes the exact share of all words that maps to each item.
    fn shares(weights: &Weights) -> Vec<f64> {
        let column = 1.0 / weights.len() as f64;
        let mut shares = vec![0.0; weights.len()];
        for (item, &(own, other)) in weights.columns.iter().enumerate() {
            let own = own as f64 / 2f64.powi(64);
            shares[item] += own * column;
            shares[other as usize] += (1.0 - own) * column;
        }
        shares
    }

    #[test]
    fn items_get_shares_proportional_to_their_weights() {
        let cases: [Vec<f64>; 7] = [
            vec![1.0],
            vec![0.0, 3.0, 0.0],
            vec![1.0; 1000],
            (0..999).map(|i| f64::from(i % 13)).collect(),
            (1..3000).map(|i| f64::from(i).powf(-1.7)).collect(),
            vec![1e300, 1e-300, 1e300, 5e299],
            vec![1e-310, 2e-310, 0.0, 1e-310],
        ];
        for case in cases {
            let weights = Weights::new(&case, case.len() as u32).unwrap();
            let most = case.iter().copied().fold(0.0, f64::max);
            let all: f64 = case.iter().map(|weight| weight / most).sum();
            for (item, (share, weight)) in shares(&weights).into_iter().zip(&case).enumerate() {
                let expected = weight / most / all;
                assert!(
                    (share - expected).abs() < 1e-12,
                    "{share} instead of {expected}, item {item}"
                );
                assert!(share == 0.0 || *weight > 0.0, "item {item} has no weight");
            }
        }
    }

    #[test]
    fn words_select_items_by_their_columns() {
        let weights = Weights::new(&[1.0, 3.0], 2).unwrap();
        assert_eq!(
            [0, 1 << 62, (1 << 62) - 1, 1 << 63, u64::MAX].map(|word| weights.item(word)),
            [0, 1, 0, 1, 1]
        );
    }
}
