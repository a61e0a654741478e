//! The layout of a batch's rows in its slab.

/// The alignment of arrays in a slab: one cache line.
const ALIGNED: usize = 64;

/// Bytes of a cell: the offset and length of a value that is stored outside its row.
pub const CELL: usize = 16;

/// The plan of a slab: one array for each part of an item, one after the other, and free space after them.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SlabPlan {
    /// The offset of each array.
    pub starts: Vec<usize>,
    /// The end of the last array.
    pub end: usize,
}

impl SlabPlan {
    /// Plans a slab for `rows` rows. `parts` contains the bytes per row of each part. Returns `None` if the size
    /// overflows.
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

/// Rounds the offset of a value up to the alignment.
pub(crate) fn aligned(offset: u64) -> Option<u64> {
    offset.checked_next_multiple_of(ALIGNED as u64)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn arrays_are_disjoint_and_aligned() {
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
