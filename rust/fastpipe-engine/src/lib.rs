//! The engine decides where and when, never what: it fetches units, schedules their decoding over threads, places rows in
//! batches and hands batches over in order.
//!
//! # How a pass runs
//!
//! [`Stream::start`] takes a source and an order. Batches are *admitted* in order, as many ahead of the consumer as it asks
//! for (`prefetch`). To admit a batch is to ask the order what stands in it, to take a slab for its placed parts, and to
//! cut its runs into tasks. A task goes through its runs: fetches and opens the unit of each unless the batch before did,
//! and places its records. Where two batches share a unit, the later one waits for the [`Mark`](fastpipe_batch::Mark) that
//! the earlier one leaves, so that every unit is opened once and read once. Whoever finishes the last task of a batch joins
//! its ragged parts ([`assemble`]) and puts it where the consumer finds it.
//!
//! No thread waits for another: a task whose turn hasn't come is parked with the unit that it needs, and started by whoever
//! is in front of it.
#![forbid(unsafe_code)]

mod assemble;
mod batch;
mod copies;
mod job;
mod memory;
mod recut;
mod rows;
mod shuffled;
mod slots;
mod storage;
mod stream;
mod unit;
mod workers;

pub use assemble::assemble;
pub use batch::{Batch, Stretch};
pub use memory::Memory;
pub use recut::Recut;
pub use rows::{Byte, Chunk, Ends, Part, Ready, RowLayout, Targets};
pub use shuffled::Shuffled;
pub use storage::{Files, LocalFile};
pub use stream::{Options, Poll, Stream};
pub use workers::default_threads;
