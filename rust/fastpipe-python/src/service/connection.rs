//! Connections to servers.
#![allow(unsafe_code)]

use std::sync::Arc;
use std::time::Duration;

use fastpipe_batch::{Error, ErrorKind};
use fastpipe_service::connection::{Endpoint, Options};
use fastpipe_service::grpc::Code;
use fastpipe_service::per_process::ClientRuntime;
use fastpipe_service::tls::ClientFiles;
use fastpipe_service::transport::{Transport, Way};
use pyo3::exceptions::{PyConnectionError, PyRuntimeError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::PyBytes;

use crate::arrays::shared_arena::SharedArena;
use crate::errors::Raised;

/// A connection to a server. The first request connects.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct ServiceConnection(pub(crate) Arc<Transport>);

#[pymethods]
impl ServiceConnection {
    /// Creates a connection to `grpc://host:port` or `grpc+tls://host:port`. `ca` contains the certificates of trusted
    /// authorities; `certificate` contains the client's certificates and private key. All are PEM.
    #[new]
    #[pyo3(signature = (url, token=None, ca=None, certificate=None))]
    fn new(
        url: String,
        token: Option<String>,
        ca: Option<Vec<u8>>,
        certificate: Option<(Vec<u8>, Vec<u8>)>,
    ) -> PyResult<Self> {
        let files = ClientFiles { ca, certificate };
        let options = Options { token, files };
        let endpoint = Endpoint::new(&url, &options).map_err(PyValueError::new_err)?;
        let way = Way::Network(endpoint);
        Ok(ServiceConnection(Arc::new(Transport { url, way })))
    }

    /// Creates a connection to a local server. `request(kind)` opens the socket of a request.
    #[cfg(unix)]
    #[staticmethod]
    fn local(url: String, process: u32, memory: &SharedArena, request: Py<PyAny>) -> Self {
        use std::os::fd::FromRawFd as _;

        use fastpipe_service::local::LocalServer;

        let socket = move |kind| {
            attached(|py| {
                let socket = request.call1(py, (PyBytes::new(py, &[kind]),))?;
                let file: i32 = socket.call_method0(py, "detach")?.extract(py)?;
                // SAFETY: the socket was open, and `detach` has transferred its file descriptor to this code.
                Ok(unsafe { std::os::unix::net::UnixStream::from_raw_fd(file) })
            })
        };
        let way = Way::Local(LocalServer::new(process, memory.arena().clone(), Box::new(socket)));
        ServiceConnection(Arc::new(Transport { url, way }))
    }

    #[cfg(not(unix))]
    #[staticmethod]
    fn local(_url: String, _process: u32, _memory: &SharedArena, _request: Py<PyAny>) -> PyResult<Self> {
        Err(PyRuntimeError::new_err(
            "local servers are not supported on this system",
        ))
    }

    /// Requests an action, and returns its results. Raises ConnectionError if a later request may succeed, and
    /// RuntimeError if the server refuses the request.
    fn ask<'py>(&self, py: Python<'py>, action: &str, body: &[u8], seconds: f64) -> PyResult<Vec<Bound<'py, PyBytes>>> {
        let Way::Network(endpoint) = &self.0.way else {
            return Err(PyRuntimeError::new_err("a local server does not support actions"));
        };
        let timeout = Duration::try_from_secs_f64(seconds).unwrap_or_default();
        let runtime = ClientRuntime::get()?;
        let answered = py.detach(|| runtime.block_on(endpoint.act(action, body, timeout)));
        match answered {
            Ok(parts) => Ok(parts.iter().map(|part| PyBytes::new(py, part)).collect()),
            Err(status) if matches!(status.code, Code::Unavailable | Code::Internal | Code::Cancelled) => {
                Err(PyConnectionError::new_err(status.message))
            }
            Err(status) => Err(PyRuntimeError::new_err(status.message)),
        }
    }
}

/// Calls Python from a Rust thread. Converts an exception to an error that raises the exception again later.
pub(crate) fn attached<T>(call: impl FnOnce(Python<'_>) -> PyResult<T>) -> Result<T, Error> {
    let called = Python::try_attach(|py| {
        call(py).map_err(|raised| {
            let reason = raised.value(py).to_string();
            Error::new(ErrorKind::Raised, reason).with_cause(Arc::new(Raised::elsewhere(py, raised)))
        })
    });
    called.unwrap_or_else(|| Err(Error::new(ErrorKind::Closed, "the interpreter is ending")))
}
