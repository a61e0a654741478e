//! Where the kernel doesn't count what a connection has received: nothing is looked at, and nothing closed.

use std::collections::HashSet;
use std::time::Duration;

use crate::ledger::Ledger;
use crate::{Closed, Peer};

/// Looking takes no time.
pub(crate) fn time_of_thread() -> Duration {
    Duration::ZERO
}

#[derive(Debug, Default)]
pub(crate) struct Connections;

impl Connections {
    #[allow(clippy::unused_self)]
    pub(crate) fn look(&mut self, _ports: &[u16], _more: bool, _begun: &Ledger) {}

    #[allow(clippy::unused_self)]
    pub(crate) fn close(&mut self, _each: u64, _together: u64) -> Vec<Closed> {
        Vec::new()
    }

    #[allow(clippy::unused_self)]
    pub(crate) fn close_idle(&mut self, _peers: &HashSet<Peer>) -> Vec<Closed> {
        Vec::new()
    }

    #[allow(clippy::unused_self)]
    pub(crate) fn ahead(&self) -> u64 {
        0
    }
}
