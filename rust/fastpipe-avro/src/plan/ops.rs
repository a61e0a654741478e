//! Operations of a plan.

use std::sync::Arc;

use fastpipe_batch::{DType, LengthRule, PartId, TextParts};

use super::scalar::{Span, Wire};
use crate::varint::Head;

/// Constant values to write to a column.
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
    /// Skips an array or map. Blocks with a byte count are skipped in one jump.
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
    /// Skips a record by calling its program.
    SkipRecord {
        program: u32,
    },

    /// Reads the index of a union with one branch.
    Branch,
    /// Reads `[null, T]` or `[T, null]`.
    Nullable {
        null: i64,
        body: Span,
        on_null: Option<Span>,
    },
    /// Reads any other union, with a program for each branch.
    Union {
        branches: Span,
    },
    /// Fails because a value doesn't resolve to the reader's type. Contains the index of the error text.
    Refuse {
        refusal: u32,
    },
    /// Reads a run of scalars of a record: a range of the table of scalars, and the number of cells that they fill.
    Scalars {
        scalars: Span,
        cells: u32,
    },
    /// Writes constants.
    Emit(Span),
    /// Reads a value of type null: writes constants, or fails.
    Null {
        on_null: Option<Span>,
    },

    /// Reads one number.
    Number {
        wire: Wire,
        to: DType,
        part: PartId,
    },
    /// Copies the encoded bytes of a value, without decoding it.
    Encoded {
        body: Span,
        to: TextParts,
    },
    /// Reads a string or bytes.
    Text {
        check: bool,
        to: TextParts,
    },
    /// Reads a fixed as bytes.
    FixedText {
        size: usize,
        to: TextParts,
    },
    /// Reads a fixed as an array of numbers.
    FixedArray {
        size: usize,
        part: PartId,
    },
    /// Reads a UUID of 16 bytes as text.
    UuidText {
        to: TextParts,
    },
    /// Reads the text of a UUID as 16 bytes.
    UuidBytes {
        part: PartId,
    },
    /// Reads a decimal. Contains an index into the table of decimals.
    Decimal(u32),
    /// Reads an enum's symbol as a code. Contains an index into the table of codes.
    EnumCode {
        codes: u32,
        to: DType,
        part: PartId,
    },
    /// Reads an enum's symbol as text.
    EnumText {
        codes: u32,
        to: TextParts,
    },

    /// Reads an array of numbers: the innermost dimension of one column.
    Numbers {
        wire: Wire,
        to: DType,
        part: PartId,
        rule: LengthRule,
        lengths: Option<PartId>,
        pad: Span,
    },
    /// Reads an array of a fixed number of floats or doubles, whose encoding equals their representation in memory.
    Floats {
        head: Head,
        bytes: usize,
        wire: Wire,
        to: DType,
        part: PartId,
        count: usize,
    },
    /// Reads any other array or map.
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
    /// Reads a sparse record.
    Sparse(u32),
    /// Reads text as indices of a vocabulary: one key, an array of keys, or an array of names, terms and values.
    Key(u32),
    KeyItems(u32),
    Bag(u32),
    /// Reads a number as the index of its bucket. Contains an index into the table of buckets.
    Bucket(u32),
    /// Writes the values of the file's partition columns, which are constants of the block.
    Folders,
}

/// The symbols of an enum and their codes in a column.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct EnumTable {
    /// The code in the column of each symbol of the file.
    pub(crate) codes: Vec<i64>,
    /// The text of each symbol of the file.
    pub(crate) symbols: Arc<[String]>,
    /// Whether a reader's schema lacks the symbol, for each symbol of the file; empty if it has all of them.
    pub(crate) unknown: Arc<[bool]>,
}

/// How the bytes of a decimal are delimited.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum DecimalBytes {
    /// A length precedes the bytes.
    Counted,
    /// The type fixes the number of bytes.
    Fixed(usize),
    /// The decimal is an int or a long.
    Int,
    Long,
}

/// How a decimal is read.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct DecimalOp {
    pub(crate) bytes: DecimalBytes,
    pub(crate) to: DType,
    pub(crate) part: PartId,
    /// Factor that integers are multiplied by; `None` if it exceeds 128 bits.
    pub(crate) factor: Option<i128>,
    /// Number of decimal places in the file.
    pub(crate) scale: u32,
    /// Whether the integer is written as two 64-bit halves.
    pub(crate) pair: bool,
}

/// A field of a sparse record.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct SparseField {
    pub(crate) what: SparseWhat,
    /// The unions around the array: the index of the null branch and the number of branches of each.
    pub(crate) unions: Vec<(Option<i64>, u32)>,
    /// Whether a null array counts as empty.
    pub(crate) null_is_empty: bool,
    /// Minimum number of bytes of an item.
    pub(crate) smallest: u64,
}

#[derive(Clone, Debug, PartialEq)]
pub(crate) enum SparseWhat {
    /// Indices of one dimension, which must be less than `bound`.
    Indices { wire: Wire, dim: usize, bound: u64 },
    /// Values, and the operations that read one.
    Values {
        body: Span,
        numbers: Option<(Wire, DType, PartId)>,
    },
}

impl SparseWhat {
    /// Returns the dimension of indices, or `None` for values.
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
