//! Files: how they are read, watched for changes, and opened with their blocks.
//!
//! [`LocalFile`] reads one file by position. [`Files`] are those of a source while a pass reads it. To be read, a file
//! is opened first: its header is read and its blocks are found, by a walk through it or in an [`IndexCache`]
//! ([`open`], [`open_all`]). What a header says, and how blocks follow one another, is a matter of the file's
//! [`Format`].
//!
//! The text of compressed files is read by position, too: see [`CompressedText`] and [`TextFiles`].
//!
//! Nothing here knows Python or a thread pool. Whoever opens files is told every few milliseconds how far it got
//! ([`OnProgress`]), and ends it by an error of its own.
#![forbid(unsafe_code)]

mod compressed;
mod file_set;
mod format;
mod head;
mod index_cache;
mod indexed_file;
mod indexed_files;
mod log_record;
mod progress;
mod storage;
mod survey;
#[cfg(test)]
mod toy;
mod walk;

pub use compressed::{CompressedText, Compression, Layout, MOST_GAP, Packed, Point, TextFiles};
pub use file_set::Files;
pub use format::{Extent, Format};
pub use index_cache::{IndexCache, Key, Lookup, Stamp};
pub use indexed_file::{CacheOutcome, Opened, open, open_front};
pub use indexed_files::{Found, Opening, open_all};
pub use log_record::{Level, LogRecord};
pub use progress::{Halt, LOOK_AFTER, OnProgress};
pub use storage::LocalFile;
pub use survey::{LOOKED_AT_WHOLE, Survey, survey};
pub use walk::{walk, walk_front};
