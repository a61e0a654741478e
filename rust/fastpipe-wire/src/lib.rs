//! Batches that other processes make: on another machine, or on this one with memory in common.
//!
//! A batch travels as its slabs, as they are, and a header that says what lies where in them (`header.rs`): so neither
//! side turns values into anything else. Small ones travel together (`group.rs`). Who makes batches tells of their
//! columns once (`columns.rs`). Who gets them (`arrivals.rs`) believes nothing: the header has a checksum, each slab
//! has one (`receive.rs`), and what the code behind relies on is checked, whatever the checksums say (`check.rs`).
//! Several makers may send batches in any order, and some twice: they are handed over once, and in their own order
//! (`feed.rs`).
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
