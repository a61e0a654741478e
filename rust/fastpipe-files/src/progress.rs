//! Work that takes long, and that its caller can end.

use std::time::Duration;

use fastpipe_batch::Error;

/// Time between two looks of a caller at what may end the work, such as signals.
pub const LOOK_AFTER: Duration = Duration::from_millis(20);

/// Called every few milliseconds with the number of bytes of a file that were read. Its error ends the work.
pub type OnProgress<'a, E> = dyn FnMut(u64) -> Result<(), E> + 'a;

/// Why work ended before its time.
#[derive(Debug)]
pub enum Halt<E> {
    /// It failed.
    Failed(Error),
    /// Its caller ended it.
    Interrupted(E),
}

impl<E> From<Error> for Halt<E> {
    fn from(error: Error) -> Self {
        Halt::Failed(error)
    }
}
