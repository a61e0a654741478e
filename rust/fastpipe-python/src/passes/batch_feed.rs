//! Receives the batches of a pass from servers.

use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use fastpipe_batch::{Error, Source};
use fastpipe_engine::{Batch, Memory};
use fastpipe_service::request::{Inbox, Place, Request};
use fastpipe_service::transfer::{Directory, Fallback, LocalPass, Transfer, Waits};
use fastpipe_service::transport::Transport;
use fastpipe_wire::Feed;
use pyo3::exceptions::PyRuntimeError;
use pyo3::prelude::*;

use crate::passes::pass::Pass;
use crate::service::connection::{ServiceConnection, attached};

/// The number of batches for which free slabs are kept.
const KEPT: u64 = 8;

/// Receives the batches of a pass from servers.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct BatchFeed {
    feed: Arc<Feed>,
    wanted: Mutex<Option<(Request, Inbox)>>,
}

impl BatchFeed {
    pub(crate) fn new(
        request: Request,
        source: Arc<dyn Source>,
        memory: &Memory,
        most_rows: u32,
        grouped: bool,
    ) -> Self {
        memory.keep_batches(KEPT);
        let feed = Arc::new(Feed::default());
        if let Some(total) = request.total {
            feed.end(total);
        }
        let most_bytes = request
            .memory_limit
            .map_or(usize::MAX, |most| usize::try_from(most).unwrap_or(usize::MAX));
        let inbox = Inbox {
            feed: feed.clone(),
            source,
            slabs: memory.slabs().clone(),
            most_rows: most_rows as usize,
            grouped,
            most_bytes,
        };
        BatchFeed {
            feed,
            wanted: Mutex::new(Some((request, inbox))),
        }
    }

    pub(crate) fn feed(&self) -> &Arc<Feed> {
        &self.feed
    }
}

#[pymethods]
impl BatchFeed {
    /// Starts to receive the batches from servers.
    ///
    /// `connections` are the current servers. `servers.listed()` returns the servers at a later time, or None if they
    /// never change. `servers.why()` explains an empty list. `servers.absent` is set to whether all servers are absent.
    ///
    /// `ticket` is the JSON of the entries that all tickets share, without the closing brace. `progress` is the
    /// progress from which the first epoch's steps are counted, as JSON. Batches are cheaper to make in groups of
    /// `group`.
    ///
    /// The pass continues for up to `patience` seconds without an answer of any server. A server must send something
    /// within `timeout` seconds of a request. `make(epoch, resumed, start, stop)` starts a pass of the fallback, which
    /// makes the first batches if `absent` is set.
    #[pyo3(signature = (connections, servers, *, ticket, progress, group, patience, timeout, make, absent))]
    #[allow(clippy::too_many_arguments)] // They have names in Python.
    fn bring(
        &self,
        connections: Vec<PyRef<'_, ServiceConnection>>,
        servers: Py<PyAny>,
        ticket: String,
        progress: Option<String>,
        group: u64,
        patience: f64,
        timeout: f64,
        make: Option<Py<PyAny>>,
        absent: bool,
    ) -> PyResult<()> {
        let wanted = self.wanted.lock().unwrap_or_else(PoisonError::into_inner).take();
        let (request, inbox) = wanted.ok_or_else(|| PyRuntimeError::new_err("the pass already has its servers"))?;
        let request = Request {
            ticket,
            progress,
            group,
            ..request
        };
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let waits = Waits {
            patience: seconds(patience),
            timeout: seconds(timeout),
        };
        let transports = connections.iter().map(|connection| connection.0.clone()).collect();
        let fallback = make.map(|make| Arc::new(Here(make)) as Arc<dyn Fallback>);
        Transfer::start(
            request,
            inbox,
            waits,
            transports,
            Arc::new(Servers(servers)),
            (fallback, absent),
        )?;
        Ok(())
    }
}

/// The servers that a Python directory object lists.
struct Servers(Py<PyAny>);

impl Directory for Servers {
    fn listed(&self) -> Option<Vec<Arc<Transport>>> {
        let listed = attached(|py| {
            let listed = self.0.call_method0(py, "listed")?;
            let listed: Option<Vec<PyRef<'_, ServiceConnection>>> = listed.extract(py)?;
            Ok(listed.map(|listed| listed.iter().map(|connection| connection.0.clone()).collect()))
        });
        listed.ok().flatten()
    }

    fn why(&self) -> String {
        attached(|py| self.0.call_method0(py, "why")?.extract(py)).unwrap_or_default()
    }

    fn set_absent(&self, absent: bool) {
        _ = attached(|py| self.0.setattr(py, "absent", absent));
    }
}

/// A reader in this process, as a fallback for servers.
struct Here(Py<PyAny>);

impl Fallback for Here {
    fn begin(&self, place: Place, stop: u64) -> Result<Box<dyn LocalPass>, Error> {
        attached(|py| {
            let made = self.0.call1(py, (place.epoch, place.resumed, place.step, stop))?;
            Ok(Box::new(PassHere(made.extract(py)?)) as Box<dyn LocalPass>)
        })
    }
}

struct PassHere(Py<Pass>);

impl LocalPass for PassHere {
    fn next(&mut self) -> Result<Option<Batch>, Error> {
        attached(|py| self.0.get().draw_whole(py, |_, batch| Ok(batch)))
    }
}

impl Drop for PassHere {
    fn drop(&mut self) {
        Python::try_attach(|py| self.0.get().close(py));
    }
}
