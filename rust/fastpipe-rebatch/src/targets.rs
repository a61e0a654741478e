//! Outgoing batches: the sizes of their arrays, and the arrays.

use fastpipe_batch::OutOfBounds;

use crate::chunk::Byte;
use crate::layout::{LevelPart, RowLayout};

/// The size of a batch that can be copied out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// The number of rows.
    pub rows: usize,
    /// The number of elements by level. Level 0 is the rows.
    pub elements: Vec<usize>,
}

/// The arrays that a batch is copied to, in the order of the parts of [`RowLayout`].
#[derive(Debug)]
pub struct Targets<'a> {
    /// Arrays of offsets: 0, and the running sums of the lengths.
    pub offsets: Vec<&'a mut [i64]>,
    /// Arrays of values.
    pub values: Vec<&'a mut [Byte]>,
}

impl Targets<'_> {
    /// Checks that the arrays have exactly the size of a batch.
    pub(crate) fn check(&self, layout: &RowLayout, ready: &BatchSize) -> Result<(), OutOfBounds> {
        let size = |part: &LevelPart| ready.elements[part.level].checked_mul(part.width);
        let fits = self.offsets.len() == layout.lengths().len()
            && self.values.len() == layout.values().len()
            && layout
                .lengths()
                .iter()
                .zip(&self.offsets)
                .all(|(part, to)| size(part) == to.len().checked_sub(1))
            && layout
                .values()
                .iter()
                .zip(&self.values)
                .all(|(part, to)| size(part) == Some(to.len()));
        if fits { Ok(()) } else { Err(OutOfBounds) }
    }

    /// Converts lengths into offsets. The first entry is 0.
    pub(crate) fn add_up(&mut self) {
        for offsets in &mut self.offsets {
            let mut end = 0;
            offsets[0] = 0;
            for offset in &mut offsets[1..] {
                end = offset.wrapping_add(end);
                *offset = end;
            }
        }
    }
}
