//! Regroups batches into another batch size, in order or shuffled. This is the core of `fastpipe.typing.Rebatcher`.
//!
//! # How it works
//!
//! A batch consists of the parts of its columns ([`fastpipe_batch::Part`]). Each row owns a range of every part
//! (`layout.rs`), so moving a row means moving its ranges. Batches come in as *chunks*, and are copied out into arrays
//! that the caller has allocated. In order ([`InOrder`]), rows are copied from a chunk directly to their batch.
//!
//! Shuffled ([`Shuffled`]), each row gets a *slot* when it comes in (`slots.rs`), and keeps it until it is drawn. Only
//! slots are shuffled. Where the elements of a row are stored until then depends on the part:
//!
//! - Narrow elements of level 0, one per row, are copied to a table, at their slots.
//! - Wide elements of level 0, of `WIDE` bytes or more, stay in the arrays that they came in, and are copied once, to
//!   their batch (`retained_arrays.rs`). An array is retained until its last row is drawn. A few rows would keep many
//!   arrays alive for a long time. If more rows are retained than twice the capacity of the buffer, the remaining rows
//!   of the oldest arrays are copied to a table.
//! - Elements of other levels, any number per row, are appended to an arena, which records the range of each row. Rows
//!   that are drawn leave holes. When the arena is full, it is compacted. If that frees less than half, it grows
//!   (`arena.rs`).
//!
//! So a narrow row is copied in and out. A wide row is copied out, and at most once more. The variable part of a row is
//! copied in, out and about once more. The memory is at most about twice the size of the rows. Large copies are split
//! over threads (`copies.rs`).
//!
//! # Why rows aren't gathered like rows of tables
//!
//! A batch is a set of finished columns, and `fastpipe-columns` also gathers rows of finished columns. But its columns
//! live as long as their source, and have Arrow's types:
//!
//! - Here, a few rows of each batch wait for a long time. Gathering them from the incoming arrays would keep most
//!   batches alive. So narrow rows and items are copied when they come in, to memory that is reused.
//! - This crate moves bytes of any dtype, including complex numbers, structs and foreign byte orders. It doesn't
//!   convert incoming arrays, neither to Arrow arrays nor masks to bitmaps.
//! - Masks are ordinary bytes here, while gathering from Arrow checks each null. Gathering takes 3.4 times the CPU time
//!   for batches of 1,024 rows of masked numbers, 3.6 times for masked lists, 4.8 times for lists of masked numbers,
//!   and 1.8 times for sparse rows. It takes about the same time for numbers and strings, and 0.7 times for lists
//!   without masks.
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
