//! The layout of rows in a batch: ranges of flat arrays.
//!
//! A batch consists of the parts of its columns ([`Part`]), and a row owns a range of each part. This module numbers
//! the depths of all columns together, as *levels*. Level 0 is depth 0 of every column, and each part of lengths opens
//! a separate level. So a row is a range of each level, and moving rows means moving ranges, for any kind of columns.

use fastpipe_batch::{Error, ErrorKind, OutOfBounds, Part, PartKind, Result};

/// A part at its level of the batch.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LevelPart {
    /// The level: 0 is the rows, `k + 1` is the one opened by the `k`-th part of lengths.
    pub level: usize,
    /// The width of an item: a number of lengths for parts of lengths, and of bytes for all other parts.
    pub width: usize,
}

/// The parts of all columns: lengths, which determine the ranges of rows, and other parts, which are opaque bytes.
#[derive(Clone, Debug, Default)]
pub struct RowLayout {
    lengths: Vec<LevelPart>,
    values: Vec<LevelPart>,
}

impl RowLayout {
    /// Creates the layout of columns. Each column has its parts in the order of
    /// [`Form::parts`](fastpipe_batch::Form::parts).
    ///
    /// # Errors
    ///
    /// If a column has a part at a depth that no earlier lengths open, or if a width overflows. COO coordinates, which
    /// contain the row, are such parts, so sparse columns must be CSR.
    pub fn new<C: AsRef<[Part]>>(columns: &[C]) -> Result<RowLayout> {
        let mut layout = RowLayout::default();
        for column in columns {
            // By depth.
            let mut levels = vec![0];
            for part in column.as_ref() {
                let &level = levels.get(part.depth).ok_or_else(|| {
                    let reason = format!("a part at depth {} has no lengths that open it", part.depth);
                    Error::new(ErrorKind::Schema, reason)
                })?;
                let width = part.width;
                if part.kind == PartKind::Lengths {
                    layout.lengths.push(LevelPart { level, width });
                    levels.truncate(part.depth + 1);
                    levels.push(layout.lengths.len());
                } else {
                    let width = width.checked_mul(part.size()).ok_or(OutOfBounds)?;
                    layout.values.push(LevelPart { level, width });
                }
            }
        }
        Ok(layout)
    }

    /// Parts of lengths, in the order of the columns. The `k`-th opens level `k + 1`.
    pub fn lengths(&self) -> &[LevelPart] {
        &self.lengths
    }

    /// All other parts, in the order of the columns.
    pub fn values(&self) -> &[LevelPart] {
        &self.values
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::{DType, Form, Leaf, NestedForm, SparseForm, SparseLayout};

    use super::*;

    fn part(kind: PartKind, depth: usize, width: usize) -> Part {
        Part { kind, depth, width }
    }

    #[test]
    fn levels_of_columns_are_numbered_consecutively() {
        let nested = |ragged: usize, leaf| {
            Form::Nested(NestedForm {
                ragged,
                shape: vec![2],
                leaf,
                masks: vec![true; ragged],
                leaf_mask: Some(1),
            })
        };
        let csr = Form::Sparse(SparseForm {
            layout: SparseLayout::Csr,
            shape: vec![None; 3],
            leaf: Leaf::Bytes { utf8: true },
            mask: true,
        });
        let forms = [
            nested(0, Leaf::Fixed(DType::F32)),
            nested(2, Leaf::Fixed(DType::I16)),
            nested(1, Leaf::Bytes { utf8: false }),
            csr,
        ];
        let layout = RowLayout::new(&forms.each_ref().map(Form::parts)).unwrap();
        let pairs = |parts: &[LevelPart]| parts.iter().map(|p| (p.level, p.width)).collect::<Vec<_>>();
        assert_eq!(
            pairs(layout.lengths()),
            [(0, 1), (1, 1), (0, 1), (3, 2), (0, 1), (5, 1)]
        );
        let dense = [(0, 2), (0, 8)];
        let ragged = [(0, 1), (1, 1), (2, 2), (2, 4)];
        let text = [(0, 1), (3, 2), (4, 1)];
        let sparse = [(0, 1), (5, 24), (6, 1)];
        assert_eq!(pairs(layout.values()), [&dense[..], &ragged, &text, &sparse].concat());
    }

    #[test]
    fn parts_without_lengths_are_refused() {
        let coo = Form::Sparse(SparseForm {
            layout: SparseLayout::Coo,
            shape: vec![None],
            leaf: Leaf::Fixed(DType::F32),
            mask: false,
        });
        let other_column = vec![part(PartKind::Lengths, 0, 1), part(PartKind::Bytes, 1, 1)];
        for parts in [coo.parts(), vec![part(PartKind::Lengths, 1, 1)]] {
            let error = RowLayout::new(&[other_column.clone(), parts]).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Schema);
        }
        assert!(RowLayout::new(&[[part(PartKind::Values(DType::F64), 0, usize::MAX / 4)]]).is_err());
    }
}
