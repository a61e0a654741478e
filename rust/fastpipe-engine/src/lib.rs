//! The engine decides where and when work happens, never which rows a batch contains. It fetches units, schedules their
//! decoding on threads, places rows in batches, and delivers the batches in order.
//!
//! # How a pass runs
//!
//! [`Stream::start`] takes a source and a position in an order. Batches are planned in order, and earlier than they are
//! *admitted* (`admission.rs`). So the engine knows which units come next and opens them, or asks the system to read
//! them, before a batch needs them. Enough batches are in flight to keep the threads busy, or the number that the
//! consumer requests, within the memory limit (`budget.rs`, `minimum_memory.rs`). Admitting a batch reserves its memory
//! and divides its rows into tasks:
//!
//! - Batches of *runs* (`sequence.rs`): a task processes its runs one after the other. It fetches and opens the unit of
//!   each run, unless another task already has, and places the records. A task starts where the previous run ends. That
//!   position is known once the previous run has been decoded, or once an idle thread has skipped its records.
//! - Batches of *picks* (`scatter.rs`), for shuffled orders: separate tasks open the units and find the starts of all
//!   records. Then the rows are decoded slot by slot. Units stay open, in their compact stored form, until the order
//!   needs no more of their rows. Decoding a whole window in advance would take several times the memory, and ragged
//!   values would have to be moved once more.
//!
//! The thread that finishes the last task of a batch joins its ragged parts ([`fastpipe_batch::assemble`]) and puts the
//! batch into the delivery queue (`finish.rs`).
//!
//! Ready tasks wait in a queue (`schedule.rs`), and threads take them from it (`runners.rs`). Tasks of the earliest
//! batch come first. Within a batch, the tasks that the cost model expects to take longest come first. No thread waits
//! for another thread. A task whose start isn't known, or whose units aren't open, is parked. The thread that produces
//! the missing start or unit puts it into the queue. The number of active threads follows from the same costs and from
//! the speed of the consumer (`threads.rs`).
//!
//! A pass ends when its consumer closes it or has received its error. Its threads then stop and its memory is released.
//! Only the error is kept, for later calls of [`Stream::poll`].
//!
//! # Modules
//!
//! ```text
//!   running_pass.rs, batch_source.rs                    interface for the bindings
//!       |             |
//!   stream.rs    observer.rs, stats.rs
//!       |             |
//!   runners.rs  admission/  sequence/  scatter/  finish.rs  opening.rs  minimum_memory.rs: work that any thread may do
//!       |             |         |         |          |          |          |
//!   pass.rs: one field for each component, and operations on several of them: failing, choosing threads
//!       |
//!   pass_config.rs     constants of the pass: source, options, threads, seed
//!   working_memory.rs  memory (memory.rs) and the limit on its use (budget.rs)
//!   cost.rs            learned costs of work and sizes of units
//!   telemetry.rs       counts of work and time; reader_totals.rs adds them up over passes
//!   admission_gate.rs  one thread at a time admits batches; planned batches and batches in flight (admission.rs)
//!   fetch.rs           blocking calls of the source, on separate threads
//!   schedule.rs        the queue, and how many threads may take from it; workers.rs owns the threads
//!   delivery.rs        finished batches, waiting consumers, and the end of the pass
//! ```
//!
//! Each component has its own fields, a small interface, and one rule to keep. Its unit tests check that rule without a
//! pass. Components don't know the layers above them, and know little of each other. The exceptions are deliveries,
//! which are timed (`telemetry.rs`) and release memory (`working_memory.rs`).
//!
//! Most work needs many components at once: a task reads, decodes, records its cost, and delivers. So this work is
//! written as methods of `PassContext`, in files that don't depend on each other. Batches of runs and batches of picks
//! share only the trait in `batches.rs` with the thread that admits them. The price is that signatures don't show which
//! components a method uses. Code that needs only a few components takes them as arguments.
#![forbid(unsafe_code)]

mod admission;
mod admission_gate;
mod batch;
mod batch_source;
mod batches;
mod budget;
mod cost;
mod damage;
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
mod pace;
mod panicked;
mod pass;
mod pass_config;
mod ranges;
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
pub use damage::{Loss, Tolerant};
pub use memory::Memory;
pub use observer::PassObserver;
pub use options::Options;
pub use order_memory::{check_order, check_state, unplanned};
pub use panicked::panicked;
pub use reader_totals::{ReaderTotals, Totals, Yielded};
pub use running_pass::{Delivered, EpochKeys, FeatureKeys, Lease, Origin, PassSource, RunningPass, Seen};
pub use stats::Stats;
pub use stream::{Poll, Stream};
pub use telemetry::{Activity, Telemetry};
pub use workers::default_threads;
