//! Indexed files: their rows in stretches, and the settings with which fields are read.

use std::sync::Arc;

use crate::dialect::Dialect;
use crate::header::Header;
use crate::plan::Layout;

/// Whole rows, one behind the other.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Stretch {
    /// Where they lie.
    pub offset: u64,
    /// Their bytes, and those of whatever stands between them.
    pub len: u32,
    /// How many they are.
    pub rows: u32,
}

/// A file whose rows were found.
#[derive(Clone, Debug)]
pub struct CsvFile {
    /// Its path.
    pub path: Arc<str>,
    /// What its first row says.
    pub header: Header,
    /// Where its rows are.
    pub stretches: Vec<Stretch>,
}

/// How fields are read.
#[derive(Debug)]
pub(crate) struct Reading {
    pub(crate) dialect: Dialect,
    pub(crate) layout: Layout,
    pub(crate) decimal: u8,
    /// Whether something that stands for no value could be taken for a number.
    pub(crate) numeric_nulls: bool,
    /// Whether floats refuse what they don't keep.
    pub(crate) lossless: bool,
}
