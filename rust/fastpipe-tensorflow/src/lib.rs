//! Batches as TensorFlow tensors. Kernels create the tensors without a call into Python and without the GIL.
//!
//! Two ops are registered through TensorFlow's C API for kernels. `FastpipeParseAvro` decodes records that are tensors
//! of a graph. `FastpipeNext` returns the batches of passes. Without a *ticket*, it asks Python for a pass and returns
//! a ticket: a tensor that keeps the pass alive. With a ticket, it waits for the next batch of the pass, and returns
//! tensors over the memory of the batch. That memory returns to its pool when the last tensor is released. Strings are
//! copied, because TensorFlow has its own format of strings. Shapes of sparse tensors are copied as well.
//!
//! Python is a [`Host`] here.
#![allow(unsafe_code)]

mod api;
mod coordinates;
mod failure;
mod gate;
mod inputs;
mod iteration;
mod kernels;
mod outputs;
mod parsing;
mod registered;
mod ticket;

pub use api::{Code, Failure};
pub use inputs::Argument;
pub use iteration::Iteration;
pub use kernels::{leave, register};
pub use outputs::{Column, Wanted, columns};
pub use parsing::register as register_parser;
pub use registered::Host;
