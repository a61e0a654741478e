//! Errors of fields.

use fastpipe_batch::{ErrorKind, Overflow};

use crate::fields::LoneReturn;

/// The reason why a field couldn't be read.
pub(crate) enum FieldError {
    /// Writing to the slot failed.
    Overflow(Overflow),
    /// The value is invalid. Contains the kind of the error and the reason.
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
