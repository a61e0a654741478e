//! Errors of decoding a record, without a location in the file. They are small, because each decoded value may return
//! one.

use std::borrow::Cow;

use fastpipe_batch::{Error, ErrorKind, Lengths, Overflow};

use crate::wire::Fault;

/// The reason why a value couldn't be decoded.
pub(crate) enum Trouble {
    /// The value couldn't be written.
    Overflow(Overflow),
    /// The bytes are not a message.
    Fault(Fault),
    /// The value doesn't fit its spec.
    Misfit(Box<Misfit>),
}

/// A value that doesn't fit its spec.
pub(crate) struct Misfit {
    pub(crate) kind: ErrorKind,
    pub(crate) reason: String,
    pub(crate) lengths: Option<Lengths>,
}

impl Trouble {
    #[cold]
    pub(crate) fn misfit(kind: ErrorKind, reason: impl Into<String>) -> Trouble {
        Trouble::Misfit(Box::new(Misfit {
            kind,
            reason: reason.into(),
            lengths: None,
        }))
    }

    /// Returns the error for a chunk that starts at `offset` of its file.
    #[cold]
    pub(crate) fn into_error(self, offset: u64) -> Error {
        match self {
            Trouble::Overflow(overflow) => overflow.into(),
            Trouble::Fault(fault) => fault.into_error(offset),
            Trouble::Misfit(misfit) => {
                let error = Error::new(misfit.kind, misfit.reason);
                match misfit.lengths {
                    Some(lengths) => error.with_lengths(lengths),
                    None => error,
                }
            }
        }
    }
}

impl From<Overflow> for Trouble {
    fn from(overflow: Overflow) -> Trouble {
        Trouble::Overflow(overflow)
    }
}

impl From<Fault> for Trouble {
    fn from(fault: Fault) -> Trouble {
        Trouble::Fault(fault)
    }
}

/// Maximum number of bytes of a value in an error message.
const QUOTED: usize = 80;

/// Returns a value in quotes, for error messages.
pub(crate) fn quoted(text: &[u8]) -> String {
    let more = if text.len() > QUOTED { " …" } else { "" };
    format!("{:?}{more}", abridged(text))
}

/// Returns the first bytes of a text.
pub(crate) fn abridged(text: &[u8]) -> Cow<'_, str> {
    String::from_utf8_lossy(&text[..text.len().min(QUOTED)])
}
