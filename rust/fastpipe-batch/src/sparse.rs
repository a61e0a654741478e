//! How sparse columns are laid out.

use crate::dtype::Leaf;

/// How a sparse column is laid out.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseLayout {
    /// Coordinates with the batch index first.
    Coo,
    /// Offsets of rows, and coordinates without the batch index.
    Csr,
}

/// A sparse column.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseForm {
    /// Which layout.
    pub layout: SparseLayout,
    /// The dense shape of one row; `None` where it is the greatest index of the batch plus one.
    pub shape: Vec<Option<u64>>,
    /// The values.
    pub leaf: Leaf,
    /// Whether whole rows may be null.
    pub mask: bool,
}

impl SparseForm {
    /// Numbers in one row of `indices`.
    pub fn coordinates(&self) -> usize {
        self.shape.len() + usize::from(self.layout == SparseLayout::Coo)
    }
}
