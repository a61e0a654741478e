//! The words that sources and the engine share.
//!
//! Sources and the engine know each other through this crate alone, so a new source touches neither. It says
//!
//! - what a column is and which memory it takes ([`ColumnSpec`], [`Part`]),
//! - where rows are written ([`Slab`], [`Sink`], [`Rows`]),
//! - what a source is ([`Source`], [`Unit`]),
//! - what an error is and where it happened ([`Error`], [`Location`]).
//!
//! # Place rows where they belong, once
//!
//! The number of rows of a unit is known before it is read, so the place of each row in its batch is, too. Every column
//! is cut into *parts* ([`Part`]). A part with a fixed number of bytes a row is *placed*: decoding writes it straight
//! to its slot of the batch's slab. All others (items of ragged columns, entries of sparse ones, the bytes of strings)
//! are appended to an arena of the task that decodes them, with a note of where each row starts, and are joined once,
//! in the order of slots, when all lengths are known ([`assemble`]).

mod allocator;
mod assemble;
mod buffers;
mod cells;
mod columnar;
mod did_you_mean;
mod dtype;
mod error;
mod fallible;
mod feature;
mod gather;
mod key;
mod lookup;
mod partition;
mod parts;
mod paths;
mod rows;
mod sink;
mod slab;
mod source;
mod sparse;
mod spec;
mod vocabulary;
mod writer;

pub use allocator::{SharedSlabs, SlabAllocator};
pub use assemble::{Assembled, BufferRange, assemble};
pub use buffers::{Buffer, BufferPool, Reuse};
pub use cells::{Cells, Columns};
pub use columnar::{ArenaRows, ColumnarRows};
pub use did_you_mean::nearest;
pub use dtype::{DType, Leaf, TimeUnit};
pub use error::{Error, ErrorKind, Lengths, Location};
pub use fallible::{try_collect, try_filled, try_reserve, try_with_capacity};
pub use fastpipe_memory::{
    ALIGNMENT, LINE, LINES, Region, hint, on_allocation_failure, prefetch_of, release_address_space, release_all,
    reserve_address_space, reserve_large, room_for, try_reserve_large,
};
pub use feature::{Feature, LengthRule, MAX_DIMENSIONS, MAX_FIXED_DIMENSIONS, Nulls, Request, Scalar, spec_code};
pub use gather::{OutOfBounds, Place, Span, gather, gather_places, gather_spans, move_rows, scatter};
pub use key::{Key, MOST_KEYS, UNKNOWN};
pub use lookup::{Indices, Lookup, Unknown};
pub use partition::{UnitRange, partitions};
pub use parts::{Absent, Part, PartId, PartIds, PartKind, TextParts, ValueParts};
pub use paths::{path_text, shown_path, text_path};
pub use rows::{Filled, Rows};
pub use sink::{Fragment, Sink};
pub use slab::{Slab, SlabPool, borrowed};
pub use source::{
    Access, ByteRange, Fetched, FileStamp, Mark, Pass, Pick, ReadAt, Row, Source, SourceFacts, Starts, Unit, UnitInfo,
    Unpicked, Work, own_units,
};
pub use sparse::{SparseForm, SparseLayout};
pub use spec::{ColumnSpec, Form, NestedForm};
pub use vocabulary::Vocabulary;
pub use writer::{Element, Overflow, Writer};

#[cfg(target_endian = "big")]
compile_error!("fastpipe copies little-endian values as they stand and needs a little-endian machine");

/// What a public function of this crate returns.
pub type Result<T, E = Error> = std::result::Result<T, E>;
