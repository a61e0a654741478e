//! How numbers are encoded, and runs of them in a record.

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
