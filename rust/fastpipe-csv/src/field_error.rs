//! Errors of fields.

use fastpipe_batch::{ErrorKind, Overflow};

use crate::fields::LoneReturn;

/// Why a field couldn't be read.
pub(crate) enum FieldError {
    /// Of the slot.
    Overflow(Overflow),
    /// It isn't what it should be: why, and what kind of error that is.
    Value(ErrorKind, String),
    LoneReturn(LoneReturn),
}

impl From<Overflow> for FieldError {
    fn from(overflow: Overflow) -> FieldError {
        FieldError::Overflow(overflow)
    }
}

impl From<LoneReturn> for FieldError {
    fn from(found: LoneReturn) -> FieldError {
        FieldError::LoneReturn(found)
    }
}
