//! Writes the indices of the buckets of numbers.

use fastpipe_batch::{Buckets, DType, ErrorKind, NAN, Sink, UNKNOWN};

use crate::field_error::FieldError;
use crate::plan::Target;
use crate::unit::Rows;
use crate::values::{float, integer};
use crate::writing::quoted;

impl Rows {
    /// Parses a number and writes the index of its bucket. An integer of 64 bits isn't rounded.
    pub(crate) fn bucket_of(
        &self,
        text: &[u8],
        buckets: &Buckets,
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), FieldError> {
        if self.reading.dialect.stands_for_null(text) {
            return self.null(text, dtype, cell, target, out);
        }
        let trimmed = text.trim_ascii();
        let index = if let Some((value, n)) = integer(trimmed)
            && n == trimmed.len()
        {
            buckets.of_integer(value)
        } else if let Some((value, n)) = float::<f64>(trimmed, self.reading.decimal)
            && n == trimmed.len()
        {
            buckets.of_float(value)
        } else {
            let reason = format!(
                "cannot parse {} as a number, which a bucket needs: VocabularySpec and HashSpec read text as indices",
                quoted(text)
            );
            return Err(FieldError::Value(ErrorKind::ValueRange, reason));
        };
        if index == UNKNOWN {
            return Err(FieldError::Value(ErrorKind::ValueRange, NAN.into()));
        }
        self.index(index, dtype, cell, target, out)
    }
}
