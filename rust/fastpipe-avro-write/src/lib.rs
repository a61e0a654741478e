//! Arrow record batches to Avro object container files, and encoded values to Arrow. No I/O but [`std::io::Write`],
//! no Python.
//!
//! # What is a library's, and what is ours
//!
//! Values are encoded by the `arrow-avro` crate of arrow-rs. It is handed a schema of few types, in which logical types
//! are the numbers that they are stored as: so only its plainest paths run, and its own conversions, of which some drop
//! digits (times in nanoseconds) or look at nothing but the type of the array, never do. It is used for rows alone, not
//! for files: its container writer picks its own sync marker (which appending can't), makes one block of each record
//! batch, writes no metadata of the user's, and takes no level of compression. Codecs are the libraries that also read
//! them.
//!
//! Ours is the rest: the [`Schema`] of Avro that follows from an Arrow schema or is given as JSON; what makes arrays
//! fit it, or says why they don't (`coerce`); and the framing of blocks ([`Blocks`]).
//!
//! # From record batches to blocks
//!
//! [`Encoder::push`] takes one record batch at a time, makes it fit, and encodes stretches of its rows, of about the
//! size of a block, into rows that wait. A block is closed by the row with which it reaches the wanted size, whichever
//! record batch that row came in: so blocks, and but for the sync marker the bytes of the file, depend neither on how
//! the rows are cut in record batches nor on the number of threads. Closed blocks are compressed together, on scoped
//! threads that end with the call: nothing of it lives on in a process that forks. What is held is a record batch, and
//! some blocks.
//!
//! # Limits
//!
//! Unions other than of null and one type are refused, as are types that contain themselves: no Arrow type is like
//! these. Rows that are encoded already go into [`Blocks`] whatever their schema is.
//!
//! # Back to Arrow
//!
//! [`Columns`] make arrays of encoded values, for files of other formats: each type becomes the Arrow type that says
//! the same, and one without such a type is refused.

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
pub use codec::{Codec, Compression};
pub use decode::Columns;
pub use encoder::Encoder;
pub use infer::infer;
pub use nested::{nested, required};
pub use schema::Schema;
