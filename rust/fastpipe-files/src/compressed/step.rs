//! The result of a step of a decoder, and errors of decoders.

use fastpipe_batch::{Error, ErrorKind};

/// What a step of a decoder did.
pub(super) struct Step {
    /// Bytes of text that were written.
    pub(super) wrote: usize,
    /// Whether the part ended with them.
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
