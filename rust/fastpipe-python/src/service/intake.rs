//! What clients of a server of this process have sent that no request has begun with.

use std::time::Duration;

use fastpipe_intake::Reason;
use pyo3::prelude::*;

/// Looks at connections, and closes those that sent too much.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct Intake(fastpipe_intake::Intake);

/// Its other end's address, the port it led to, and how many bytes it had sent; `None` if it took nothing.
type Closed = (String, u16, Option<u64>);

#[pymethods]
impl Intake {
    /// Closes connections that are more than `each` bytes ahead of their requests, or, while all are by more than
    /// `together`, those that send more than a little.
    #[new]
    fn new(each: u64, together: u64) -> Self {
        Intake(fastpipe_intake::Intake::new(each, together))
    }

    /// Connections to this port are looked at from now on.
    fn watch(&self, port: u16) -> PyResult<()> {
        Ok(self.0.watch(port)?)
    }

    /// One server fewer listens there.
    fn leave(&self, port: u16) {
        self.0.leave(port);
    }

    /// A request of a peer has begun, whose body has this size.
    fn begun(&self, peer: &str, size: u64) {
        self.0.begun(peer, size);
    }

    /// The connection of a peer is closed soon, if nothing was taken by it for two seconds.
    fn close_idle(&self, peer: &str) {
        self.0.close_idle(peer);
    }

    /// Connections that were closed, and weren't told of yet: waits until there are any, no port is left, or so many
    /// seconds are over.
    fn closed(&self, py: Python<'_>, seconds: f64) -> Vec<Closed> {
        let patience = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::ZERO);
        let closed = py.detach(|| self.0.closed(patience));
        closed
            .into_iter()
            .map(|one| (one.peer.to_string(), one.port, ahead(one.reason)))
            .collect()
    }
}

fn ahead(reason: Reason) -> Option<u64> {
    match reason {
        Reason::Ahead(bytes) => Some(bytes),
        Reason::TakesNothing => None,
    }
}
