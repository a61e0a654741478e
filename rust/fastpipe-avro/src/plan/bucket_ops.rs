//! Operations of a plan that convert numbers to the indices of their buckets.

use std::sync::Arc;

use fastpipe_batch::{Buckets, DType, PartId};

use super::ops::DecimalBytes;
use super::scalar::Wire;

/// How a number is encoded.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum Encoded {
    Number(Wire),
    /// A decimal with this number of decimal places.
    Decimal(DecimalBytes, u32),
}

/// How one number is converted to the index of its bucket.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BucketOp {
    pub(crate) encoded: Encoded,
    pub(crate) buckets: Arc<Buckets>,
    pub(crate) to: DType,
    pub(crate) part: PartId,
}
