//! What is behind an error.

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_files::Files;

use crate::working_memory::WorkingMemory;

/// The error, or what is behind it: the allocator's where that had no memory, since arenas that can't grow only say
/// that there is none; and the change of a file where that looks like damage.
pub(crate) fn explained(error: Error, working_memory: &WorkingMemory, files: &Files) -> Error {
    match error.kind() {
        ErrorKind::Limit | ErrorKind::OutOfMemory => working_memory.memory().slabs().take_failure().unwrap_or(error),
        ErrorKind::Malformed | ErrorKind::Shape | ErrorKind::ValueRange | ErrorKind::Null => {
            files.change_behind(&error).unwrap_or(error)
        }
        _ => error,
    }
}
