//! Avro object container files to rows. No I/O, no threads, no Python.
//!
//! # From bytes to rows
//!
//! [`Header`] and [`Walk`] find the blocks of a file without reading them. [`Schema`] is the file's schema. Wanted
//! [`Feature`](fastpipe_batch::Feature)s ([`infer`] makes them up from a schema) and the schemas of all files are
//! compiled once to columns and to a decode plan for each schema. [`AvroSource`] is all of that behind the seam to the
//! engine: a unit is a block; opening it checks its marker and decompresses it; placing its records runs the plan.
//! [`encode_index`] and [`decode_index`] make the blocks of a file to bytes and back, so that they can be kept.
//!
//! # Trust nothing
//!
//! Whatever a file declares is held against the bytes that are really there before anything is allocated or looped
//! over; what bytes can't bound is bounded by [`limits`]. There is no `unsafe` in this crate but for what the
//! processor's vector instructions need, in one module.

mod canonical;
mod codec;
mod compile;
mod container;
mod convert;
mod cursor;
mod decode;
mod decode_error;
mod field_path;
mod file_info;
mod index;
mod infer;
mod infer_columns;
mod isa;
mod keys;
mod layout;
mod length_sample;
pub mod limits;
mod merge;
mod messages;
mod number;
mod partition_columns;
mod plan;
mod profile;
mod resolve;
mod scalars;
mod schema;
mod source;
mod unit;
mod value_types;
mod varint;
mod varint_ends;
#[cfg(target_arch = "x86_64")]
mod x86;

pub use canonical::{canonical_form, rabin};
pub use codec::{Codec, decompress};
pub use container::{Block, Header, SYNC_BYTES, Walk, whole_blocks_end};
pub use decode::Message;
pub use file_info::FileInfo;
pub use index::{decode_index, encode_index};
pub use infer::{Inferred, infer};
pub use infer_columns::{InferredColumns, LaterColumns, infer_columns, later_columns, merged_schema};
pub use keys::with_form;
pub use layout::Column;
pub use length_sample::LengthSample;
pub use merge::merge;
pub use messages::{Framing, MessageSchemas, infer_message_columns};
pub use partition_columns::{FolderColumn, FolderColumns};
pub use profile::{ColumnTimes, column_times};
pub use schema::{Branch, Field, Logical, Node, NodeId, Schema, Symbols, Type, Union, UnionShape};
pub use source::AvroSource;
