//! The decode plan: what is wanted of a file, compiled once into a flat list of operations.
//!
//! The decoder runs the plan and nothing else: no schema walk, no look-up by name, no allocation and no dynamic value
//! for each record. Bodies of arrays, maps and unions are stretches ([`Span`]) of the same list, behind one another;
//! what isn't wanted is skipped by operations that know its width.

use std::sync::Arc;

use fastpipe_batch::{DType, LengthRule, Lengths, PartId, TextParts};

use crate::fault::Fault;
use crate::isa::Isa;
use crate::plan_keys::{BagOp, KeyItemsOp, KeyOp};
use crate::varint::Head;

/// A stretch of a table of the plan.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Span {
    pub(crate) start: u32,
    pub(crate) end: u32,
}

impl Span {
    pub(crate) fn of<T>(self, table: &[T]) -> &[T] {
        &table[self.start as usize..self.end as usize]
    }
}

/// How a number is encoded.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Wire {
    Boolean,
    Int,
    Long,
    Float,
    Double,
    /// An int that becomes the nearest float.
    IntRounded,
    /// A long that becomes the nearest float.
    LongRounded,
}

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

    /// An array of numbers that becomes the innermost dimension of one column.
    Numbers {
        wire: Wire,
        to: DType,
        part: PartId,
        rule: LengthRule,
        lengths: Option<PartId>,
        pad: Span,
    },
    /// An array of a known number of floats or doubles that lie in memory as they are encoded.
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
    /// Writes what the folders of the file stand for: constants that come with the block.
    Folders,
}

/// How a scalar is encoded and stored, where both are as usual.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum ScalarKind {
    Boolean,
    Int,
    IntAsLong,
    Long,
    Float,
    Double,
}

/// Which branch of a scalar's union is null, and whether that is an error.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Null {
    /// It is no union.
    Never,
    First,
    Second,
    FirstFails,
    SecondFails,
}

/// Stands for no cell.
pub(crate) const NO_CELL: u32 = u32::MAX;

/// One of a run of scalars.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scalar {
    pub(crate) kind: ScalarKind,
    pub(crate) null: Null,
    /// Which of the plan's cells it is written to.
    pub(crate) cell: u32,
    /// The cell in which nulls are marked.
    pub(crate) mask: u32,
    /// The bits of what stands for null.
    pub(crate) fill: u64,
    /// The operations that read it one step at a time.
    pub(crate) ops: Span,
}

impl Scalar {
    pub(crate) fn new(kind: ScalarKind, null: Null, fill: u64, ops: Span) -> Self {
        Scalar {
            kind,
            null,
            cell: NO_CELL,
            mask: NO_CELL,
            fill,
            ops,
        }
    }
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
    /// By their number in front of them.
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

/// The bound of indices in an open dimension: whatever isn't negative.
pub(crate) const ANY_INDEX: u64 = 1 << 63;

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

/// What an operation is about, for errors.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub(crate) struct Place {
    /// The path of the field.
    pub(crate) path: Arc<str>,
    /// The feature that is read from it, if that has another name.
    pub(crate) feature: Option<Arc<str>>,
}

/// A compiled plan.
#[derive(Clone, Debug, Default)]
pub(crate) struct Plan {
    pub(crate) ops: Vec<Op>,
    /// For each operation what it is about: an index into `places`.
    pub(crate) op_places: Vec<u32>,
    pub(crate) places: Vec<Place>,
    pub(crate) emits: Vec<Emit>,
    pub(crate) parts: Vec<PartId>,
    pub(crate) spans: Vec<Span>,
    pub(crate) enums: Vec<EnumTable>,
    pub(crate) decimals: Vec<DecimalOp>,
    /// Why values don't become a reader's.
    pub(crate) refusals: Vec<Arc<str>>,
    pub(crate) sparse: Vec<SparseOp>,
    pub(crate) keys: Vec<KeyOp>,
    pub(crate) key_items: Vec<KeyItemsOp>,
    pub(crate) bags: Vec<BagOp>,
    pub(crate) programs: Vec<Span>,
    pub(crate) scalars: Vec<Scalar>,
    /// Parts that are written by scalars alone, ascending.
    pub(crate) cells: Arc<[PartId]>,
    /// Parts of bytes that must be UTF-8.
    pub(crate) texts: Vec<PartId>,
    pub(crate) record: Span,
    pub(crate) skip: Span,
    /// Bytes that a record takes at least.
    pub(crate) smallest: u64,
    /// The instructions to read with.
    pub(crate) isa: Isa,
}

impl Plan {
    /// The lengths that a fault is about, if it is about lengths, given the operation that met it.
    #[cold]
    pub(crate) fn lengths(&self, fault: Fault, at: u32) -> Option<Lengths> {
        match fault {
            Fault::ShapeExact { expected, found } => Some(Lengths::Dimension {
                dimension: self.arrays_around(self.record, at)?,
                expected,
                found,
            }),
            Fault::SparseLengths { expected, found, dim } => {
                let Op::Sparse(number) = *self.ops.get(at as usize)? else {
                    return None;
                };
                let first = self.sparse[number as usize].fields.first()?.what.dim();
                Some(Lengths::Sparse {
                    first: (first, expected),
                    other: (dim, found),
                })
            }
            _ => None,
        }
    }

    /// How many arrays an operation within a stretch lies in.
    fn arrays_around(&self, span: Span, at: u32) -> Option<u32> {
        (span.start..span.end).find_map(|pc| match &self.ops[pc as usize] {
            _ if pc == at => Some(0),
            Op::Items { body, .. } => self.arrays_around(*body, at).map(|inner| inner + 1),
            Op::Nullable { body, .. } => self.arrays_around(*body, at),
            Op::Tee { passes } | Op::Union { branches: passes } => passes
                .of(&self.spans)
                .iter()
                .find_map(|pass| self.arrays_around(*pass, at)),
            _ => None,
        })
    }
}
