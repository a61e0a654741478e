//! Long operations that the caller can interrupt.

use std::time::Duration;

use fastpipe_batch::Error;

/// Time between two checks by the caller whether to interrupt the work, for example because of a signal.
pub const LOOK_AFTER: Duration = Duration::from_millis(20);

/// Called every few milliseconds with the number of bytes of a file processed so far. An error stops the work.
pub type OnProgress<'a, E> = dyn FnMut(u64) -> Result<(), E> + 'a;

/// The reason why work ended early.
#[derive(Debug)]
pub enum Halt<E> {
    /// The work failed.
    Failed(Error),
    /// The caller stopped it.
    Interrupted(E),
}

impl<E> From<Error> for Halt<E> {
    fn from(error: Error) -> Self {
        Halt::Failed(error)
    }
}
