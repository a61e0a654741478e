//! Serves the batches of passes over Arrow Flight, and receives them from several servers.
#![forbid(unsafe_code)]

pub mod connection;
pub mod faults;
pub mod flight;
pub mod grpc;
#[cfg(unix)]
pub mod local;
mod messages;
pub mod meter;
pub mod outlet;
pub mod per_process;
pub mod request;
pub mod schedule;
pub mod server;
pub mod serving;
pub mod streams;
pub mod tls;
pub mod transfer;
pub mod transport;
