//! Indexed files: the chunks of their rows, and the settings for parsing fields.

use std::sync::Arc;

use fastpipe_batch::Chunk;

use crate::dialect::Dialect;
use crate::header::Header;
use crate::plan::Layout;

/// A chunk: consecutive whole rows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct CsvChunk {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes, including empty lines and comments.
    pub len: u32,
    /// Number of rows.
    pub rows: u32,
    /// Number of ragged rows that are skipped.
    pub skipped: u32,
}

impl From<&CsvChunk> for Chunk {
    fn from(chunk: &CsvChunk) -> Chunk {
        let CsvChunk { offset, len, rows, .. } = *chunk;
        Chunk { offset, len, rows }
    }
}

/// A file whose rows were found.
#[derive(Clone, Debug)]
pub struct CsvFile {
    /// The path of the file.
    pub path: Arc<str>,
    /// The header of the file.
    pub header: Header,
    /// The chunks of its rows.
    pub chunks: Vec<CsvChunk>,
}

/// The settings for parsing fields.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) dialect: Dialect,
    pub(crate) layout: Layout,
    pub(crate) decimal: u8,
    /// Whether a null could be parsed as a number.
    pub(crate) numeric_nulls: bool,
    /// Whether floats reject values that they can't keep.
    pub(crate) lossless: bool,
}
