//! Operations of a plan that convert text to indices.

use std::sync::Arc;

use fastpipe_batch::{DType, Lookup, PartId};

use super::scalar::Span;
use crate::keys::Role;
use crate::schema::Unions;

/// The type that a key is read from.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Keys {
    /// A string or bytes.
    Text,
    /// A fixed with this number of bytes.
    Fixed(usize),
    /// An enum, with the index of each symbol, or `UNKNOWN`.
    Enum {
        indices: Vec<i64>,
        symbols: Arc<[String]>,
        /// Whether a reader's schema lacks the symbol, for each symbol; empty if it has all of them.
        unknown: Arc<[bool]>,
    },
}

/// How one key is converted to an index.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyOp {
    pub(crate) keys: Keys,
    pub(crate) lookup: Arc<Lookup>,
    /// Whether keys without an index are left out, and counted.
    pub(crate) drops: bool,
    pub(crate) to: DType,
    pub(crate) part: PartId,
    /// The mask that marks the index as valid; `None` if the column has no mask.
    pub(crate) valid: Option<PartId>,
}

/// How an array or map of keys is converted to a dimension of one column. Some keys may be left out.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct KeyItemsOp {
    /// Operations that read an item.
    pub(crate) body: Span,
    pub(crate) smallest: u64,
    /// Index of the operation that reads a key, if the items are plain text.
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
    /// Operations that skip the field, if it isn't a name, term or value.
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
    /// Whether entries without an index are left out, and counted.
    pub(crate) drops: bool,
    /// Whether entries with nulls are left out.
    pub(crate) null_is_left_out: bool,
    /// Whether coordinates begin with the batch index.
    pub(crate) batch_index: bool,
    pub(crate) coordinates: PartId,
    pub(crate) values: (DType, PartId),
    pub(crate) lengths: Option<PartId>,
}
