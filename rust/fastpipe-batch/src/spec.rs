//! Columns, and the parts of memory that they are made of.
//!
//! A column of Avro data is nested: items in lists in lists in rows, each of which may be null. Its *form* says how it is
//! laid out in a batch: `ragged` dimensions outermost, each with its offsets; fixed dimensions inside; the leaves
//! innermost; and masks at the levels that may be null. Level `l` is inside `l` dimensions; level 0 is the row.

use std::sync::Arc;

use crate::dtype::{DType, Leaf};

/// A column of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnSpec {
    /// The feature's name.
    pub name: Arc<str>,
    /// How it is laid out.
    pub form: Form,
}

/// The layout of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Dense and ragged columns.
    Nested(NestedForm),
    /// Coordinates and values.
    Sparse(SparseForm),
}

/// Dense (`ragged == 0`) and ragged columns.
#[derive(Clone, Debug, PartialEq)]
pub struct NestedForm {
    /// Number of ragged dimensions.
    pub ragged: usize,
    /// The fixed dimensions inside of them.
    pub shape: Vec<usize>,
    /// The innermost values.
    pub leaf: Leaf,
    /// Whether levels `0..ragged` have a mask.
    pub masks: Vec<bool>,
    /// The mask of the innermost level, if there is one: how many of the fixed dimensions it spans.
    pub leaf_mask: Option<usize>,
}

impl NestedForm {
    /// A dense column without a mask.
    pub fn dense(shape: &[usize], leaf: Leaf) -> Self {
        NestedForm {
            ragged: 0,
            shape: shape.to_vec(),
            leaf,
            masks: Vec::new(),
            leaf_mask: None,
        }
    }

    /// Values of one item of the innermost ragged level.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }
}

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

/// What a part holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// Values or coordinates.
    Values(DType),
    /// One bool for each value that may be null: true where it is present.
    Valid,
    /// Numbers of items (`i64`); they become offsets when the batch is joined.
    Lengths,
    /// The bytes of strings.
    Bytes,
}

/// A stretch of memory of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// What it holds.
    pub kind: PartKind,
    /// For placed parts: elements in each row. Others have any number.
    pub per_row: Option<usize>,
}

impl Part {
    /// Bytes of one element.
    pub const fn size(&self) -> usize {
        match self.kind {
            PartKind::Values(d) => d.size(),
            PartKind::Valid | PartKind::Bytes => 1,
            PartKind::Lengths => 8,
        }
    }
}

impl ColumnSpec {
    /// Whether it is sparse, as coordinates with the batch index.
    pub fn is_coo(&self) -> bool {
        matches!(&self.form, Form::Sparse(form) if form.layout == SparseLayout::Coo)
    }

    /// The parts of this column, in a fixed order: from the outermost level to the innermost, at each level first the
    /// mask, then the lengths of the next one; at the innermost the values (strings: lengths, then bytes). A sparse
    /// column has its mask, lengths (only CSR), coordinates, values.
    pub fn parts(&self) -> Vec<Part> {
        let mut parts = Vec::new();
        let leaf = |parts: &mut Vec<Part>, leaf: Leaf, per_row: Option<usize>| match leaf {
            Leaf::Fixed(dtype) => parts.push(Part {
                kind: PartKind::Values(dtype),
                per_row,
            }),
            Leaf::Bytes { .. } => {
                parts.push(Part {
                    kind: PartKind::Lengths,
                    per_row,
                });
                parts.push(Part {
                    kind: PartKind::Bytes,
                    per_row: None,
                });
            }
        };
        match &self.form {
            Form::Nested(form) => {
                for level in 0..form.ragged {
                    let per_row = (level == 0).then_some(1);
                    if form.masks[level] {
                        parts.push(Part {
                            kind: PartKind::Valid,
                            per_row,
                        });
                    }
                    parts.push(Part {
                        kind: PartKind::Lengths,
                        per_row,
                    });
                }
                let placed = |n: usize| (form.ragged == 0).then_some(n);
                if let Some(dims) = form.leaf_mask {
                    let n = form.shape[..dims].iter().product();
                    parts.push(Part {
                        kind: PartKind::Valid,
                        per_row: placed(n),
                    });
                }
                leaf(&mut parts, form.leaf, placed(form.width()));
            }
            Form::Sparse(form) => {
                if form.mask {
                    parts.push(Part {
                        kind: PartKind::Valid,
                        per_row: Some(1),
                    });
                }
                if form.layout == SparseLayout::Csr {
                    parts.push(Part {
                        kind: PartKind::Lengths,
                        per_row: Some(1),
                    });
                }
                parts.push(Part {
                    kind: PartKind::Values(DType::I64),
                    per_row: None,
                });
                leaf(&mut parts, form.leaf, None);
            }
        }
        parts
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn kinds(form: Form) -> Vec<(PartKind, Option<usize>)> {
        let column = ColumnSpec { name: "x".into(), form };
        column.parts().iter().map(|p| (p.kind, p.per_row)).collect()
    }

    #[test]
    fn dense_columns_are_placed() {
        let mut form = NestedForm::dense(&[3, 4], Leaf::Fixed(DType::F32));
        form.leaf_mask = Some(1);
        assert_eq!(
            kinds(Form::Nested(form)),
            [(PartKind::Valid, Some(3)), (PartKind::Values(DType::F32), Some(12))]
        );
        let text = NestedForm::dense(&[], Leaf::Bytes { utf8: true });
        assert_eq!(
            kinds(Form::Nested(text)),
            [(PartKind::Lengths, Some(1)), (PartKind::Bytes, None)]
        );
    }

    #[test]
    fn only_the_outermost_level_of_a_ragged_column_is_placed() {
        let form = NestedForm {
            ragged: 2,
            shape: vec![2],
            leaf: Leaf::Fixed(DType::I32),
            masks: vec![true, false],
            leaf_mask: Some(0),
        };
        assert_eq!(
            kinds(Form::Nested(form)),
            [
                (PartKind::Valid, Some(1)),
                (PartKind::Lengths, Some(1)),
                (PartKind::Lengths, None),
                (PartKind::Valid, None),
                (PartKind::Values(DType::I32), None),
            ]
        );
    }

    #[test]
    fn sparse_columns_have_offsets_only_as_csr() {
        let form = |layout| {
            Form::Sparse(SparseForm {
                layout,
                shape: vec![Some(9)],
                leaf: Leaf::Fixed(DType::F32),
                mask: false,
            })
        };
        assert_eq!(kinds(form(SparseLayout::Coo)).len(), 2);
        assert_eq!(kinds(form(SparseLayout::Csr))[0], (PartKind::Lengths, Some(1)));
    }
}
