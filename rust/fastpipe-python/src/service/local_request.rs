//! Requests to a local server. The batches are in memory that the requesting program maps.
#![allow(unsafe_code)]

#[cfg(unix)]
use std::sync::{Mutex, MutexGuard, PoisonError};

use fastpipe_engine::Batch;
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;

use crate::arrays::shared_slabs::SharedSlabs;
use crate::errors::IntoPy;

/// A request for batches, on the side of the local server.
#[pyclass(frozen, module = "fastpipe._fastpipe")]
pub(crate) struct LocalRequest {
    #[cfg(unix)]
    request: Mutex<fastpipe_service::local::LocalRequest>,
}

#[pymethods]
impl LocalRequest {
    /// Creates a request over the socket with this file descriptor. The socket stays open until the request is dropped.
    #[new]
    #[cfg(unix)]
    fn new(slabs: &SharedSlabs, file: i32) -> PyResult<Self> {
        use std::os::fd::BorrowedFd;

        if file < 0 {
            return Err(PyValueError::new_err("the socket is closed"));
        }
        // SAFETY: the caller owns the socket of this file descriptor, and keeps it open during the call.
        let file = unsafe { BorrowedFd::borrow_raw(file) }.try_clone_to_owned()?;
        let request = fastpipe_service::local::LocalRequest::new(file.into(), slabs.lender().clone());
        Ok(LocalRequest {
            request: Mutex::new(request),
        })
    }

    #[new]
    #[cfg(not(unix))]
    fn new(_slabs: &SharedSlabs, _file: i32) -> PyResult<Self> {
        Err(PyValueError::new_err("local servers are not supported on this system"))
    }

    /// Waits until the program ends the request, and reclaims memory that the program didn't borrow.
    fn close(&self, py: Python<'_>) {
        #[cfg(unix)]
        py.detach(|| self.lock().close());
    }
}

impl LocalRequest {
    #[cfg(unix)]
    fn lock(&self) -> MutexGuard<'_, fastpipe_service::local::LocalRequest> {
        self.request.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Reports the end of the batches to the program.
    pub(crate) fn end(&self, py: Python<'_>) {
        #[cfg(unix)]
        py.detach(|| self.lock().end());
    }

    /// Sends batches. Returns false if the program has ended the request.
    #[cfg_attr(not(unix), allow(unused_variables))]
    pub(crate) fn send(&self, py: Python<'_>, batches: Vec<Batch>) -> PyResult<bool> {
        #[cfg(unix)]
        return py.detach(|| self.lock().send(batches)).py(py);
        #[cfg(not(unix))]
        Ok(false)
    }
}
