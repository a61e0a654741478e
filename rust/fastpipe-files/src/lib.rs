//! Files: reading them, detecting changes, and opening them with their blocks.
//!
//! [`SourceFile`] reads one file by position. [`Files`] is the set of files of a source while a pass reads it. Before a
//! file is read, it is opened: its header is read, and its blocks are found by a walk through the file or in an
//! [`IndexCache`] ([`open_all`]). The file's [`Format`] defines the header and how the blocks are found.
//!
//! The text of compressed files is also read by position: see [`CompressedText`] and [`TextFiles`].
//!
//! This crate contains no Python code and no thread pool. While it opens files, it reports progress to the caller every
//! few milliseconds ([`OnProgress`]). The caller can stop it by returning an error.
#![forbid(unsafe_code)]

mod compressed;
mod file_set;
mod format;
mod head;
mod index_cache;
mod indexed_file;
mod indexed_files;
mod log_record;
mod neighbors;
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
pub use indexed_file::{CacheOutcome, Opened};
pub use indexed_files::{Found, Opening, open_all};
pub use log_record::{Level, LogRecord};
pub use neighbors::{REQUEST_BYTES, joined};
pub use progress::{Halt, LOOK_AFTER, OnProgress};
pub use storage::SourceFile;
pub use survey::{LOOKED_AT_WHOLE, Survey, survey};
pub use walk::{walk, walk_front};
