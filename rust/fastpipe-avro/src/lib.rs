//! Reads Avro object container files as rows. No I/O, no threads, no Python.
//!
//! # From bytes to rows
//!
//! [`Header`] and [`Walk`] find the blocks of a file without reading their data. [`Schema`] is the file's schema. The
//! requested [`Feature`](fastpipe_batch::Feature)s ([`infer`] derives them from a schema) and the schemas of all files
//! are compiled once: into columns, and into a decode plan for each schema. [`AvroSource`] implements the engine's
//! source interface with them. A unit is a block. Opening the unit checks the block's sync marker and, if known, its
//! [`Checksum`], and decompresses the data; placing its records runs the plan. [`encode_index`] and [`decode_index`]
//! convert the blocks of a file to bytes and back, so that they can be cached.
//!
//! # Trust nothing
//!
//! Every size and count that a file declares is checked against the bytes at hand before the crate allocates memory or
//! loops. If the bytes don't bound a count, [`limits`] does. The only `unsafe` code of this crate is in one module, for
//! the processor's vector instructions.

mod canonical;
mod checksum;
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
pub use checksum::Checksum;
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
