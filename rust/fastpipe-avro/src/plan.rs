//! The decode plan: the requested columns of a file, compiled once into a flat list of operations.
//!
//! The decoder only runs the plan. It doesn't walk the schema, look up names, allocate memory, or create dynamic values
//! for each record. Bodies of arrays, maps and unions are ranges ([`Span`]) of the same list. Operations that know the
//! width of unwanted values skip them.

mod bucket_ops;
mod lookup_ops;
mod ops;
mod per_schema;
mod scalar;

pub(crate) use self::bucket_ops::{BucketOp, Encoded};
pub(crate) use self::lookup_ops::{BagField, BagOp, KeyItemsOp, KeyOp, Keys};
pub(crate) use self::ops::{DecimalBytes, DecimalOp, Emit, EnumTable, Op, SparseField, SparseOp, SparseWhat};
pub(crate) use self::per_schema::{Plans, laid_out};
pub(crate) use self::scalar::{NO_CELL, Null, Scalar, ScalarKind, Span, Wire};

use std::sync::Arc;

use fastpipe_batch::{Lengths, PartId};

use crate::decode_error::DecodeError;
use crate::isa::Isa;

/// The field and feature of an operation, for errors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// Path of the field.
    pub(crate) path: Arc<str>,
    /// The feature that reads the field, if its name differs.
    pub(crate) feature: Option<Arc<str>>,
}

/// A compiled plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) ops: Vec<Op>,
    /// For each operation, the index of its entry in `places`.
    pub(crate) op_places: Vec<u32>,
    pub(crate) places: Vec<Place>,
    pub(crate) emits: Vec<Emit>,
    pub(crate) parts: Vec<PartId>,
    pub(crate) spans: Vec<Span>,
    pub(crate) enums: Vec<EnumTable>,
    pub(crate) decimals: Vec<DecimalOp>,
    /// Reasons why values don't resolve to the reader's type.
    pub(crate) refusals: Vec<Arc<str>>,
    pub(crate) sparse: Vec<SparseOp>,
    pub(crate) keys: Vec<KeyOp>,
    pub(crate) key_items: Vec<KeyItemsOp>,
    pub(crate) bags: Vec<BagOp>,
    pub(crate) buckets: Vec<BucketOp>,
    pub(crate) programs: Vec<Span>,
    pub(crate) scalars: Vec<Scalar>,
    /// Parts that only scalars write, in ascending order.
    pub(crate) cells: Arc<[PartId]>,
    /// Parts whose bytes must be UTF-8.
    pub(crate) texts: Vec<PartId>,
    pub(crate) record: Span,
    pub(crate) skip: Span,
    /// Minimum number of bytes of a record.
    pub(crate) smallest: u64,
    /// The instructions to read with.
    pub(crate) isa: Isa,
}

impl Plan {
    /// Returns the mismatching lengths of an error at an operation, if the error is about lengths.
    #[cold]
    pub(crate) fn lengths(&self, fault: DecodeError, at: u32) -> Option<Lengths> {
        match fault {
            DecodeError::ShapeExact { expected, found } => Some(Lengths::Dimension {
                dimension: self.arrays_around(self.record, at)?,
                expected,
                found,
            }),
            DecodeError::SparseLengths { expected, found, dim } => {
                let Op::Sparse(number) = *self.ops.get(at as usize)? else {
                    return None;
                };
                let first = self.sparse[number as usize].fields.first()?.what.dim();
                Some(Lengths::Sparse {
                    first: (first, expected),
                    other: (dim, found),
                })
            }
            _ => None,
        }
    }

    /// Returns the number of arrays around an operation within a span.
    fn arrays_around(&self, span: Span, at: u32) -> Option<u32> {
        (span.start..span.end).find_map(|pc| match &self.ops[pc as usize] {
            _ if pc == at => Some(0),
            Op::Items { body, .. } => self.arrays_around(*body, at).map(|inner| inner + 1),
            Op::Nullable { body, .. } => self.arrays_around(*body, at),
            Op::Tee { passes } | Op::Union { branches: passes } => passes
                .of(&self.spans)
                .iter()
                .find_map(|pass| self.arrays_around(*pass, at)),
            _ => None,
        })
    }
}
