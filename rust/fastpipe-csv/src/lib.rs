//! CSV to rows: how a file is written ([`Dialect`]), where its rows stand ([`scan`]), of which types its columns are
//! ([`Evidence`]), and what its fields say ([`CsvSource`]).
//!
//! A unit is a *stretch*: whole rows of about 64 KiB. Fields are parsed straight to their slots of a batch; a number is
//! parsed where it stands, and only then it is seen whether its field ends there, so most fields aren't looked for
//! first.
//!
//! Nothing here reads a file or starts a thread.
#![forbid(unsafe_code)]

mod around;
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
pub use file::{CsvFile, Stretch};
pub use header::Header;
pub use index::{Indexed, decode_front, decode_index, encode_index};
pub use infer::{Evidence, inferring};
pub use joining::Joining;
pub use kept::{KeptRows, Origins};
pub use nulls::{FirstNulls, NullSearch};
pub use scan::{Cut, MOST_ROW_BYTES, STRETCH_BYTES, Scanned, scan};
pub use source::CsvSource;
pub use stream::{Keep, RowStream};
