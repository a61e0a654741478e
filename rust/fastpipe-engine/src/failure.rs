//! The cause of an error.

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_files::Files;

use crate::working_memory::WorkingMemory;

/// Returns the cause of an error if it is known, and the error itself otherwise. If memory ran out, the cause is the
/// error of the allocator, since arenas only report that they can't grow. If the data looks damaged, the cause may be
/// that the file changed.
pub(crate) fn explained(error: Error, working_memory: &WorkingMemory, files: &Files) -> Error {
    match error.kind() {
        ErrorKind::Limit | ErrorKind::OutOfMemory => working_memory.memory().slabs().take_failure().unwrap_or(error),
        ErrorKind::Malformed | ErrorKind::Shape | ErrorKind::ValueRange | ErrorKind::Null => {
            files.change_behind(&error).unwrap_or(error)
        }
        _ => error,
    }
}
