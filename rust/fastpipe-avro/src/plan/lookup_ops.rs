//! Operations of a plan that turn text into indices.

use std::sync::Arc;

use fastpipe_batch::{DType, Lookup, PartId};

use super::scalar::Span;
use crate::keys::Role;
use crate::schema::Unions;

/// Where a key is read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Keys {
    /// A string or bytes.
    Text,
    /// So many bytes.
    Fixed(usize),
    /// An enum: for each symbol its index, or `UNKNOWN`.
    Enum {
        indices: Vec<i64>,
        symbols: Arc<[String]>,
        /// The symbols that a reader's schema doesn't know, if there are such.
        unknown: Arc<[bool]>,
    },
}

/// How one key becomes an index.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyOp {
    pub(crate) keys: Keys,
    pub(crate) lookup: Arc<Lookup>,
    pub(crate) to: DType,
    pub(crate) part: PartId,
    /// Where is marked that it is no null, if it isn't left out.
    pub(crate) valid: Option<PartId>,
}

/// How an array, or a map, of keys becomes a dimension of one column: some may be left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyItemsOp {
    /// What reads an item.
    pub(crate) body: Span,
    pub(crate) smallest: u64,
    /// The number of the operation that reads a key, if items are nothing but text.
    pub(crate) texts: Option<u32>,
    pub(crate) to: DType,
    pub(crate) part: PartId,
    pub(crate) lengths: Option<PartId>,
}

/// A field of a bag's entries.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BagField {
    pub(crate) role: Role,
    pub(crate) unions: Unions,
    /// What skips a field that is none of name, term and value.
    pub(crate) skip: Span,
}

/// How a bag is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct BagOp {
    pub(crate) fields: Vec<BagField>,
    /// The unions around an entry.
    pub(crate) unions: Unions,
    pub(crate) smallest: u64,
    pub(crate) lookup: Arc<Lookup>,
    /// Whether entries with nulls are left out.
    pub(crate) null_is_left_out: bool,
    /// Whether coordinates begin with the batch index.
    pub(crate) batch_index: bool,
    pub(crate) coordinates: PartId,
    pub(crate) values: (DType, PartId),
    pub(crate) lengths: Option<PartId>,
}
