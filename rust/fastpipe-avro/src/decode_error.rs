//! Errors of decoding as small values. They are converted to an [`Error`] with a location only when they leave the
//! decoder.

use fastpipe_batch::{DType, Error, ErrorKind, NAN, Overflow};

use crate::limits::{
    LEAST_ZERO_WIDTH_ITEMS, MAX_DEPTH, MAX_METADATA_ENTRIES, MAX_ZERO_WIDTH, ZERO_WIDTH_ITEMS_PER_BYTE,
    ZERO_WIDTH_ITEMS_PER_STORED_BYTE,
};

/// The bound of indices in an open dimension: any non-negative index is valid.
pub(crate) const ANY_INDEX: u64 = 1 << 63;

/// A range of a block's bytes: its offset and length.
pub(crate) type Place = (u32, u32);

/// A key that the vocabulary doesn't contain.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum UnknownKey {
    /// Text in the block: a key, or a name and a term.
    Text(Place, Option<Place>),
    /// A symbol of an enum: the index of the operation that read it, and the index of the symbol.
    Symbol(u32, u32),
}

#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) enum DecodeError {
    /// Too few bytes are left.
    End {
        need: u64,
        left: u64,
    },
    /// A varint of more than ten bytes or more than 64 bits.
    Varint,
    Int(i64),
    Boolean(u8),
    Length(i64),
    ItemCount {
        count: u64,
        left: u64,
    },
    ItemBytes {
        declared: i64,
        found: i64,
    },
    ZeroWidth,
    /// Too many entries in a file's header.
    MetadataEntries,
    Depth,
    Branch {
        index: i64,
        branches: u32,
    },
    Symbol {
        index: i64,
        symbols: u32,
    },
    /// A symbol that the reader's schema lacks, without a default.
    UnknownSymbol {
        index: i64,
    },
    /// A value that doesn't resolve to the reader's type. Contains the index of the reason in the plan.
    Refused(u32),
    Uuid,
    /// A decimal with more digits than a dtype can represent.
    Decimal {
        dtype: DType,
    },
    Utf8,
    Null,
    /// A null entry of a bag, or an entry with a null name or value.
    NullEntry,
    UnknownKey(UnknownKey),
    /// NaN, for which no bucket was requested.
    Nan,
    ShapeExact {
        expected: u64,
        found: u64,
    },
    /// Numbers of entries of two arrays of a sparse record: the first one, and the one of a dimension or of the values.
    SparseLengths {
        expected: u64,
        found: u64,
        dim: Option<u32>,
    },
    Index {
        value: i64,
        dim: u32,
        bound: u64,
    },
    Range {
        value: i64,
        dtype: DType,
    },
    FloatRange {
        value: f64,
        dtype: DType,
    },
    Inexact {
        value: i64,
        dtype: DType,
    },
    LeftOver(u64),
    BehindMessage(u64),
    RecordEnd {
        found: u64,
        next: u64,
    },
    Write(Overflow),
}

impl From<Overflow> for DecodeError {
    #[cold]
    fn from(overflow: Overflow) -> DecodeError {
        DecodeError::Write(overflow)
    }
}

impl DecodeError {
    #[cold]
    pub(crate) fn into_error(self) -> Error {
        use ErrorKind::{Limit, Malformed, Null, Schema, Shape, ValueRange};
        let (kind, reason) = match self {
            DecodeError::End { need, left } => (Malformed, format!("expected {need} more bytes, found {left}")),
            DecodeError::Varint => (Malformed, "expected a varint of at most 64 bits, found a longer one".into()),
            DecodeError::Int(v) => (Malformed, format!("expected an int of 32 bits, found {v}")),
            DecodeError::Boolean(v) => (Malformed, format!("expected a boolean, 0 or 1, found byte {v}")),
            DecodeError::Length(v) => (Malformed, format!("expected a length, found {v}")),
            DecodeError::ItemCount { count, left } => {
                (Malformed, format!("expected an array or map block that fits into the remaining {left} bytes, found one of {count} items"))
            }
            DecodeError::ItemBytes { declared, found } => {
                (Malformed, format!("an array or map block declares {declared} bytes, but its items take {found}"))
            }
            DecodeError::ZeroWidth => {
                let per = format!("{ZERO_WIDTH_ITEMS_PER_BYTE} per byte and {ZERO_WIDTH_ITEMS_PER_STORED_BYTE} per stored byte");
                let bounds = format!("at least {LEAST_ZERO_WIDTH_ITEMS}, at most {MAX_ZERO_WIDTH}");
                (Limit, format!("too many items of zero bytes in the arrays of one block; the limit is {per}, {bounds}"))
            }
            DecodeError::MetadataEntries => {
                (Limit, format!("more than {MAX_METADATA_ENTRIES} entries of metadata, the limit"))
            }
            DecodeError::Depth => (Limit, format!("nested deeper than {MAX_DEPTH} levels, the limit")),
            DecodeError::Branch { index, branches } => {
                (Malformed, format!("expected the index of one of {branches} union branches, found {index}"))
            }
            DecodeError::Symbol { index, symbols } => {
                (Malformed, format!("expected the index of one of {symbols} enum symbols, found {index}"))
            }
            DecodeError::UnknownSymbol { index } => {
                let reason = format!(
                    "symbol {index} of the file's enum is not in the reader's enum, which has no default; give the reader's enum a \"default\""
                );
                (Schema, reason)
            }
            // The plan contains the reason.
            DecodeError::Refused(_) => (Schema, "the value's type doesn't resolve to the reader's type".into()),
            DecodeError::Uuid => (
                Malformed,
                "expected the text of a UUID, 32 hexadecimal digits with hyphens, found other text; dtype \"string\" reads it".into(),
            ),
            DecodeError::Decimal { dtype } => (
                ValueRange,
                format!("the decimal doesn't fit {dtype}; \"float64\" reads up to 38 digits, and \"bytes\" all"),
            ),
            DecodeError::Utf8 => (Malformed, "expected UTF-8 text, found other bytes; dtype \"bytes\" reads them as they are".into()),
            DecodeError::Null => (
                Null,
                "found null, which the feature's spec doesn't allow; on_null=\"mask\" marks nulls, fill=... replaces them".into(),
            ),
            DecodeError::NullEntry => (
                Null,
                "found a null entry of a bag, or one with a null name or value; on_null=\"fill\" leaves such entries out".into(),
            ),
            // The decoder has access to the text and names the key.
            DecodeError::UnknownKey(_) => (ValueRange, "expected a key of the vocabulary, found another one".into()),
            DecodeError::Nan => (ValueRange, NAN.into()),
            DecodeError::ShapeExact { expected, found } => (
                Shape,
                format!(
                    "expected {expected} items, found {found}; RaggedSpec reads any number, DenseSpec(..., pad=0) pads and truncates"
                ),
            ),
            DecodeError::SparseLengths { expected, found, .. } => {
                (Shape, format!("the arrays of a sparse value must have the same length, found {expected} and {found} entries"))
            }
            DecodeError::Index { value, dim, bound } => {
                let most = if bound >= ANY_INDEX { "non-negative".into() } else { format!("below {bound}") };
                let reason = format!("expected an index {most} in dimension {dim}, found {value}; check_indices=False accepts it");
                (ValueRange, reason)
            }
            DecodeError::Range { value, dtype } => (ValueRange, format!("{value} doesn't fit {dtype}")),
            DecodeError::FloatRange { value, dtype } => (ValueRange, format!("{value} doesn't fit {dtype}")),
            DecodeError::Inexact { value, dtype } => (ValueRange, format!("{value} can't be represented exactly as {dtype}")),
            DecodeError::BehindMessage(n) => {
                (Malformed, format!("expected the end of the message after its datum, found {n} more bytes"))
            }
            DecodeError::LeftOver(n) => (Malformed, format!("expected the end of the block after its last record, found {n} more bytes")),
            DecodeError::RecordEnd { found, next } => {
                (Malformed, format!("the record ends at byte {found} of the block, but the next one starts at byte {next}"))
            }
            DecodeError::Write(overflow) => return overflow.into(),
        };
        Error::new(kind, reason)
    }
}
