//! The layout of sparse columns.

use crate::dtype::Leaf;

/// The layout of a sparse column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SparseLayout {
    /// Coordinate list. Each coordinate begins with the batch index.
    Coo,
    /// Compressed rows: row offsets, and coordinates without the batch index.
    Csr,
}

/// The form of a sparse column.
#[derive(Clone, Debug, PartialEq)]
pub struct SparseForm {
    /// The layout.
    pub layout: SparseLayout,
    /// The dense shape of one row. `None` means that the size is the largest index in the batch plus one.
    pub shape: Vec<Option<u64>>,
    /// The type of the values.
    pub leaf: Leaf,
    /// Whether whole rows may be null.
    pub mask: bool,
}

impl SparseForm {
    /// Returns the number of integers in one row of `indices`.
    pub fn coordinates(&self) -> usize {
        self.shape.len() + usize::from(self.layout == SparseLayout::Coo)
    }
}
