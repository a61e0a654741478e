//! Batches that go out: how large their arrays have to be, and the arrays.

use fastpipe_batch::OutOfBounds;

use crate::chunk::Byte;
use crate::layout::{LevelPart, RowLayout};

/// The size of a batch that can be copied out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct BatchSize {
    /// Its rows.
    pub rows: usize,
    /// Its elements, level by level; those of level 0 are the rows.
    pub elements: Vec<usize>,
}

/// Where a batch is copied to: the parts as [`RowLayout`] lists them.
#[derive(Debug)]
pub struct Targets<'a> {
    /// Offsets: a 0 and the running sums of the lengths.
    pub offsets: Vec<&'a mut [i64]>,
    /// Values.
    pub values: Vec<&'a mut [Byte]>,
}

impl Targets<'_> {
    /// Checks that a batch fits in exactly.
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

    /// Turns lengths, behind a 0, into offsets.
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
