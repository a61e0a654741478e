//! Converts numbers to the indices of their buckets.
//!
//! Edges divide the real numbers. The index of a number is the count of edges at or below it. Numbers are compared
//! exactly: an integer is compared with the smallest integer at or above an edge, and a float with the smallest double
//! at or above it. So neither an edge nor a value is ever rounded.

use crate::error::{Error, ErrorKind};
use crate::fallible::try_with_capacity;
use crate::key::UNKNOWN;

/// Maximum number of edges.
pub const MOST_EDGES: usize = 1 << 16;

/// The reason of the error for NaN without a bucket.
pub const NAN: &str = "found NaN, which is in no bucket; on_nan=\"bucket\" gives NaN its own index after all others";

/// An edge between two buckets.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Edge {
    /// An integer of at most 64 bits, signed or unsigned.
    Int(i128),
    /// A finite float.
    Float(f64),
}

/// The edges of buckets.
#[derive(Clone, Debug, PartialEq)]
pub struct Buckets {
    /// For each edge, the smallest integer that isn't below it.
    integers: Box<[i128]>,
    /// For each edge, the smallest double that isn't below it.
    floats: Box<[f64]>,
    /// Whether NaN has a bucket, after all others.
    nan: bool,
}

impl Buckets {
    /// Creates buckets from edges. `nan` says whether NaN has a bucket.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if there are no edges or more than [`MOST_EDGES`], or if the edges aren't finite and
    /// strictly ascending.
    pub fn new(edges: &[Edge], nan: bool) -> Result<Buckets, Error> {
        const WHAT: &str = "the edges of buckets";
        let wrong = |reason: String| Error::new(ErrorKind::Schema, reason);
        if edges.is_empty() || edges.len() > MOST_EDGES {
            let count = edges.len();
            return Err(wrong(format!("edges must have 1 to {MOST_EDGES} numbers; got {count}")));
        }
        let mut integers = try_with_capacity(edges.len(), WHAT)?;
        let mut floats = try_with_capacity(edges.len(), WHAT)?;
        for edge in edges {
            let (integer, float) = at_or_above(*edge);
            if !float.is_finite() {
                return Err(wrong(format!("edges must be finite; got {edge:?}")));
            }
            integers.push(integer);
            floats.push(float);
        }
        let ascend = |pair: &[Edge]| is_below(pair[0], pair[1]);
        if !edges.windows(2).all(ascend) {
            return Err(wrong("edges must be strictly ascending".into()));
        }
        Ok(Buckets {
            integers: integers.into(),
            floats: floats.into(),
            nan,
        })
    }

    /// Returns the number of indices.
    pub fn size(&self) -> u64 {
        self.integers.len() as u64 + 1 + u64::from(self.nan)
    }

    /// Returns the index of an integer's bucket.
    #[inline]
    pub fn of_integer(&self, value: i128) -> i64 {
        self.integers.partition_point(|edge| *edge <= value) as i64
    }

    /// Returns the index of a float's bucket, or [`UNKNOWN`] for NaN without a bucket.
    #[inline]
    pub fn of_float(&self, value: f64) -> i64 {
        if value.is_nan() {
            return if self.nan {
                self.floats.len() as i64 + 1
            } else {
                UNKNOWN
            };
        }
        self.floats.partition_point(|edge| *edge <= value) as i64
    }
}

/// Returns the smallest integer and the smallest double that aren't below an edge.
fn at_or_above(edge: Edge) -> (i128, f64) {
    match edge {
        Edge::Int(integer) => {
            let nearest = integer as f64;
            let below = (nearest as i128) < integer;
            (integer, if below { nearest.next_up() } else { nearest })
        }
        // Integers of 64 bits compare with a saturated edge as with the edge itself.
        Edge::Float(float) => (float.ceil() as i128, float),
    }
}

/// Whether an edge is less than another one.
fn is_below(one: Edge, other: Edge) -> bool {
    let (one, other) = (at_or_above(one), at_or_above(other));
    // If both are between the same integers, both are floats. If both are between the same doubles, both are integers.
    one.1 < other.1 || (one.1 == other.1 && one.0 < other.0)
}

#[cfg(test)]
mod tests {
    use std::cmp::Ordering;

    use proptest::prelude::*;

    use super::*;

    /// Compares a number with an edge: the integer parts exactly, and then the fractions.
    fn compared(value: Edge, edge: Edge) -> Ordering {
        let halves = |number: Edge| match number {
            Edge::Int(integer) => (integer, 0.0),
            Edge::Float(float) => (float.floor() as i128, float - float.floor()),
        };
        let (value, edge) = (halves(value), halves(edge));
        value.0.cmp(&edge.0).then(value.1.partial_cmp(&edge.1).unwrap())
    }

    fn edge() -> impl Strategy<Value = Edge> {
        let integer = || {
            prop_oneof![
                -3..=3i128,
                any::<i64>().prop_map(i128::from),
                any::<u64>().prop_map(i128::from),
                (-3..=3i128).prop_map(|n| n + (1 << 53)),
                (-3..=3i128).prop_map(|n| n - (1 << 53)),
                (-3..=3i128).prop_map(|n| n + (1 << 63)),
            ]
        };
        let float = prop_oneof![
            (-12..=12i32).prop_map(|n| f64::from(n) / 4.0),
            (-1e30..1e30f64),
            integer().prop_map(|n| n as f64),
        ];
        prop_oneof![
            integer().prop_filter("64 bits", |n| *n < 1 << 64).prop_map(Edge::Int),
            float.prop_map(Edge::Float)
        ]
    }

    proptest! {
        #[test]
        fn an_index_is_the_count_of_edges_up_to_the_value(
            edges in proptest::collection::vec(edge(), 1..30),
            values in proptest::collection::vec(edge(), 1..30),
        ) {
            let mut edges = edges;
            edges.sort_by(|a, b| compared(*a, *b));
            edges.dedup_by(|a, b| compared(*a, *b) == Ordering::Equal);
            let buckets = Buckets::new(&edges, false).unwrap();
            for value in values.iter().chain(&edges) {
                let expected = edges.iter().filter(|edge| compared(*value, **edge) != Ordering::Less).count();
                let found = match *value {
                    Edge::Int(integer) => buckets.of_integer(integer),
                    Edge::Float(float) => buckets.of_float(float),
                };
                prop_assert_eq!(found, expected as i64, "{:?} among {:?}", value, &edges);
            }
        }
    }

    #[test]
    fn edges_are_checked() {
        let of = |edges: &[f64]| Buckets::new(&edges.iter().map(|edge| Edge::Float(*edge)).collect::<Vec<_>>(), false);
        for wrong in [
            &[][..],
            &[f64::NAN],
            &[0.0, f64::INFINITY],
            &[1.0, 1.0],
            &[2.0, 1.0],
            &[-0.0, 0.0],
        ] {
            assert_eq!(of(wrong).unwrap_err().kind(), ErrorKind::Schema, "{wrong:?}");
        }
        assert!(of(&vec![0.0; MOST_EDGES + 1]).is_err());
        let wide = [Edge::Int((1 << 53) + 1), Edge::Int((1 << 53) + 2)];
        assert!(Buckets::new(&wide, false).is_ok());
        assert!(Buckets::new(&[wide[1], wide[0]], false).is_err());
    }

    #[test]
    fn nan_has_a_bucket_only_if_asked_for() {
        let edges = [Edge::Int(0), Edge::Float(0.5)];
        let (without, with) = (
            Buckets::new(&edges, false).unwrap(),
            Buckets::new(&edges, true).unwrap(),
        );
        assert_eq!((without.size(), without.of_float(f64::NAN)), (3, UNKNOWN));
        assert_eq!((with.size(), with.of_float(-f64::NAN)), (4, 3));
        assert_eq!((with.of_float(f64::INFINITY), with.of_float(f64::NEG_INFINITY)), (2, 0));
    }
}
