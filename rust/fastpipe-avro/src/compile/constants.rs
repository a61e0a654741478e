//! What is written where there is no value: nulls and padding.

use fastpipe_batch::{Error, Form, Scalar};

use crate::layout::{Column, Target};
use crate::plan::{Emit, PartId};
use crate::trace::misfit;

/// Whether a null at this level has a mask to be marked in.
pub(super) fn masked_at(column: &Column, level: usize) -> bool {
    match &column.spec.form {
        Form::Nested(form) if level < form.ragged => form.masks[level],
        Form::Nested(form) => form.leaf_mask.is_some_and(|dims| level - form.ragged <= dims),
        Form::Sparse(form) => form.mask && level == 0,
    }
}

/// The constants that stand for a value that isn't there, at a level of a column: nulls (`null`) empty ragged dimensions;
/// padding is always inside of fixed ones.
pub(super) fn constants(column: &Column, level: usize, fill: Option<&Scalar>, null: bool) -> Result<Vec<Emit>, Error> {
    let mut emits = Vec::new();
    let mut constant = |part: PartId, value: &[u8], times: usize| {
        if times > 0 && !value.is_empty() {
            emits.push(Emit {
                part,
                value: value.into(),
                times,
            });
        }
    };
    let zero_length = 0i64.to_le_bytes();
    let times = match &column.spec.form {
        Form::Nested(form) if level < form.ragged => {
            debug_assert!(null);
            if let Some(mask) = column.parts.masks[level] {
                constant(mask, &[0], 1);
            }
            constant(column.parts.lengths[level], &zero_length, 1);
            return Ok(emits);
        }
        Form::Nested(form) => {
            let passed = level - form.ragged;
            if let Some((dims, mask)) = column.parts.leaf_mask
                && passed <= dims
            {
                constant(mask, &[0], form.shape[passed..dims].iter().product());
            }
            form.shape[passed..].iter().product()
        }
        Form::Sparse(_) if level == 0 => {
            if let Some((_, mask)) = column.parts.leaf_mask {
                constant(mask, &[0], 1);
            }
            if let Some(&lengths) = column.parts.lengths.first() {
                constant(lengths, &zero_length, 1);
            }
            return Ok(emits);
        }
        Form::Sparse(_) => 1,
    };
    match column.parts.values {
        Target::Numbers(dtype, part) => {
            let value = fill.map_or_else(|| Ok(vec![0; dtype.size()]), |f| f.element(dtype))?;
            constant(part, &value, times);
        }
        Target::Text { to, .. } => {
            let value: &[u8] = match fill {
                None => &[],
                Some(Scalar::Bytes(bytes)) => bytes,
                Some(other) => return Err(misfit(format!("the fill or pad value {other:?} is not text"))),
            };
            constant(to.lengths, &(value.len() as i64).to_le_bytes(), times);
            constant(to.bytes, value, times);
        }
    }
    Ok(emits)
}
