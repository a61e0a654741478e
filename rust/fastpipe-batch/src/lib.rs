//! The types that sources and the engine share.
//!
//! Sources and the engine depend on this crate and not on each other, so a new source changes neither. The crate
//! defines
//! - columns and the memory that they need ([`ColumnSpec`], [`Part`]),
//! - the memory that rows are written to ([`Slab`], [`Sink`], [`Rows`]),
//! - the interface of a source ([`Source`], [`Unit`]),
//! - errors and their locations ([`Error`], [`Location`]).
//!
//! # Each row is written once, to its final place
//!
//!
//! The number of rows in a unit is known before the unit is read, so each row's place in its batch is also known. Every
//! column consists of *parts* ([`Part`]). A part with a fixed number of bytes per row is *placed*: the decoder writes
//! each value directly to its slot in the batch's slab. All other parts (items of ragged columns, entries of sparse
//! ones, the bytes of strings) are appended to an arena of the task that decodes them. The arena also records where
//! each row starts. When all lengths are known, [`assemble`] joins the arenas once, in slot order.

mod allocator;
mod assemble;
mod buckets;
mod buffers;
mod cells;
mod chunks;
mod columnar;
mod did_you_mean;
mod dtype;
mod error;
mod fallible;
mod feature;
mod gather;
mod key;
mod key_count;
mod lookup;
mod partition;
mod parts;
mod paths;
mod read_at;
mod row_hash;
mod rows;
mod selected;
mod selection;
mod sink;
mod slab;
mod source;
mod sparse;
mod spec;
mod stored;
mod union;
mod vocabulary;
mod writer;

pub use allocator::{SharedSlabs, SlabAllocator};
pub use assemble::{Assembled, BufferRange, assemble};
pub use buckets::{Buckets, Edge, MOST_EDGES, NAN};
pub use buffers::{Buffer, BufferPool, Reuse};
pub use cells::{Cells, Columns};
pub use chunks::{Chunk, Chunks, fewer_rows};
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
pub use key_count::{KeyCount, add_key_counts};
pub use lookup::{Indices, Lookup, Unknown};
pub use partition::{UnitRange, partitions};
pub use parts::{Absent, Part, PartId, PartIds, PartKind, TextParts, ValueParts};
pub use paths::{path_text, shown_path, text_path};
pub use read_at::{MemoryFile, ReadAt, digest_of_ends};
pub use row_hash::{hash_integers, hash_texts};
pub use rows::{Filled, Rows};
pub use selected::Selected;
pub use selection::Selection;
pub use sink::{Fragment, LostRow, Sink, SinkPosition};
pub use slab::{Slab, SlabPool, borrowed};
pub use source::{
    Access, ByteRange, Fetched, Mark, Pass, Pick, Row, Source, SourceFacts, Starts, Unit, UnitInfo, Unpicked, Work,
    fitting_starts, own_units,
};
pub use sparse::{SparseForm, SparseLayout};
pub use spec::{ColumnSpec, Form, NestedForm};
pub use stored::{Contents, FileStamp, Stored};
pub use union::{Union, UnionMember};
pub use vocabulary::Vocabulary;
pub use writer::{Element, Overflow, Writer};

#[cfg(target_endian = "big")]
compile_error!("fastpipe copies little-endian values without conversion and needs a little-endian machine");

/// The result type of this crate's public functions.
pub type Result<T, E = Error> = std::result::Result<T, E>;
