//! Datasets on servers, and the batches that servers send.

pub(crate) mod intake;
pub(crate) mod outgoing;
pub(crate) mod remote_dataset;
