//! Files: how they are read, watched and indexed.
#![forbid(unsafe_code)]

mod index_cache;
mod open_files;
mod storage;

pub use index_cache::{IndexCache, Key, Lookup, Stamp};
pub use open_files::Files;
pub use storage::LocalFile;
