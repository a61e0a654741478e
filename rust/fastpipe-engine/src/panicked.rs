//! Conversion of panics to errors.

use fastpipe_batch::{Error, ErrorKind};

/// Converts a panic, which is a bug in fastpipe, to an error.
#[cold]
pub fn panicked(panic: &(dyn std::any::Any + Send)) -> Error {
    let text = panic
        .downcast_ref::<&str>()
        .map(|s| (*s).to_owned())
        .or_else(|| panic.downcast_ref::<String>().cloned())
        .unwrap_or_default();
    Error::new(ErrorKind::Internal, text)
}
