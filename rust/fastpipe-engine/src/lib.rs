//! The engine decides where and when, never what: it fetches units, schedules their decoding over threads, places rows in
//! batches and hands batches over in order.
//!
//! # How a pass runs
//!
//! [`Stream::start`] takes a source and a place in an order. Batches are planned in order, further ahead than they are
//! *admitted* (`admission.rs`), so that the units that come next are known, and opened or read by the system before a batch waits
//! for them. As many batches are under way as keep the threads busy, unless the consumer asks for a number, and as the memory
//! limit allows (`budget.rs`, `least.rs`). To admit a batch is to take a slab for its placed parts, and to cut its rows into
//! tasks:
//!
//! - Batches of *runs* (`sequence.rs`): a task goes through its runs, fetches and opens the unit of each unless another task
//!   has, and places its records. It starts where the run in front ends: where that is known when it is decoded, or when a
//!   thread that had nothing else to do passed over its records.
//! - Batches of *picks* (`scatter.rs`): shuffled ones. Their units are opened, and the starts of all records found, by tasks of
//!   their own; then the rows are decoded slot by slot. Units stay open, as compact as they are stored, until the order says
//!   that no further rows of them come: decoding a whole window ahead would take several times the memory, and ragged values
//!   would have to be moved once more.
//!
//! Whoever finishes the last task of a batch joins its ragged parts ([`assemble`]) and puts it where the consumer finds it
//! (`finish.rs`).
//!
//! Tasks are in a queue (`schedule.rs`), from which threads take them (`runners.rs`): those of the earliest batch first, and
//! of one batch the longest first, as the cost model (`cost.rs`) expects it from what it has seen. No thread waits for
//! another: a task whose turn hasn't come, or whose units aren't open, is parked, and put in the queue by whoever finds what
//! it waits for. How many threads work at once follows from the same costs, and from how fast the consumer is
//! (`threads.rs`). `telemetry.rs` counts.
#![forbid(unsafe_code)]

mod admission;
mod assemble;
mod batch;
mod batches;
mod budget;
mod cost;
mod fetch;
mod finish;
mod hand_over;
mod job;
mod least;
mod lock;
mod machine_memory;
mod memory;
mod opening;
mod options;
mod order_memory;
mod panicked;
mod runners;
mod scatter;
mod schedule;
mod sequence;
mod shared;
mod sizes;
mod stats;
mod stream;
mod telemetry;
mod threads;
mod unit;
mod watch;
mod workers;

pub use assemble::assemble;
pub use batch::{About, Batch, Stretch};
pub use cost::Learned;
pub use memory::Memory;
pub use options::Options;
pub use order_memory::{check_order, check_state, unplanned};
pub use panicked::panicked;
pub use stats::Stats;
pub use stream::{Poll, Stream};
pub use telemetry::{Activity, Span};
pub use watch::Watch;
pub use workers::default_threads;
