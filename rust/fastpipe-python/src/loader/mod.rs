//! Items made by Python in several workers, written once into their batches: what `fastpipe.torch.DataLoader` is made
//! of.
//!
//! `fastpipe-loader` knows who does what, and where; here items become bytes and bytes arrays. What is done once for a
//! data set, or seldom (to describe an item, to pickle one that has no place in a slab, to collate), is Python's.

mod batch;
mod consumer;
mod first_item;
mod helper;
mod laying_out;
mod layout;
mod memory;
mod node;
mod place;
mod process;
mod read;
mod room;
mod seeds;
mod tensors;
mod whole;
mod worker;

pub(crate) use batch::ItemBatch;
pub(crate) use consumer::ItemConsumer;
pub(crate) use layout::ItemLayout;
pub(crate) use memory::ItemMemory;
pub(crate) use process::{available_memory, end_with_parent};
pub(crate) use room::ItemRoom;
pub(crate) use seeds::item_seed;
pub(crate) use worker::ItemWorker;
