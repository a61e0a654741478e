//! The result of one step of a decoder, and the errors of decoders.

use fastpipe_batch::{Error, ErrorKind};

/// The result of one step of a decoder.
pub(super) struct Step {
    /// Bytes of text written.
    pub(super) wrote: usize,
    /// Whether the part ended after these bytes.
    pub(super) ended: bool,
}

#[cold]
pub(super) fn malformed(reason: impl Into<String>) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

#[cold]
pub(super) fn cut_short(what: &str) -> Error {
    malformed(format!("the file is cut short: it ends within {what}"))
}
