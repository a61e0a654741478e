//! The engine decides where and when, never what: it fetches units, schedules their decoding over threads, places rows
//! in batches and hands batches over in order.
//!
//! # How a pass runs
//!
//! [`Stream::start`] takes a source and a place in an order. Batches are planned in order, further ahead than they are
//! *admitted* (`admission.rs`), so that the units that come next are known, and opened or read by the system before a
//! batch waits for them. As many batches are under way as keep the threads busy, unless the consumer asks for a number,
//! and as the memory limit allows (`budget.rs`, `minimum_memory.rs`). To admit a batch is to take a slab for its placed
//! parts, and to cut its rows into tasks:
//!
//! - Batches of *runs* (`sequence.rs`): a task goes through its runs, fetches and opens the unit of each unless another
//!   task has, and places its records. It starts where the run in front ends: where that is known when it is decoded,
//!   or when a thread that had nothing else to do skipped its records.
//! - Batches of *picks* (`scatter.rs`): shuffled ones. Their units are opened, and the starts of all records found, by
//!   tasks of their own; then the rows are decoded slot by slot. Units stay open, as compact as they are stored, until
//!   the order says that no further rows of them come: decoding a whole window ahead would take several times the
//!   memory, and ragged values would have to be moved once more.
//!
//! The thread that finishes the last task of a batch joins its ragged parts ([`fastpipe_batch::assemble`]) and puts the
//! batch where the consumer finds it (`finish.rs`).
//!
//! Tasks are in a queue (`schedule.rs`), from which threads take them (`runners.rs`): those of the earliest batch
//! first, and of one batch the longest first, as the cost model expects it from what it has seen. No thread waits for
//! another: a task whose turn hasn't come, or whose units aren't open, is parked, and put in the queue by whoever finds
//! what it waits for. How many threads work at once follows from the same costs, and from how fast the consumer is
//! (`threads.rs`).
//!
//! A pass ends when its consumer goes, or has got its error. Its threads end then, and what they hold goes back; the
//! error alone stays, for whoever asks again.
//!
//! # The parts of a pass
//!
//! ```text
//!   running_pass.rs, batch_source.rs                    what the bindings have
//!       |             |
//!   stream.rs    observer.rs, stats.rs
//!       |             |
//!   runners.rs  admission/  sequence/  scatter/  finish.rs  opening.rs  minimum_memory.rs: activities of any thread
//!       |             |         |         |          |          |          |
//!   pass.rs: one field for each part, and what takes several of them: failing, choosing threads
//!       |
//!   pass_config.rs     what stays the same: source, options, threads, seed
//!   working_memory.rs  memory (memory.rs) and how much of it may be used (budget.rs)
//!   cost.rs            what work costs and what units take, learned
//!   telemetry.rs       what was done, and where time went; reader_totals.rs sums it up over passes
//!   admission_gate.rs  who admits, one thread at a time, and what is planned and under way (admission.rs)
//!   fetch.rs           calls of the source that may wait, on threads of their own
//!   schedule.rs        the queue, and how many threads may take from it; workers.rs has the threads
//!   delivery.rs        batches that are done, consumers that wait, and how the pass ends
//! ```
//!
//! Each part has fields of its own, a small interface, and one rule to keep, which is tested there without a pass.
//! Parts don't know what is above them, and hardly each other: handing over is timed (`telemetry.rs`) and gives memory
//! back (`working_memory.rs`).
//!
//! What is done needs most of the parts at once: a task reads, decodes, learns what that took, and hands over. So
//! activities are methods of `PassContext`, in files that don't know each other: batches of runs and of picks meet the
//! thread that admits them only through `batches.rs`. The price is that no signature says which parts an activity uses;
//! what needs a few of them takes those.
#![forbid(unsafe_code)]

mod admission;
mod admission_gate;
mod batch;
mod batch_source;
mod batches;
mod budget;
mod cost;
mod delivery;
mod failure;
mod fetch;
mod finish;
mod human_bytes;
mod in_flight;
mod lock;
mod memory;
mod minimum_memory;
mod observer;
mod opening;
mod options;
mod order_memory;
mod panicked;
mod pass;
mod pass_config;
mod reader_totals;
mod runners;
mod running_pass;
mod scatter;
mod schedule;
mod sequence;
mod stats;
mod stream;
mod telemetry;
mod threads;
mod unit;
mod workers;
mod working_memory;

pub use batch::{Batch, BatchInfo, VALID};
pub use batch_source::{BatchSource, ObservePass};
pub use cost::Learned;
pub use memory::Memory;
pub use observer::PassObserver;
pub use options::Options;
pub use order_memory::{check_order, check_state, unplanned};
pub use panicked::panicked;
pub use reader_totals::{ReaderTotals, Totals, Yielded};
pub use running_pass::{Delivered, Lease, Origin, PassSource, RunningPass, Seen};
pub use stats::Stats;
pub use stream::{Poll, Stream};
pub use telemetry::{Activity, Telemetry};
pub use workers::default_threads;
