//! A server of passes. Python decides who may read which batches, and what is logged.

use std::net::SocketAddr;
use std::sync::atomic::Ordering::Relaxed;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use bytes::Bytes;
use fastpipe_batch::SlabPool;
use fastpipe_engine::{Poll, RunningPass, Yielded};
use fastpipe_service::grpc::{Code, Status};
use fastpipe_service::meter::{Meter, Wait};
use fastpipe_service::outlet::Outlet;
use fastpipe_service::server::{Limits, Server, Service};
use fastpipe_service::serving::{Request, serve};
use fastpipe_service::streams::{Bounds, Need, Pass as StreamPass, Refusal, Streams, Together};
use fastpipe_service::tls::ServerFiles;
use fastpipe_wire::Outgoing;
use pyo3::exceptions::{PyConnectionError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyDict};

use crate::errors::to_py;
use crate::passes::pass::{Pass, more};

/// The number of free slabs to keep for small batches that are sent together.
const TOGETHER: usize = 8;

/// Names and descriptions of the actions.
const ACTIONS: [(&str, &str); 4] = [
    (
        "describe",
        "the columns of a reader and the number of rows in each unit",
    ),
    ("place", "the file and the position of a row"),
    ("health", "whether the server accepts requests"),
    ("metrics", "statistics of the server in Prometheus format"),
];

/// Actions that are answered even when the server is busy.
const QUICK: [&str; 2] = ["health", "metrics"];

/// The Python object with the methods that [`FlightServer`] documents, and the state of the server.
struct Decisions {
    python: Py<PyAny>,
    token: Option<Vec<u8>>,
    streams: Streams<Bytes>,
    meter: Arc<Meter>,
}

/// Python's answer to a ticket: the stream, the first step and the step after the last, the reader, the rows of a
/// batch, the bytes of a pass, and a function that starts a pass at a step.
type Opened = (Vec<u8>, u64, u64, String, u32, usize, Py<PyAny>);

/// The status of a call after the interpreter has ended.
fn ended() -> Status {
    Status::new(Code::Cancelled, "the server is stopping")
}

/// Returns the status for an exception that is not sent in place of a batch.
fn status(py: Python<'_>, error: &PyErr) -> Status {
    let text = error.value(py).to_string();
    if error.is_instance_of::<PyConnectionError>(py) {
        // This status looks like a failed connection, so the client retries.
        Status::new(Code::Unavailable, text)
    } else if error.is_instance_of::<PyValueError>(py) {
        Status::new(Code::InvalidArgument, text)
    } else {
        Status::new(Code::Internal, error.to_string())
    }
}

impl Decisions {
    /// Encodes an exception for the client.
    fn told(&self, py: Python<'_>, error: PyErr) -> Vec<u8> {
        let told = self.python.bind(py).call_method1("told", (error.into_value(py),));
        told.and_then(|told| told.extract()).unwrap_or_default()
    }

    /// Starts a pass at a step.
    fn begin(self: &Arc<Self>, opened: &Opened, step: u64) -> Result<Box<dyn StreamPass>, Vec<u8>> {
        let begun = Python::try_attach(|py| {
            let begin = || -> PyResult<_> {
                let pass = opened.6.bind(py).call1((step,))?.cast_into::<Pass>()?;
                let pass = pass.get();
                Ok((pass.running(), pass.batches()))
            };
            begin().map_err(|error| self.told(py, error))
        });
        let Some((Some(running), left)) = begun.transpose()? else {
            return Err(Vec::new());
        };
        Ok(Box::new(Sending {
            running,
            left,
            pool: SlabPool::new(TOGETHER),
            decisions: self.clone(),
        }))
    }

    /// Sends the batches that a ticket requests. `request` is Python's record of the request.
    fn send(
        self: &Arc<Self>,
        request: &Py<PyAny>,
        ticket: &[u8],
        client: SocketAddr,
        outlet: &Outlet,
        sent: &mut (u64, u64),
    ) -> Result<(), Refusal> {
        let opened = Python::try_attach(|py| {
            let opened = self
                .python
                .bind(py)
                .call_method1("open", (request, PyBytes::new(py, ticket)));
            let opened = opened.map_err(|error| Refusal::Status(status(py, &error)))?;
            if let Ok(told) = opened.cast::<PyBytes>() {
                return Err(Refusal::Told(told.as_bytes().to_vec()));
            }
            opened
                .extract::<Opened>()
                .map_err(|error| Refusal::Status(status(py, &error)))
        });
        let opened = opened.ok_or_else(ended)??;
        let request = Request {
            key: Bytes::copy_from_slice(&opened.0),
            steps: opened.1..opened.2,
            need: Need {
                reader: opened.3.as_str().into(),
                rows: opened.4,
                limit: opened.5,
            },
            begin: &|step| self.begin(&opened, step),
            closed: &|client| self.closed(client),
        };
        let served = serve(
            &request,
            &self.streams,
            &self.meter,
            (&client.to_string(), outlet),
            sent,
        );
        Python::try_attach(|_| drop(opened));
        served
    }

    fn closed(&self, client: SocketAddr) {
        self.meter.add(|meter| &meter.closed, 1);
        self.call("log_closed", client);
    }

    fn call(&self, method: &str, client: SocketAddr) {
        Python::try_attach(|py| {
            let called = self.python.call_method1(py, method, (client.to_string(),));
            called.map_err(|error| error.write_unraisable(py, None))
        });
    }
}

/// Answers calls on the server's threads, as the Python object decides.
struct Answers(Arc<Decisions>);

impl Service for Answers {
    fn admit(&self, authorization: Option<&[u8]>) -> Result<(), Status> {
        let Some(token) = &self.0.token else { return Ok(()) };
        let given = authorization
            .and_then(|given| given.strip_prefix(b"Bearer "))
            .unwrap_or_default();
        // The comparison takes the same time for any token of the same length.
        let differs = token
            .iter()
            .zip(given)
            .fold(token.len() != given.len(), |differs, (a, b)| differs | (a != b));
        if differs {
            let text = "this server requires a token: connect(..., token=...)";
            return Err(Status::new(Code::Unauthenticated, text));
        }
        Ok(())
    }

    fn not_admitted(&self, client: SocketAddr) {
        self.0.call("log_refused", client);
    }

    fn get(&self, ticket: &[u8], client: SocketAddr, outlet: &Outlet) -> Result<(), Status> {
        let (Decisions { meter, .. }, mut sent) = (&*self.0, (0, 0));
        meter.add(|meter| &meter.requests, 1);
        meter.add(|meter| &meter.clients, 1);
        let request = Python::try_attach(|py| self.0.python.call_method1(py, "request", (client.to_string(),)));
        let result = match request
            .ok_or_else(ended)
            .and_then(|request| request.map_err(|error| Status::new(Code::Internal, error.to_string())))
        {
            Err(status) => Err(status),
            Ok(request) => {
                let result = self.0.send(&request, ticket, client, outlet, &mut sent);
                let (outcome, told) = match &result {
                    Ok(()) => ("sent", None),
                    Err(Refusal::Told(told)) => ("error", Some(told.clone())),
                    Err(Refusal::Status(status)) => {
                        (outcome(status, outlet), Some(status.message.clone().into_bytes()))
                    }
                };
                match outcome {
                    "error" => meter.add(|meter| &meter.errors, 1),
                    "refused" => meter.add(|meter| &meter.refused, 1),
                    _ => {}
                }
                Python::try_attach(|py| {
                    let told = told.map(|told| PyBytes::new(py, &told));
                    let ended = request.call_method1(py, "end", (outcome, sent.0, sent.1, told));
                    drop(ended.map_err(|error| error.write_unraisable(py, None)));
                    drop(request);
                });
                match result {
                    Err(Refusal::Told(told)) => outlet.send(Some(&told), []),
                    Err(Refusal::Status(status)) => Err(status),
                    Ok(()) => Ok(()),
                }
            }
        };
        meter.clients.fetch_sub(1, Relaxed);
        result
    }

    fn act(&self, kind: &str, body: &[u8], client: SocketAddr) -> Result<Vec<Vec<u8>>, Status> {
        let acted = Python::try_attach(|py| {
            let answer = self
                .0
                .python
                .call_method1(py, "act", (kind, PyBytes::new(py, body), client.to_string()));
            answer
                .and_then(|answer| answer.extract(py))
                .map_err(|error| status(py, &error))
        });
        acted.ok_or_else(ended)?
    }

    fn actions(&self) -> &[(&str, &str)] {
        &ACTIONS
    }

    fn is_quick(&self, kind: &str) -> bool {
        QUICK.contains(&kind)
    }

    fn closed(&self, client: SocketAddr) {
        self.0.closed(client);
    }
}

/// Classifies the outcome of a request that ended with a status.
fn outcome(status: &Status, outlet: &Outlet) -> &'static str {
    match status.code {
        Code::Cancelled if outlet.is_closed() => "left",
        Code::Cancelled => "cancelled",
        Code::Unavailable if status.message.starts_with("this server is busy") => "refused",
        _ => "error",
    }
}

/// A pass whose batches are sent to clients.
struct Sending {
    running: Arc<RunningPass>,
    /// The number of batches that are left, or `None` if the pass has no end.
    left: Option<u64>,
    /// Memory for small batches that are sent together.
    pool: Arc<SlabPool>,
    decisions: Arc<Decisions>,
}

impl Sending {
    fn failed(&self, error: &fastpipe_batch::Error) -> Vec<u8> {
        self.running.release();
        Python::try_attach(|py| self.decisions.told(py, to_py(py, error))).unwrap_or_default()
    }
}

impl StreamPass for Sending {
    fn next(&mut self, most: usize, gather: Duration, ending: &dyn Fn() -> bool) -> Result<Option<Together>, Vec<u8>> {
        let asked = Instant::now();
        let first = loop {
            match self.running.poll().map_err(|error| self.failed(&error))? {
                Poll::Ready(number, batch) => {
                    let after = batch.info.after.clone();
                    self.running.delivered(Yielded::new(number, &batch, asked), after);
                    break *batch;
                }
                Poll::End => return Ok(None),
                Poll::Pending if ending() => return Ok(None),
                Poll::Pending => {}
            }
        };
        let batches = more(&self.running, first, most, gather);
        self.left = self.left.map(|left| left.saturating_sub(batches.len() as u64));
        let together = Outgoing::new(batches, &self.pool).map_err(|error| self.failed(&error))?;
        Ok(Some(together))
    }

    fn is_over(&self) -> bool {
        self.left == Some(0)
    }
}

/// A server of passes.
///
/// `decisions` has these methods:
///
/// - `request(peer)` returns a record of a request, which has a method `end(outcome, batches, bytes, told)`.
/// - `open(record, ticket)` returns an `Opened`, or bytes that are sent instead of batches.
/// - `told(error)` returns such bytes for an exception.
/// - `act(kind, body, peer)` returns a list of bytes.
/// - `log_refused(peer)` and `log_closed(peer)` log an event.
///
/// If `open` or `act` raises `ConnectionError`, the client retries. After a `ValueError` it does not.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct FlightServer {
    server: Mutex<Server>,
    decisions: Arc<Decisions>,
    port: u16,
}

impl FlightServer {
    fn lock(&self) -> MutexGuard<'_, Server> {
        self.server.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The limits and files of a server.
#[derive(FromPyObject)]
struct ServerOptions {
    token: Option<String>,
    tls: Option<(Vec<u8>, Vec<u8>)>,
    client_ca: Option<Vec<u8>>,
    max_passes: usize,
    cache_bytes: usize,
    pass_bytes: Option<usize>,
    alive: Option<usize>,
    max_requests: usize,
    patience: f64,
    idle: f64,
    request_bytes: usize,
    requests_bytes: usize,
}

#[pymethods]
impl FlightServer {
    /// Starts to listen on a host and a port.
    #[new]
    fn new(py: Python<'_>, host: &str, port: u16, options: ServerOptions, decisions: Py<PyAny>) -> PyResult<Self> {
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let bounds = Bounds {
            passes: options.max_passes,
            keep: options.cache_bytes,
            pass_bytes: options.pass_bytes,
            alive: options.alive,
            patience: seconds(options.patience),
        };
        let limits = Limits {
            calls: options.max_requests,
            request: options.request_bytes,
            requests: options.requests_bytes,
            idle: seconds(options.idle),
        };
        let tls = options.tls.map(|(chain, key)| ServerFiles {
            chain,
            key,
            client_ca: options.client_ca,
        });
        let meter = Arc::new(Meter::default());
        let decisions = Arc::new(Decisions {
            python: decisions,
            token: options.token.map(String::into_bytes),
            streams: Streams::new(bounds),
            meter: meter.clone(),
        });
        let answers = Arc::new(Answers(decisions.clone()));
        let server = py.detach(|| Server::start((host, port), tls.as_ref(), limits, answers, meter))?;
        Ok(FlightServer {
            port: server.address().port(),
            server: Mutex::new(server),
            decisions,
        })
    }

    /// The port on which the server listens.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Returns counters since the start of the server, and current values, by name.
    fn stats<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let Decisions { meter, streams, .. } = &*self.decisions;
        let counts = py.detach(|| streams.counts());
        let found = PyDict::new(py);
        for (name, number) in [
            ("requests", meter.requests.load(Relaxed)),
            ("batches", meter.batches.load(Relaxed)),
            ("bytes", meter.bytes.load(Relaxed)),
            ("errors", meter.errors.load(Relaxed)),
            ("decoded", counts.decoded),
            ("begun", counts.begun),
            ("kept_hits", counts.kept_hits),
            ("refused", meter.refused.load(Relaxed)),
            ("closed", meter.closed.load(Relaxed)),
            ("clients", meter.clients.load(Relaxed)),
            ("streams", counts.streams as u64),
            ("passes", counts.passes as u64),
            ("kept_bytes", counts.kept_bytes as u64),
            ("batch_bytes", counts.alive_bytes as u64),
        ] {
            found.set_item(name, number)?;
        }
        found.set_item("making_seconds", meter.seconds(Wait::Making))?;
        found.set_item("held_back_seconds", meter.seconds(Wait::HeldBack))?;
        Ok(found)
    }

    /// Ends all passes. Waits up to `grace` seconds until all connections have ended, and returns whether they have. It
    /// is safe to call this twice.
    fn stop(&self, py: Python<'_>, grace: f64) -> bool {
        let grace = Duration::try_from_secs_f64(grace).unwrap_or_default();
        py.detach(|| {
            self.decisions.streams.close();
            self.lock().stop(grace)
        })
    }
}

impl Drop for FlightServer {
    fn drop(&mut self) {
        // The server's threads may wait for the GIL.
        let mut stop = || {
            self.server
                .get_mut()
                .unwrap_or_else(PoisonError::into_inner)
                .stop(Duration::ZERO)
        };
        if Python::try_attach(|py| py.detach(&mut stop)).is_none() {
            stop();
        }
    }
}
