//! Files that aren't on a local disk.

use std::fmt::Debug;
use std::sync::Arc;

use bytes::Bytes;

use crate::error::Error;

/// The size and time of a file when its units were found. A different stamp later means that the file was changed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct FileStamp {
    /// Its size in bytes.
    pub size: u64,
    /// Its modification time, in nanoseconds since 1970.
    pub modified: i128,
}

/// A file that isn't on a local disk. Each read waits for another machine.
pub trait Stored: Debug + Send + Sync {
    /// Returns the name of the file for errors.
    fn location(&self) -> &str;

    /// Returns the size and the modification time, which are known from a listing or from opening the file.
    fn stamp(&self) -> FileStamp;

    /// Returns a text that another version of the file doesn't have. Empty if the storage has no such text.
    fn version(&self) -> &str;

    /// Reads up to `out.len()` bytes from `offset`. Reads fewer only at the end of the file.
    ///
    /// # Errors
    /// If the file can't be read, or isn't the same as before; Closed soon after `cancelled` returns true.
    fn read_at(&self, offset: u64, out: &mut [u8], cancelled: &dyn Fn() -> bool) -> Result<usize, Error>;
}

/// The bytes of a file that isn't on a local disk.
#[derive(Clone, Debug)]
pub enum Contents {
    /// Bytes in memory.
    Memory(Bytes),
    /// A file in another storage.
    Remote(Arc<dyn Stored>),
}
