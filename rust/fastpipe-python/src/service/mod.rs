//! What servers send, what they have received, and data sets that servers have.

pub(crate) mod intake;
pub(crate) mod outgoing;
pub(crate) mod remote_dataset;
