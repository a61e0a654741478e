//! Writes Arrow record batches to Avro object container files, and decodes encoded values to Arrow. No I/O except
//! [`std::io::Write`], no Python.
//!
//! # Use of libraries
//!
//! The `arrow-avro` crate of arrow-rs encodes the values. It gets a schema of only a few types, in which logical types
//! are replaced by the numbers that store them. So only its simplest code runs. Its own conversions never run: some of
//! them drop digits (times in nanoseconds) or check only the type of the array. The crate encodes rows, but doesn't
//! write files. Its container writer chooses a new sync marker, which makes appending impossible. It also writes each
//! record batch as one block, and supports neither the user's metadata nor compression levels. The compression
//! libraries are the ones that the reader uses.
//!
//! This crate contains the rest:
//!
//! - The Avro [`Schema`], which is inferred from an Arrow schema or parsed from JSON.
//! - The conversion of arrays to the types of the schema, with errors for values that don't fit (`coerce`).
//! - The framing of blocks ([`Blocks`]).
//!
//! # From record batches to blocks
//!
//! [`Encoder::push`] takes one record batch at a time. It converts the columns to the types of the schema, and encodes
//! ranges of rows of about the size of a block. A block is closed after the row that fills it, no matter which record
//! batch the row came from. So the bytes of the file, except the sync marker, depend neither on the boundaries of
//! record batches nor on the number of threads. Closed blocks are compressed together, on scoped threads that end
//! before the call returns, so a process can fork safely between calls. The memory in use is a record batch and a few
//! blocks.
//!
//! # Limits
//!
//! Unions other than of null and one type are not supported, and neither are recursive types, because Arrow has no
//! equivalent types. [`Blocks`] accepts encoded rows of any schema.
//!
//! # Back to Arrow
//!
//! [`Columns`] decode encoded values to arrays, for conversion to other file formats. Each type is converted to its
//! equivalent Arrow type. A type without an equivalent raises an error.

mod blocks;
mod codec;
mod coerce;
mod coerce_value;
mod decode;
mod encoder;
mod infer;
mod names;
mod nested;
mod schema;

pub use blocks::{Blocks, Settings, Written};
pub use codec::Compression;
pub use decode::Columns;
pub use encoder::Encoder;
pub use fastpipe_avro::Codec;
pub use infer::infer;
pub use nested::{nested, required};
pub use schema::Schema;
