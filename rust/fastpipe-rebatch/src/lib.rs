//! Batches of another size, in order or shuffled: what `fastpipe.rebatch` does.
//!
//! # How it works
//!
//! A batch is the parts of its columns ([`fastpipe_batch::Part`]), of which each row owns a stretch (`layout.rs`), so
//! that moving a row is moving its stretches. Batches come in as *chunks* and go out as arrays that the caller has
//! made. In order ([`InOrder`]), rows go straight from a chunk to their batch.
//!
//! Shuffled ([`Shuffled`]), each row that comes in gets a *slot* (`slots.rs`), which it keeps until it is drawn: what
//! is shuffled are slots. Where a row's elements lie meanwhile depends on the part:
//!
//! - Narrow elements of level 0, of which a row has one, are copied to a table, at their slots.
//! - Wide ones, of `WIDE` bytes or more, stay in the arrays that they came in, and are copied once, to their batch
//!   (`retained_arrays.rs`). An array is retained until its last row was drawn; few rows keep many arrays alive for
//!   long, so what is left of the oldest is copied to a table when more than twice the rows are retained that the
//!   buffer may have.
//! - Elements of other levels, of which rows have any number, are appended to an arena, with a note of where each row
//!   has them. Drawn ones leave a hole there, and when the arena is full it is compacted, or grown if that frees less
//!   than half (`arena.rs`).
//!
//! So a narrow row is copied in and out, a wide one out and at most once more, the variable part of a row in, out and
//! about once more; and memory is at most about twice that of the rows. Copies are shared out over threads where there
//! is enough to copy (`copies.rs`).
//!
//! # Why rows aren't gathered as from tables
//!
//! A batch is a set of finished columns, and `fastpipe-columns` gathers rows of such, too. But its columns are there
//! for as long as their source, and are of Arrow's types:
//!
//! - A few rows of each batch wait for long. To gather them from where they came in would keep most batches alive, so
//!   narrow rows and items are copied as they come in, to memory that is used again.
//! - Bytes are moved here, of any dtype: complex numbers, structs and foreign byte orders, too. Nothing is made of the
//!   arrays that come in, neither Arrow arrays nor bitmaps of masks.
//! - Masks are bytes like others here, where gathering looks at each null. Batches of 1,024 rows of masked numbers take
//!   it 3.4 times as long (CPU time), of masked lists 3.6, of lists of masked numbers 4.8, of sparse rows 1.8; of
//!   numbers and strings about as long, of lists without masks 0.7.
#![forbid(unsafe_code)]

mod arena;
mod chunk;
mod copies;
mod in_order;
mod layout;
mod retained_arrays;
mod shuffled;
mod slots;
mod targets;

pub use chunk::{Byte, Chunk, Ends};
pub use in_order::InOrder;
pub use layout::{LevelPart, RowLayout};
pub use retained_arrays::Array;
pub use shuffled::Shuffled;
pub use targets::{BatchSize, Targets};
