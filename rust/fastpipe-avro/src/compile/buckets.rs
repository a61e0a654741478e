//! Compiles numbers that are converted to the indices of their buckets.

use std::sync::Arc;

use fastpipe_batch::{Buckets, Error, Scalar, ValueParts};

use super::{Code, Compiler, Want, wire};
use crate::field_path::misfit;
use crate::layout::Column;
use crate::plan::{BucketOp, DecimalBytes, Encoded, Op};
use crate::schema::{Logical, NodeId, Type};

impl<'a> Compiler<'a> {
    /// Compiles a number.
    pub(super) fn bucket(
        &mut self,
        id: Option<NodeId>,
        buckets: &Arc<Buckets>,
        want: Want<'a>,
        path: &str,
        out: &mut Code,
    ) -> Result<(), Error> {
        let at = self.about(path, &[want]);
        let column = &self.columns[want.column];
        let other = || {
            let reason = format!("the field '{path}' has values of another type in this file, which have no buckets");
            misfit(reason).at_feature(&column.feature.name)
        };
        let (ValueParts::Elements(to, part), Some(id)) = (column.parts.values, id) else {
            return Err(other());
        };
        // Checks the greatest index now. So no index is out of range while rows are read.
        Scalar::Int(i128::from(buckets.size()) - 1).element(to).map_err(|_| {
            let greatest = buckets.size() - 1;
            let reason = format!("indices up to {greatest} don't fit {to}; request a larger dtype");
            misfit(reason).at_feature(&column.feature.name)
        })?;
        let node = self.schema.node(id);
        let encoded = match (&node.ty, node.logical) {
            (Type::Bytes, Some(Logical::Decimal { scale, .. })) => Encoded::Decimal(DecimalBytes::Counted, scale),
            (Type::Fixed(n), Some(Logical::Decimal { scale, .. })) => Encoded::Decimal(DecimalBytes::Fixed(*n), scale),
            (ty @ (Type::Int | Type::Long | Type::Float | Type::Double), None) => {
                Encoded::Number(wire(ty, want.rounds || node.rounds).ok_or_else(other)?)
            }
            _ => return Err(other()),
        };
        self.mark_valid(want, at, out);
        self.plan.buckets.push(BucketOp {
            encoded,
            buckets: buckets.clone(),
            to,
            part,
        });
        out.push(Op::Bucket(self.plan.buckets.len() as u32 - 1), at);
        Ok(())
    }
}

/// Returns what a default of this type writes to a column: the index of its bucket if the column has buckets. Returns
/// `None` if the default has no bucket.
pub(super) fn in_bucket(column: &Column, ty: &Type, default: Scalar) -> Option<Scalar> {
    let Some(buckets) = column.feature.lookup.as_ref().and_then(|lookup| lookup.buckets()) else {
        return Some(default);
    };
    let index = match default {
        Scalar::Int(value) => buckets.of_integer(value),
        Scalar::Float(value) if *ty == Type::Float => buckets.of_float(f64::from(value as f32)),
        Scalar::Float(value) => buckets.of_float(value),
        Scalar::Bool(_) | Scalar::Bytes(_) => return None,
    };
    Some(Scalar::Int(index.into()))
}
