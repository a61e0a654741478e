//! Items that Python makes in several workers, each written once into its batch. `fastpipe.torch.DataLoader` is built
//! on this.
//!
//! `fastpipe-loader` assigns work and memory. This module converts items to bytes, and bytes to arrays. Python code
//! performs rare operations: it describes an item once per dataset, pickles items that don't fit into a slab, and
//! collates.

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
