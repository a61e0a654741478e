//! The operations of a plan.

use std::sync::Arc;

use fastpipe_batch::{DType, LengthRule, PartId, TextParts};

use super::scalar::{Span, Wire};
use crate::varint::Head;

/// Constant values to write.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Emit {
    pub(crate) part: PartId,
    pub(crate) value: Box<[u8]>,
    pub(crate) times: usize,
}

/// One operation.
#[derive(Clone, Debug, PartialEq)]
pub(crate) enum Op {
    /// Skips bytes.
    Skip(u64),
    /// Skips varints.
    SkipVarints(u32),
    /// Skips a string or bytes.
    SkipText,
    /// Skips an array or map, in one jump where it has a byte count.
    SkipItems {
        body: Span,
        smallest: u64,
        fixed: Option<u64>,
    },
    /// Skips an array of varints.
    SkipVarintItems,
    /// Skips the branch of a union.
    SkipUnion {
        branches: Span,
    },
    /// Skips a record by its own program.
    SkipRecord {
        program: u32,
    },

    /// Reads the index of a union of one branch.
    Branch,
    /// Reads `[null, T]` or `[T, null]`.
    Nullable {
        null: i64,
        body: Span,
        on_null: Option<Span>,
    },
    /// Reads any other union: the operations for each of its branches.
    Union {
        branches: Span,
    },
    /// A value that doesn't become the reader's: which of the table of reasons.
    Refuse {
        refusal: u32,
    },
    /// A run of scalars of a record: a stretch of the table of scalars, and how many cells they fill.
    Scalars {
        scalars: Span,
        cells: u32,
    },
    /// Writes constants.
    Emit(Span),
    /// A value of type null: writes constants, or fails.
    Null {
        on_null: Option<Span>,
    },

    /// One number.
    Number {
        wire: Wire,
        to: DType,
        part: PartId,
    },
    /// The bytes of a value, which is skipped.
    Encoded {
        body: Span,
        to: TextParts,
    },
    /// A string or bytes.
    Text {
        check: bool,
        to: TextParts,
    },
    /// Fixed, as bytes.
    FixedText {
        size: usize,
        to: TextParts,
    },
    /// Fixed, as numbers.
    FixedArray {
        size: usize,
        part: PartId,
    },
    /// A UUID of 16 bytes as text.
    UuidText {
        to: TextParts,
    },
    /// A UUID's text as 16 bytes.
    UuidBytes {
        part: PartId,
    },
    /// A decimal: index into the table of decimals.
    Decimal(u32),
    /// An enum's symbol as a code: index into the table of codes.
    EnumCode {
        codes: u32,
        to: DType,
        part: PartId,
    },
    /// An enum's symbol as text.
    EnumText {
        codes: u32,
        to: TextParts,
    },

    /// An array of numbers: the innermost dimension of one column.
    Numbers {
        wire: Wire,
        to: DType,
        part: PartId,
        rule: LengthRule,
        lengths: Option<PartId>,
        pad: Span,
    },
    /// An array of a known number of floats or doubles, whose encoding is their form in memory.
    Floats {
        head: Head,
        bytes: usize,
        wire: Wire,
        to: DType,
        part: PartId,
        count: usize,
    },
    /// Any other array or map.
    Items {
        body: Span,
        over: Span,
        smallest: u64,
        columns: u32,
        rule: LengthRule,
        lengths: Span,
        pad: Span,
    },
    /// Reads the same bytes several times.
    Tee {
        passes: Span,
    },
    /// A sparse record.
    Sparse(u32),
    /// Text as an index: one key, the array around keys, and an array of names, terms and values.
    Key(u32),
    KeyItems(u32),
    Bag(u32),
    /// Writes the values of the partition columns of the file: constants that are stored with the block.
    Folders,
}

/// The symbols of an enum as they are numbered in its column.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EnumTable {
    /// For each symbol of the file its code in the column.
    pub(crate) codes: Vec<i64>,
    /// For each symbol of the file its text.
    pub(crate) symbols: Arc<[String]>,
    /// For each symbol of the file whether a reader's schema doesn't know it; empty if it knows all.
    pub(crate) unknown: Arc<[bool]>,
}

/// How the bytes of a decimal are found.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecimalBytes {
    /// Their count comes before them.
    Counted,
    /// As many as the type has.
    Fixed(usize),
    /// As those of an integer.
    Int,
    Long,
}

/// How a decimal is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DecimalOp {
    pub(crate) bytes: DecimalBytes,
    pub(crate) to: DType,
    pub(crate) part: PartId,
    /// What integers are multiplied with; `None` if that is beyond 128 bits.
    pub(crate) factor: Option<i128>,
    /// The decimal's own decimal places.
    pub(crate) scale: u32,
    /// Whether the integer is written in two halves.
    pub(crate) pair: bool,
}

/// A field of a sparse record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SparseField {
    pub(crate) what: SparseWhat,
    /// The unions around the array: for each, which branch is null, and how many there are.
    pub(crate) unions: Vec<(Option<i64>, u32)>,
    /// Whether a null array counts as empty.
    pub(crate) null_is_empty: bool,
    /// Bytes that an item takes at least.
    pub(crate) smallest: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SparseWhat {
    /// Indices of a dimension below a bound.
    Indices { wire: Wire, dim: usize, bound: u64 },
    /// Values, by the operations that read one.
    Values {
        body: Span,
        numbers: Option<(Wire, DType, PartId)>,
    },
}

impl SparseWhat {
    /// The dimension of indices, `None` for values.
    pub(crate) fn dim(&self) -> Option<u32> {
        match self {
            SparseWhat::Indices { dim, .. } => Some(*dim as u32),
            SparseWhat::Values { .. } => None,
        }
    }
}

/// How a sparse record is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SparseOp {
    pub(crate) fields: Vec<SparseField>,
    pub(crate) dims: usize,
    /// Whether coordinates begin with the batch index.
    pub(crate) batch_index: bool,
    pub(crate) check: bool,
    pub(crate) coordinates: PartId,
    pub(crate) lengths: Option<PartId>,
}
