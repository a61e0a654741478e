//! Columns and their layout.
//!
//! A column is nested: items in lists in lists in rows, all of which may be null. The *form* of a column is its layout
//! in a batch. Ragged dimensions are outermost and have offsets. Fixed dimensions are inside, and the values (leaves)
//! are innermost. Levels that may be null have masks. Level `l` is inside `l` dimensions, and level 0 is the row.

use std::sync::Arc;

use crate::dtype::Leaf;
use crate::feature::{Feature, Nulls, Request};
use crate::sparse::{SparseForm, SparseLayout};

/// A column of a batch.
#[derive(Clone, Debug, PartialEq)]
pub struct ColumnSpec {
    /// The feature's name.
    pub name: Arc<str>,
    /// The layout of the column.
    pub form: Form,
    /// For integers that represent decimals, the number of decimal places: the unit is 10^(-scale).
    pub scale: Option<i8>,
}

impl ColumnSpec {
    /// Creates a column whose values aren't scaled decimals.
    pub fn new(name: &str, form: Form) -> ColumnSpec {
        ColumnSpec {
            name: name.into(),
            form,
            scale: None,
        }
    }

    /// Whether the column is sparse in the layout of coordinates with the batch index.
    pub fn is_coo(&self) -> bool {
        matches!(&self.form, Form::Sparse(form) if form.layout == SparseLayout::Coo)
    }
}

/// The layout of a column.
#[derive(Clone, Debug, PartialEq)]
pub enum Form {
    /// Dense and ragged columns.
    Nested(NestedForm),
    /// Sparse columns, with coordinates and values.
    Sparse(SparseForm),
}

/// Dense (`ragged == 0`) and ragged columns.
#[derive(Clone, Debug, PartialEq)]
pub struct NestedForm {
    /// Number of ragged dimensions.
    pub ragged: usize,
    /// The fixed dimensions inside of the ragged ones.
    pub shape: Vec<usize>,
    /// The type of the innermost values.
    pub leaf: Leaf,
    /// Whether levels `0..ragged` have a mask.
    pub masks: Vec<bool>,
    /// The number of fixed dimensions that the mask of the innermost level spans. `None` if that level has no mask.
    pub leaf_mask: Option<usize>,
}

impl NestedForm {
    /// Creates a dense column without a mask.
    pub fn dense(shape: &[usize], leaf: Leaf) -> Self {
        NestedForm {
            ragged: 0,
            shape: shape.to_vec(),
            leaf,
            masks: Vec::new(),
            leaf_mask: None,
        }
    }

    /// Returns the number of values in one item of the innermost ragged level.
    pub fn width(&self) -> usize {
        self.shape.iter().product()
    }
}

impl Form {
    /// Returns the form of a feature. `nullable` says which levels of its field may be null. Missing levels are not
    /// nullable.
    ///
    /// The levels inside the last ragged dimension share one mask, at the innermost of these levels that may be null. A
    /// null at an outer level marks everything inside it.
    pub fn of(feature: &Feature, nullable: &[bool]) -> Form {
        let masked = |level: usize| feature.nulls == Nulls::Mask && nullable.get(level) == Some(&true);
        let nested = |ragged: usize, shape: Vec<usize>, leaf: Leaf| {
            let deepest = (ragged..=ragged + shape.len()).rev().find(|&level| masked(level));
            Form::Nested(NestedForm {
                ragged,
                leaf,
                masks: (0..ragged).map(masked).collect(),
                leaf_mask: deepest.map(|level| level - ragged),
                shape,
            })
        };
        match &feature.request {
            Request::Dense { shape, leaf, .. } => nested(0, shape.clone(), *leaf),
            Request::Ragged { shape, leaf } => {
                // Dimensions after the last ragged one are dimensions of the values.
                let ragged = shape.iter().rposition(Option::is_none).map_or(0, |i| i + 1);
                nested(ragged, shape[ragged..].iter().map(|d| d.unwrap_or(0)).collect(), *leaf)
            }
            Request::Sparse {
                shape, leaf, layout, ..
            } => Form::Sparse(SparseForm {
                layout: *layout,
                shape: shape.clone(),
                leaf: *leaf,
                mask: masked(0),
            }),
        }
    }

    /// Whether a null at a level can be marked in a mask.
    pub fn marks_null(&self, level: usize) -> bool {
        match self {
            Form::Nested(form) if level < form.ragged => form.masks[level],
            Form::Nested(form) => form.leaf_mask.is_some_and(|dims| level - form.ragged <= dims),
            Form::Sparse(form) => form.mask && level == 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dtype::DType;

    const NUMBERS: Leaf = Leaf::Fixed(DType::F32);

    fn form(request: Request, nulls: Nulls, nullable: &[bool]) -> Form {
        let feature = Feature {
            name: "x".into(),
            field: "x".into(),
            request,
            nulls,
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        };
        Form::of(&feature, nullable)
    }

    fn nested(shape: &[Option<usize>], nullable: &[bool]) -> NestedForm {
        let request = Request::Ragged {
            shape: shape.to_vec(),
            leaf: NUMBERS,
        };
        match form(request, Nulls::Mask, nullable) {
            Form::Nested(form) => form,
            Form::Sparse(_) => unreachable!("ragged"),
        }
    }

    #[test]
    fn dimensions_up_to_the_last_ragged_one_are_ragged() {
        let form = nested(&[None, Some(2), None, Some(3), Some(4)], &[]);
        assert_eq!((form.ragged, form.shape.as_slice()), (3, &[3, 4][..]));
        let request = Request::Dense {
            shape: vec![3, 4],
            leaf: NUMBERS,
            pad: None,
        };
        assert_eq!(
            self::form(request, Nulls::Mask, &[false; 3]),
            Form::Nested(NestedForm::dense(&[3, 4], NUMBERS))
        );
    }

    #[test]
    fn each_ragged_level_has_a_mask_and_inner_levels_share_one() {
        let shape = [None, None, Some(3), Some(4)];
        // Levels: the row, items of the first list, items of the second, arrays of 4, numbers.
        let masks = |nullable: &[bool]| {
            let form = nested(&shape, nullable);
            (form.masks, form.leaf_mask)
        };
        assert_eq!(masks(&[false; 5]), (vec![false, false], None));
        assert_eq!(masks(&[true, false, false, false, false]), (vec![true, false], None));
        assert_eq!(masks(&[false, true, true, false, false]), (vec![false, true], Some(0)));
        assert_eq!(masks(&[true, true, true, true, false]), (vec![true, true], Some(1)));
        assert_eq!(masks(&[false, false, true, false, true]), (vec![false, false], Some(2)));
        assert_eq!(masks(&[true]), (vec![true, false], None));
    }

    #[test]
    fn only_requested_masks_exist() {
        for nulls in [Nulls::Error, Nulls::Fill(None)] {
            let request = Request::Dense {
                shape: vec![2],
                leaf: NUMBERS,
                pad: None,
            };
            assert_eq!(
                form(request, nulls.clone(), &[true, true]),
                Form::Nested(NestedForm::dense(&[2], NUMBERS))
            );
            let request = Request::Sparse {
                shape: vec![None],
                leaf: NUMBERS,
                layout: SparseLayout::Csr,
                check_indices: true,
            };
            assert!(!form(request.clone(), nulls, &[true]).marks_null(0));
            assert!(form(request.clone(), Nulls::Mask, &[true]).marks_null(0));
            assert!(!form(request, Nulls::Mask, &[false]).marks_null(0));
        }
    }

    #[test]
    fn only_nulls_around_the_innermost_mask_are_marked_in_it() {
        let marked = |nullable: &[bool]| {
            let form = Form::Nested(nested(&[None, Some(3), Some(4)], nullable));
            (0..4).map(|level| form.marks_null(level)).collect::<Vec<_>>()
        };
        assert_eq!(marked(&[false; 4]), [false; 4]);
        assert_eq!(marked(&[true, false, false, false]), [true, false, false, false]);
        assert_eq!(marked(&[false, true, false, false]), [false, true, false, false]);
        assert_eq!(marked(&[false, false, true, false]), [false, true, true, false]);
        assert_eq!(marked(&[false, false, false, true]), [false, true, true, true]);
    }
}
