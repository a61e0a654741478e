//! Batches whose items are produced by several workers. Each item is written once, by the worker that produced it, into
//! its row of the batch.
//!
//! # Roles
//!
//! The *consumer* starts batches: it writes the indices of a batch's items to an *index page* and assigns a *slot* to
//! the batch. *Item workers* claim rows of the earliest batch with unclaimed rows. They produce the items and write
//! each one into the batch's *slab*, where the consumer's arrays will be. The worker that finishes the last row
//! finishes the batch. The batch is then ready, unless its items must still be joined. In that case it goes to a *batch
//! worker*. The consumer takes batches in order and frees their slots.
//!
//! All of this is in shared memory (`fastpipe_memory::Arena`): item workers are processes, or threads of one process.
//! It uses neither queues nor locks. Each slot has one number from which item workers claim rows by compare-and-swap.
//! The least busy worker thus takes the next item, even if items differ in cost. A second number counts the unfinished
//! rows. Each item worker publishes the rows that it has claimed and not begun. If its current item takes long, idle
//! item workers steal some of these rows. A process that has nothing to do waits for a number to change (a futex), and
//! only waiting processes are woken.
//!
//! # Failures
//!
//! - If an item worker is killed or stopped, the rows that it has claimed stay unfinished and the batch is never ready.
//!   The worker holds nothing else that other processes need. The consumer waits for the batch. It can find out from
//!   the item workers' [records](WorkerView) which worker has claimed the rows.
//! - The numbers in shared memory are not trusted, since a faulty process may overwrite them. They are checked against
//!   the bounds of the memory before use, so no process reads beyond it.
//! - A worker can't claim rows of a batch whose slot has been reused, because claims contain the turn of the slot.
#![deny(unsafe_op_in_unsafe_fn)]

mod batch_worker;
mod clock;
mod consumer;
mod control;
mod control_block;
mod cost_model;
mod index_page;
mod item_worker;
mod layouts;
mod plan;
mod record;
mod sizes;
mod slab_supply;
mod work_stealing;

pub use clock::nanos;
pub use consumer::{Consumer, Lent, State, Taken};
pub use control::{Failure, Joining};
pub use control_block::{ControlBlock, Options};
pub use cost_model::JoinTimer;
pub use index_page::{Indices, RowKind};
pub use item_worker::{Claim, Done, Written};
pub use layouts::LastLayout;
pub use plan::{CELL, SlabPlan};
pub use record::{Activity, SlowItem, WorkerView};
pub use slab_supply::{Begun, Slab, SlabSupply};
pub use work_stealing::StealableRows;
