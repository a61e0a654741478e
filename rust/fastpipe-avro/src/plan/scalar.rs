//! Encodings of numbers, and runs of numbers in a record.

/// A range of entries of one of the plan's tables.
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
    /// An int, converted to the nearest float.
    IntRounded,
    /// A long, converted to the nearest float.
    LongRounded,
}

/// The type of a scalar that is stored without conversion, or widened from int to long.
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
    /// The scalar is not in a union.
    Never,
    First,
    Second,
    FirstFails,
    SecondFails,
}

/// The index of a cell that doesn't exist.
pub(crate) const NO_CELL: u32 = u32::MAX;

/// An element of a run of scalars.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(crate) struct Scalar {
    pub(crate) kind: ScalarKind,
    pub(crate) null: Null,
    /// Index of the cell of the plan that the value is written to.
    pub(crate) cell: u32,
    /// Index of the cell in which nulls are marked, or `NO_CELL`.
    pub(crate) mask: u32,
    /// The bits that a null writes.
    pub(crate) fill: u64,
    /// The operations that read the scalar one step at a time.
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
