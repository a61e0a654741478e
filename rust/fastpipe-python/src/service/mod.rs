//! Datasets on servers, and the batches that servers send.

pub(crate) mod connection;
pub(crate) mod flight_server;
pub(crate) mod local_request;
pub(crate) mod remote_dataset;
