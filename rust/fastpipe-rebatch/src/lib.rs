//! Batches of another size, in order or shuffled: what `fastpipe.rebatch` does.
//!
//! # How it works
//!
//! A batch is the parts of its columns ([`fastpipe_batch::Part`]), of which each row owns a stretch (`rows.rs`), so that
//! moving a row is moving its stretches. Batches come in as *chunks* and go out as arrays that the caller has made. In order
//! ([`Recut`]), rows go straight from a chunk to their batch.
//!
//! Shuffled ([`Shuffled`]), each row that comes in gets a *slot* (`slots.rs`), which it keeps until it is drawn: what is
//! shuffled are slots. Where a row's elements lie meanwhile depends on the part:
//!
//! - Narrow elements of level 0, of which a row has one, are copied to a table, at their slots.
//! - Wide ones, of `WIDE` bytes or more, stay in the arrays that they came in, and are copied once, to their batch
//!   (`lent.rs`). An array is kept until its last row was drawn; few rows keep many arrays alive for long, so what is left of
//!   the oldest is copied to a table when more than twice the rows are held that the buffer may have.
//! - Elements of other levels, of which rows have any number, are appended to an arena, with a note of where each row has
//!   them. Drawn ones leave a hole there, and when the arena is full it is compacted, or grown if that frees less than half
//!   (`arena.rs`).
//!
//! So a narrow row is copied in and out, a wide one out and at most once more, the variable part of a row in, out and about
//! once more; and memory is at most about twice that of the rows. Copies are shared out over threads where there is enough to
//! copy (`copies.rs`).
//! # Why rows aren't gathered as from tables
//!
//! `fastpipe-columns` gathers rows from finished columns, too, and a batch is a set of them. But its columns stay where they
//! are as long as the source lives, while a shuffle buffer's keep coming:
//!
//! - A row waits for long with some probability, so gathering from where rows came in would keep nearly every batch alive:
//!   narrow rows and items have to be copied as they come in, to memory that is used again.
//! - It takes Arrow's types, of which each feature is bound to one. Here bytes are moved: of any dtype, structs and foreign
//!   byte orders among them, from arrays that nothing was made of.
//! - It checks nulls and lengths against specs, and writes columns that have both value by value. Parts have no nulls: a mask
//!   is bytes like others, so that a masked or nested row costs what its bytes cost.
#![forbid(unsafe_code)]

mod arena;
mod copies;
mod lent;
mod recut;
mod rows;
mod shuffled;
mod slots;

pub use lent::Array;
pub use recut::Recut;
pub use rows::{Byte, Chunk, Ends, LevelPart, Ready, RowLayout, Targets};
pub use shuffled::Shuffled;
