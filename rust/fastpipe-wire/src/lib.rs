//! Batches from other processes, on another machine or, through shared memory, on this one.
//!
//! A batch is sent as its unchanged slabs and a header with the position of each part (`header.rs`). Neither side
//! converts values. Small batches are sent together (`group.rs`). The server describes its columns once (`columns.rs`).
//!
//! The receiver (`arrivals.rs`) trusts nothing. The header and each slab have a checksum (`receive.rs`). Properties
//! that later code relies on are checked even if the checksums are valid (`check.rs`).
//!
//! Several servers may send batches in any order, and some batches twice. Each batch is delivered once, in the order of
//! the pass (`feed.rs`).
//!
//! No I/O, no threads, no Python.
#![forbid(unsafe_code)]

mod arrivals;
mod check;
mod columns;
mod feed;
mod group;
mod header;
mod outgoing;
mod receive;
mod remote_batches;
mod remote_units;

pub use arrivals::{Arrivals, Wanted};
pub use check::check;
pub use columns::{read_columns, write_columns};
pub use feed::{Feed, Look, Wake};
pub use group::{read_group, write_group};
pub use header::Header;
pub use outgoing::{Outgoing, lend, nbytes, read_pieces};
pub use receive::{Receiving, in_common};
pub use remote_batches::RemoteBatches;
pub use remote_units::RemoteUnits;
