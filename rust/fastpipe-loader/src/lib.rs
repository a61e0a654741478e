//! Items that several workers make, each written once, by the worker that made it, into its row of a batch.
//!
//! # Who does what
//!
//! The *consumer* begins batches: it puts the indices of a batch's items onto an *index page*, and opens a *slot* for
//! it. *Item workers* claim rows of the earliest batch that has some left, make the items, and write each into the
//! batch's *slab*, where the consumer's arrays will be. Who finishes the last row of a batch finishes the batch: it is
//! ready, or goes to a *batch worker* if making a batch of the items takes more than having them side by side. The
//! consumer takes batches in their order, and retires their slots.
//!
//! All of this lies in memory in common (`fastpipe_memory::Arena`): item workers are processes, or threads of one.
//! There are no queues and no locks. A slot has one number, of which item workers claim rows by compare-and-swap, so
//! the least busy one takes the next item, whatever the items cost; and one number that counts rows to be finished. An
//! item worker has a number for the rows that it has claimed and not begun: while its item takes long, idle item
//! workers take some of them. Whoever has nothing to do waits for a number to change (a futex), and nobody is woken who
//! doesn't wait.
//!
//! # What may happen
//!
//! - An item worker that is killed or stopped leaves rows claimed and unfinished: the batch is never ready. It holds
//!   nothing else that others need. Whoever waits for the batch looks at the item workers' [records](WorkerView) for
//!   who has them.
//! - Numbers in the memory may be anything, if a process writes where it shouldn't: they are held against the bounds of
//!   the memory before they are used, so whatever they are nobody reads beyond it.
//! - A batch whose slot is used again meanwhile can't be claimed by mistake: claims carry the slot's turn.
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
