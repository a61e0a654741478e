//! Serves the batches of passes on Arrow Flight, and reads them from several servers.
#![forbid(unsafe_code)]

pub mod connection;
pub mod flight;
pub mod grpc;
mod messages;
pub mod meter;
pub mod outlet;
pub mod schedule;
pub mod server;
pub mod serving;
pub mod streams;
pub mod tls;
