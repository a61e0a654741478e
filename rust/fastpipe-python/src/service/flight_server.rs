//! A server of passes, with what Python decides: who may read which batches, and what is logged.

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

/// Free slabs that are kept for small batches that are sent together.
const TOGETHER: usize = 8;

/// Actions: their names, and what they do.
const ACTIONS: [(&str, &str); 4] = [
    ("describe", "what a reader yields, and the rows of its units"),
    ("place", "where a row comes from"),
    ("health", "whether the server takes requests"),
    ("metrics", "what it has done, as Prometheus reads it"),
];

/// Actions that are answered however busy the server is.
const QUICK: [&str; 2] = ["health", "metrics"];

/// What the Python object decides, which `FlightServer` describes.
struct Decisions {
    python: Py<PyAny>,
    token: Option<Vec<u8>>,
    streams: Streams<Bytes>,
    meter: Arc<Meter>,
}

/// What Python says of a ticket: the stream, the first step and the one after the last, the reader, the rows of a
/// batch and the bytes of a pass, and what begins a pass at a step.
type Opened = (Vec<u8>, u64, u64, String, u32, usize, Py<PyAny>);

/// How a call ends when the interpreter has ended.
fn ended() -> Status {
    Status::new(Code::Cancelled, "the server is stopping")
}

/// The status for an exception that isn't told in place of a batch.
fn status(py: Python<'_>, error: &PyErr) -> Status {
    let text = error.value(py).to_string();
    if error.is_instance_of::<PyConnectionError>(py) {
        // As if the connection had failed: the client asks again.
        Status::new(Code::Unavailable, text)
    } else if error.is_instance_of::<PyValueError>(py) {
        Status::new(Code::InvalidArgument, text)
    } else {
        Status::new(Code::Internal, error.to_string())
    }
}

impl Decisions {
    /// The bytes that tell a client of an exception.
    fn told(&self, py: Python<'_>, error: PyErr) -> Vec<u8> {
        let told = self.python.bind(py).call_method1("told", (error.into_value(py),));
        told.and_then(|told| told.extract()).unwrap_or_default()
    }

    /// Begins a pass.
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

    /// Sends what a ticket asks for. `request` is Python's record of it.
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

/// The decisions, for the server's threads.
struct Answers(Arc<Decisions>);

impl Service for Answers {
    fn admit(&self, authorization: Option<&[u8]>) -> Result<(), Status> {
        let Some(token) = &self.0.token else { return Ok(()) };
        let given = authorization
            .and_then(|given| given.strip_prefix(b"Bearer "))
            .unwrap_or_default();
        // In the same time whatever is given, but for its length.
        let differs = token
            .iter()
            .zip(given)
            .fold(token.len() != given.len(), |differs, (a, b)| differs | (a != b));
        if differs {
            let text = "this server wants a token: connect(..., token=...)";
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

/// What became of a request that ended with a status.
fn outcome(status: &Status, outlet: &Outlet) -> &'static str {
    match status.code {
        Code::Cancelled if outlet.is_closed() => "left",
        Code::Cancelled => "cancelled",
        Code::Unavailable if status.message.starts_with("this server is busy") => "refused",
        _ => "error",
    }
}

/// A pass whose batches are sent.
struct Sending {
    running: Arc<RunningPass>,
    /// Batches that are to come; `None` if it has no end.
    left: Option<u64>,
    /// For small batches that are sent together.
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
/// `decisions` has the methods `request(peer)`, which returns a record of a request with `end(outcome, batches, bytes,
/// told)`; `open(record, ticket)`, which returns an `Opened`, or bytes that are told in place of batches;
/// `told(error)`, which returns such bytes; `act(kind, body, peer)`, which returns a list of bytes; `log_refused(peer)`
/// and `log_closed(peer)`. A `ConnectionError` of `open` and `act` lets the client ask again, and a `ValueError`
/// doesn't.
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

/// The bounds and files of a server.
#[derive(FromPyObject)]
struct ServerOptions {
    token: Option<String>,
    tls: Option<(Vec<u8>, Vec<u8>)>,
    client_ca: Option<Vec<u8>>,
    max_passes: usize,
    keep: usize,
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
    /// Listens at a host and a port.
    #[new]
    fn new(py: Python<'_>, host: &str, port: u16, options: ServerOptions, decisions: Py<PyAny>) -> PyResult<Self> {
        let seconds = |seconds| Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let bounds = Bounds {
            passes: options.max_passes,
            keep: options.keep,
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

    /// The port that it listens at.
    #[getter]
    fn port(&self) -> u16 {
        self.port
    }

    /// Numbers of what it has done, and of what there is now.
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

    /// Ends all passes, and waits until connections have ended, but no longer than `grace` seconds. Returns whether
    /// they have. Twice does no harm.
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
        // Its threads may wait for the GIL.
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
