//! Constants that are written in place of values: for nulls and for padding.

use fastpipe_batch::{Error, PartId, Scalar, ValueParts};

use crate::field_path::misfit;
use crate::layout::Column;
use crate::plan::Emit;

/// Returns the constants that replace a missing value at a level of a column. If `null` is set, ragged dimensions are
/// empty. Otherwise the constants are padding, which occurs only within fixed dimensions.
pub(crate) fn constants(column: &Column, level: usize, fill: Option<&Scalar>, null: bool) -> Result<Vec<Emit>, Error> {
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
    let absent = column.parts.absent(&column.spec.form, level);
    debug_assert!(null || absent.lengths.is_none());
    if let Some((mask, times)) = absent.mask {
        constant(mask, &[0], times);
    }
    if let Some(lengths) = absent.lengths {
        constant(lengths, &0i64.to_le_bytes(), 1);
    }
    let times = absent.values;
    if times == 0 {
        return Ok(emits);
    }
    match column.parts.values {
        ValueParts::Elements(dtype, part) => {
            let value = fill.map_or_else(|| Ok(vec![0; dtype.size()]), |f| f.element(dtype))?;
            constant(part, &value, times);
        }
        ValueParts::Text { to, .. } => {
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
