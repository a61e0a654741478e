//! Batches as TensorFlow's tensors, made by kernels of its own: no call into Python and no GIL between a batch and the
//! graph.
//!
//! Two ops are registered through TensorFlow's C API for kernels. `FastpipeParseAvro` decodes records that a graph has.
//! `FastpipeNext` hands out the batches of passes. Without a *ticket* it asks Python for a pass and returns one: a
//! tensor that whoever keeps it keeps the pass alive with. With a ticket it waits for the pass's next batch and returns
//! tensors over the batch's own memory, which goes back to its pool when the last of them dies. Strings are copied,
//! since TensorFlow has its own; so are shapes of sparse tensors.
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
