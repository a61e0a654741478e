//! Reads numbers as the indices of their buckets.

use fastpipe_batch::UNKNOWN;

use super::decimal::divided;
use super::{Decoder, Result};
use crate::decode_error::DecodeError;
use crate::number;
use crate::plan::{BucketOp, Encoded, Wire};

impl Decoder<'_, '_, '_, '_> {
    /// Reads one number.
    #[inline(always)]
    pub(super) fn bucket(&mut self, op: &BucketOp) -> Result<()> {
        let buckets = &*op.buckets;
        let index = match op.encoded {
            Encoded::Number(wire) => match wire {
                Wire::Boolean => buckets.of_integer(self.cursor.boolean()?.into()),
                Wire::Int => buckets.of_integer(self.cursor.int()?.into()),
                Wire::Long => buckets.of_integer(self.cursor.long()?.into()),
                Wire::IntRounded => buckets.of_float(self.cursor.int()? as f64),
                Wire::LongRounded => buckets.of_float(self.cursor.long()? as f64),
                Wire::Float => buckets.of_float(f32::from_le_bytes(self.cursor.array()?).into()),
                Wire::Double => buckets.of_float(f64::from_le_bytes(self.cursor.array()?)),
            },
            Encoded::Decimal(bytes, scale) => {
                let value = self.unscaled(bytes)?.ok_or(DecodeError::Decimal { dtype: op.to })?;
                buckets.of_float(divided(value, scale))
            }
        };
        if index == UNKNOWN {
            return Err(DecodeError::Nan);
        }
        number::code(index, op.to, self.out.writer(op.part as usize))
    }
}
