//! Reads rows from CSV files: the syntax of a file ([`Dialect`]), the positions of its rows ([`scan`]), the types of
//! its columns ([`Evidence`]) and the values of its fields ([`CsvSource`]).
//!
//! A unit is a *chunk* ([`CsvChunk`]): whole rows of about 64 KiB in total. Fields are parsed directly into their slots
//! of a batch. The parser doesn't search for the end of a number first. It parses the number and then checks that the
//! field ends there.
//!
//! This crate reads no files and starts no threads.
#![forbid(unsafe_code)]

mod around;
mod bucket_fields;
mod dialect;
mod field_error;
mod fields;
mod file;
mod header;
mod index;
mod infer;
mod joining;
mod kept;
mod nulls;
mod plan;
mod rows;
mod scan;
mod source;
mod stream;
mod unit;
mod values;
mod writing;

pub use around::{RowAt, Surroundings};
pub use dialect::{Dialect, Lines, Names, OnRagged};
pub use file::{CsvChunk, CsvFile};
pub use header::Header;
pub use index::{Indexed, decode_front, decode_index, encode_index};
pub use infer::{Evidence, inferring};
pub use joining::Joining;
pub use kept::{KeptRows, Origins};
pub use nulls::{FirstNulls, NullSearch};
pub use scan::{CHUNK_BYTES, Cut, MOST_ROW_BYTES, Scanned, scan};
pub use source::CsvSource;
pub use stream::{Keep, RowStream};
