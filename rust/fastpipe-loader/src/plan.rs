//! Where the rows of a batch lie in its slab.

/// Where arrays begin in a slab: at multiples of a cache line.
const ALIGNED: usize = 64;

/// Bytes of a cell, which says where a value lies that has no place of its own: its offset and its length.
pub const CELL: usize = 16;

/// A slab of so many rows: an array for each part of an item, one behind the other, and a free rest.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabPlan {
    /// Where the array of each part begins.
    pub starts: Vec<usize>,
    /// Bytes up to the end of the last one.
    pub end: usize,
}

impl SlabPlan {
    /// For `rows` rows, of each of whose parts a row takes so many bytes. `None` for more bytes than there can be.
    pub fn new(parts: &[usize], rows: usize) -> Option<Self> {
        let mut end = 0usize;
        let mut starts = Vec::with_capacity(parts.len());
        for &bytes in parts {
            let start = end.checked_next_multiple_of(ALIGNED)?;
            starts.push(start);
            end = start.checked_add(bytes.checked_mul(rows)?)?;
        }
        Some(SlabPlan { starts, end })
    }
}

/// Offsets of values are rounded up to this.
pub(crate) fn aligned(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(ALIGNED as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_lie_apart_and_aligned() {
        let plan = SlabPlan::new(&[3, 0, 100, 8], 5).unwrap();
        assert_eq!((plan.starts, plan.end), (vec![0, 64, 64, 576], 616));
        assert_eq!(SlabPlan::new(&[], 7).unwrap().end, 0);
        assert_eq!(SlabPlan::new(&[8], 0).unwrap().end, 0);
        for (parts, rows) in [
            (&[usize::MAX][..], 2),
            (&[1, usize::MAX][..], 1),
            (&[usize::MAX / 2][..], 3),
        ] {
            assert_eq!(SlabPlan::new(parts, rows), None);
        }
    }
}
