//! The parts of memory that a column consists of: their kinds, their order and their roles.
//!
//! A part is an array of elements. At depth 0, each row has the same number of elements, the `width` of the part. Each
//! part of lengths opens the next depth: it counts items, and each item has `width` elements in every part of that
//! depth. So a row of any column is a contiguous range of each of its parts.

use crate::dtype::{DType, Leaf};
use crate::sparse::SparseLayout;
use crate::spec::{ColumnSpec, Form};

/// The kind of data in a part.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PartKind {
    /// Values or coordinates.
    Values(DType),
    /// One bool for each value that may be null. True means that the value is present.
    Valid,
    /// Item counts (`i64`). They are converted to offsets when the batch is joined.
    Lengths,
    /// Bytes of strings, or of values whose type fastpipe doesn't interpret.
    Bytes,
}

/// An array that is one part of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Part {
    /// The kind of its data.
    pub kind: PartKind,
    /// How many of the column's length parts it is nested in: 0 for elements of rows, 1 for elements of the
    /// items that the first lengths count.
    pub depth: usize,
    /// The number of elements per row, or per item at its depth.
    pub width: usize,
}

impl Part {
    /// Returns the size of one element in bytes.
    pub const fn size(&self) -> usize {
        match self.kind {
            PartKind::Values(d) => d.size(),
            PartKind::Valid | PartKind::Bytes => 1,
            PartKind::Lengths => 8,
        }
    }

    /// Returns the parts of a column, given the kind and the width of each part from the outermost to the innermost.
    /// Each part is nested in all length parts before it.
    pub fn nested(parts: impl IntoIterator<Item = (PartKind, usize)>) -> Vec<Part> {
        let mut depth = 0;
        let part = |(kind, width)| {
            let part = Part { kind, depth, width };
            depth += usize::from(kind == PartKind::Lengths);
            part
        };
        parts.into_iter().map(part).collect()
    }

    /// Returns the number of elements per row for placed parts. Other parts have any number.
    pub const fn per_row(&self) -> Option<usize> {
        if self.depth == 0 { Some(self.width) } else { None }
    }
}

/// The index of a part among the parts of all columns.
pub type PartId = u32;

/// The parts of a string column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TextParts {
    /// The part with the lengths of the strings.
    pub lengths: PartId,
    /// The part with the bytes of the strings.
    pub bytes: PartId,
}

/// The parts that contain the values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum ValueParts {
    /// Elements of a dtype, and their part.
    Elements(DType, PartId),
    /// Strings, which are UTF-8 or arbitrary bytes.
    Text {
        /// Whether the strings are UTF-8.
        utf8: bool,
        /// The parts of the strings.
        to: TextParts,
    },
}

/// The indices of a column's parts, by role.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PartIds {
    /// Lengths of the ragged dimensions. For a sparse column in CSR layout, lengths of its rows.
    pub lengths: Vec<PartId>,
    /// Coordinates of a sparse column.
    pub coordinates: Option<PartId>,
    /// The values.
    pub values: ValueParts,
    /// Masks in ascending order of their level. A mask marks the nulls of its level.
    masks: Vec<(usize, PartId)>,
    /// The mask shared by all levels inside the last ragged dimension.
    leaf_mask: Option<PartId>,
}

/// The data to write for an absent value, either a null or padding.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Absent {
    /// The mask that marks the value as absent, and the number of entries to write.
    pub mask: Option<(PartId, usize)>,
    /// The part in which a single length of 0 is written.
    pub lengths: Option<PartId>,
    /// The number of placeholder values to write. Their contents are ignored.
    pub values: usize,
}

impl PartIds {
    /// Assigns indices to the parts of a form in the order of [`Form::parts`], starting at `first`.
    pub fn new(form: &Form, first: PartId) -> PartIds {
        let mut ids = PartIds {
            lengths: Vec::new(),
            coordinates: None,
            values: ValueParts::Elements(DType::Bool, first),
            masks: Vec::new(),
            leaf_mask: None,
        };
        for ((role, _), id) in form.roles().into_iter().zip(first..) {
            match role {
                Role::Mask(level) => ids.masks.push((level, id)),
                Role::LeafMask(level) => {
                    ids.masks.push((level, id));
                    ids.leaf_mask = Some(id);
                }
                Role::Lengths => ids.lengths.push(id),
                Role::Coordinates => ids.coordinates = Some(id),
                Role::Elements(dtype) => ids.values = ValueParts::Elements(dtype, id),
                Role::Text { utf8 } => {
                    let to = TextParts {
                        lengths: id,
                        bytes: id + 1,
                    };
                    ids.values = ValueParts::Text { utf8, to };
                }
                Role::TextBytes => {}
            }
        }
        ids
    }

    /// Returns the mask that has one entry for each value of a level.
    pub fn mask_at(&self, level: usize) -> Option<PartId> {
        self.masks.iter().find(|mask| mask.0 == level).map(|mask| mask.1)
    }

    /// Returns the mask shared by all levels inside the last ragged dimension.
    pub fn leaf_mask(&self) -> Option<PartId> {
        self.leaf_mask
    }

    /// Returns the data to write for an absent value at a level of a column of this form.
    pub fn absent(&self, form: &Form, level: usize) -> Absent {
        let outer = |lengths: Option<PartId>| Absent {
            mask: self.mask_at(level).map(|mask| (mask, 1)),
            lengths,
            values: 0,
        };
        match form {
            Form::Nested(form) if level < form.ragged => outer(self.lengths.get(level).copied()),
            Form::Nested(form) => {
                let passed = level - form.ragged;
                let entries = |dims| form.shape.get(passed..dims).map(|shape| shape.iter().product());
                Absent {
                    mask: self.leaf_mask.zip(form.leaf_mask.and_then(entries)),
                    lengths: None,
                    values: form.shape[passed..].iter().product(),
                }
            }
            Form::Sparse(_) if level == 0 => outer(self.lengths.first().copied()),
            Form::Sparse(_) => Absent {
                mask: None,
                lengths: None,
                values: 1,
            },
        }
    }
}

/// The role of a part in its column.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Role {
    /// The mask of a level outside of the last ragged dimension, or of sparse rows.
    Mask(usize),
    /// The mask shared by the inner levels. It has one entry per value of this level.
    LeafMask(usize),
    Lengths,
    Coordinates,
    Elements(DType),
    /// The lengths of strings.
    Text {
        utf8: bool,
    },
    TextBytes,
}

/// Parts with their roles, from the outermost to the innermost.
#[derive(Default)]
struct Roles {
    parts: Vec<(Role, Part)>,
    depth: usize,
}

impl Roles {
    fn push(&mut self, role: Role, kind: PartKind, width: usize) {
        let depth = self.depth;
        self.parts.push((role, Part { kind, depth, width }));
        if kind == PartKind::Lengths {
            self.depth += 1;
        }
    }

    fn leaf(&mut self, leaf: Leaf, width: usize) {
        match leaf {
            Leaf::Fixed(dtype) => self.push(Role::Elements(dtype), PartKind::Values(dtype), width),
            Leaf::Bytes { utf8 } => {
                self.push(Role::Text { utf8 }, PartKind::Lengths, width);
                self.push(Role::TextBytes, PartKind::Bytes, 1);
            }
        }
    }
}

impl Form {
    /// Returns the parts of a column of this form in a fixed order, from the outermost level to the innermost. Each
    /// level has its mask, then the lengths of the next level. The innermost level has its mask, then the values (for
    /// strings: lengths, then bytes). A sparse column has its mask, lengths (CSR only), coordinates and values.
    pub fn parts(&self) -> Vec<Part> {
        self.roles().into_iter().map(|(_, part)| part).collect()
    }

    fn roles(&self) -> Vec<(Role, Part)> {
        let mut roles = Roles::default();
        match self {
            Form::Nested(form) => {
                for (level, &mask) in form.masks.iter().enumerate().take(form.ragged) {
                    if mask {
                        roles.push(Role::Mask(level), PartKind::Valid, 1);
                    }
                    roles.push(Role::Lengths, PartKind::Lengths, 1);
                }
                if let Some(dims) = form.leaf_mask {
                    let entries = form.shape[..dims].iter().product();
                    roles.push(Role::LeafMask(form.ragged + dims), PartKind::Valid, entries);
                }
                roles.leaf(form.leaf, form.width());
            }
            Form::Sparse(form) => {
                if form.mask {
                    roles.push(Role::Mask(0), PartKind::Valid, 1);
                }
                match form.layout {
                    SparseLayout::Csr => roles.push(Role::Lengths, PartKind::Lengths, 1),
                    // Rows have any number of entries in this layout as well. The coordinates identify the row.
                    SparseLayout::Coo => roles.depth += 1,
                }
                roles.push(Role::Coordinates, PartKind::Values(DType::I64), form.coordinates());
                roles.leaf(form.leaf, 1);
            }
        }
        roles.parts
    }
}

impl ColumnSpec {
    /// Returns the parts of this column. See [`Form::parts`].
    pub fn parts(&self) -> Vec<Part> {
        self.form.parts()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::sparse::SparseForm;
    use crate::spec::NestedForm;

    const TEXT: Leaf = Leaf::Bytes { utf8: true };

    fn kinds(form: &Form) -> Vec<(PartKind, usize, usize)> {
        form.parts().iter().map(|p| (p.kind, p.depth, p.width)).collect()
    }

    fn ragged(masks: &[bool], shape: &[usize], leaf: Leaf, leaf_mask: Option<usize>) -> Form {
        Form::Nested(NestedForm {
            ragged: masks.len(),
            shape: shape.to_vec(),
            leaf,
            masks: masks.to_vec(),
            leaf_mask,
        })
    }

    fn sparse(layout: SparseLayout, dims: usize, leaf: Leaf, mask: bool) -> Form {
        Form::Sparse(SparseForm {
            layout,
            shape: vec![Some(9); dims],
            leaf,
            mask,
        })
    }

    #[test]
    fn dense_columns_are_placed() {
        let numbers = ragged(&[], &[3, 4], Leaf::Fixed(DType::F32), Some(1));
        let values = PartKind::Values(DType::F32);
        assert_eq!(kinds(&numbers), [(PartKind::Valid, 0, 3), (values, 0, 12)]);
        let per_row: Vec<_> = numbers.parts().iter().map(Part::per_row).collect();
        assert_eq!(per_row, [Some(3), Some(12)]);
        let text = ragged(&[], &[], TEXT, None);
        assert_eq!(kinds(&text), [(PartKind::Lengths, 0, 1), (PartKind::Bytes, 1, 1)]);
        assert_eq!(text.parts()[1].per_row(), None);
    }

    #[test]
    fn only_the_outermost_level_of_a_ragged_column_is_placed() {
        let form = ragged(&[true, false], &[2], Leaf::Fixed(DType::I32), Some(0));
        assert_eq!(
            kinds(&form),
            [
                (PartKind::Valid, 0, 1),
                (PartKind::Lengths, 0, 1),
                (PartKind::Lengths, 1, 1),
                (PartKind::Valid, 2, 1),
                (PartKind::Values(DType::I32), 2, 2),
            ]
        );
    }

    #[test]
    fn sparse_columns_have_offsets_only_as_csr() {
        let numbers = Leaf::Fixed(DType::F32);
        let values = (PartKind::Values(DType::F32), 1, 1);
        let coordinates = |width| (PartKind::Values(DType::I64), 1, width);
        assert_eq!(
            kinds(&sparse(SparseLayout::Coo, 1, numbers, false)),
            [coordinates(2), values]
        );
        assert_eq!(
            kinds(&sparse(SparseLayout::Csr, 2, numbers, true)),
            [
                (PartKind::Valid, 0, 1),
                (PartKind::Lengths, 0, 1),
                coordinates(2),
                values
            ]
        );
        assert_eq!(
            kinds(&sparse(SparseLayout::Csr, 1, TEXT, false))[2..],
            [(PartKind::Lengths, 1, 1), (PartKind::Bytes, 2, 1)]
        );
    }

    #[test]
    fn parts_are_nested_in_the_lengths_before_them() {
        let numbers = Leaf::Fixed(DType::F32);
        for form in [
            ragged(&[], &[3], TEXT, Some(0)),
            ragged(&[true, false], &[2], TEXT, Some(1)),
            sparse(SparseLayout::Csr, 2, TEXT, true),
            sparse(SparseLayout::Csr, 1, numbers, false),
        ] {
            let parts = form.parts();
            assert_eq!(Part::nested(parts.iter().map(|p| (p.kind, p.width))), parts);
        }
    }

    #[test]
    fn parts_are_numbered_in_order() {
        let ids = PartIds::new(&ragged(&[true, false], &[2], TEXT, Some(1)), 10);
        assert_eq!(ids.lengths, [11, 12]);
        assert_eq!(ids.coordinates, None);
        let to = TextParts { lengths: 14, bytes: 15 };
        assert_eq!(ids.values, ValueParts::Text { utf8: true, to });
        let masks: Vec<_> = (0..5).map(|level| ids.mask_at(level)).collect();
        assert_eq!(masks, [Some(10), None, None, Some(13), None]);
        assert_eq!(ids.leaf_mask(), Some(13));

        let ids = PartIds::new(&sparse(SparseLayout::Csr, 1, Leaf::Fixed(DType::I8), true), 3);
        assert_eq!((ids.mask_at(0), ids.mask_at(1), ids.leaf_mask()), (Some(3), None, None));
        assert_eq!((&ids.lengths[..], ids.coordinates), (&[4][..], Some(5)));
        assert_eq!(ids.values, ValueParts::Elements(DType::I8, 6));
        let ids = PartIds::new(&sparse(SparseLayout::Coo, 1, Leaf::Fixed(DType::I8), false), 3);
        assert_eq!((ids.lengths.len(), ids.coordinates), (0, Some(3)));
    }

    #[test]
    fn roles_of_parts_match_their_kinds() {
        let numbers = Leaf::Fixed(DType::U8);
        let mut forms = Vec::new();
        for leaf in [numbers, TEXT] {
            for masks in [&[][..], &[true], &[false, true], &[true, true, false]] {
                for leaf_mask in [None, Some(0), Some(1), Some(2)] {
                    forms.push(ragged(masks, &[2, 3], leaf, leaf_mask));
                }
            }
            for (layout, mask) in [(SparseLayout::Coo, true), (SparseLayout::Csr, false)] {
                forms.push(sparse(layout, 2, leaf, mask));
            }
        }
        for form in forms {
            let (parts, ids) = (form.parts(), PartIds::new(&form, 0));
            let kind = |id: PartId| parts[id as usize].kind;
            let mut seen: Vec<PartId> = (0..6).filter_map(|level| ids.mask_at(level)).collect();
            assert!(seen.iter().all(|&id| kind(id) == PartKind::Valid), "{form:?}");
            assert!(ids.lengths.iter().all(|&id| kind(id) == PartKind::Lengths), "{form:?}");
            seen.extend(ids.lengths.iter().copied().chain(ids.coordinates));
            match ids.values {
                ValueParts::Elements(dtype, id) => {
                    assert_eq!(kind(id), PartKind::Values(dtype), "{form:?}");
                    seen.push(id);
                }
                ValueParts::Text { to, .. } => {
                    assert_eq!((kind(to.lengths), kind(to.bytes)), (PartKind::Lengths, PartKind::Bytes));
                    seen.extend([to.lengths, to.bytes]);
                }
            }
            seen.sort_unstable();
            assert_eq!(seen, (0..parts.len() as u32).collect::<Vec<_>>(), "{form:?}");
        }
    }

    #[test]
    fn absent_values_are_marked_and_have_the_length_of_their_level() {
        let form = ragged(&[true, false], &[3, 4], Leaf::Fixed(DType::I32), Some(1));
        let ids = PartIds::new(&form, 0); // Indices: mask, lengths, lengths, leaf mask, values.
        let absent = |level| {
            let Absent { mask, lengths, values } = ids.absent(&form, level);
            (mask, lengths, values)
        };
        assert_eq!(absent(0), (Some((0, 1)), Some(1), 0));
        assert_eq!(absent(1), (None, Some(2), 0));
        assert_eq!(absent(2), (Some((3, 3)), None, 12));
        assert_eq!(absent(3), (Some((3, 1)), None, 4));
        // A level inside of the level that the mask marks.
        assert_eq!(absent(4), (None, None, 1));

        let csr = sparse(SparseLayout::Csr, 1, TEXT, true);
        let ids = PartIds::new(&csr, 0);
        let row = ids.absent(&csr, 0);
        assert_eq!((row.mask, row.lengths, row.values), (Some((0, 1)), Some(1), 0));
        let entry = ids.absent(&csr, 1);
        assert_eq!((entry.mask, entry.lengths, entry.values), (None, None, 1));
        let coo = sparse(SparseLayout::Coo, 1, TEXT, false);
        let row = PartIds::new(&coo, 0).absent(&coo, 0);
        assert_eq!((row.mask, row.lengths, row.values), (None, None, 0));
    }
}
