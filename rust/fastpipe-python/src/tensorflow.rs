//! The Python side of `fastpipe-tensorflow`, which yields batches as TensorFlow tensors.
#![allow(unsafe_code)]

use std::collections::HashMap;
use std::path::PathBuf;

use fastpipe_batch::ErrorKind;
use fastpipe_engine::EpochKeys;
use fastpipe_tensorflow::{Argument, Code, Failure, Host, Iteration, Wanted, columns};
use pyo3::exceptions::{PyFileNotFoundError, PyImportError, PyNotImplementedError, PyValueError};
use pyo3::prelude::*;
use pyo3::types::{PyBytes, PyList, PyTuple};

use crate::errors;
use crate::passes::dropped_keys;
use crate::passes::pass::Pass;
use crate::sources::avro_messages::MessageDecoder;

/// Registers the TensorFlow ops. Must be called only once per process.
///
/// `begin` is called with the ID of a dataset and the values of its arguments (ints, bools, lists of bytes). It returns
/// a tuple:
///
/// - a pass, or None if there is nothing to read;
/// - for each column of an element, its name and, if nested arrays are wanted as coordinates, the shape of a row with
///   -1 for an open dimension;
/// - the shape of each feature, for errors in tensorflow-io's wording, or None;
/// - exceptions to report before the first batch, each with its text;
/// - whether to continue after damaged blocks.
#[pyfunction]
pub(crate) fn register_tensorflow(py: Python<'_>, begin: Py<PyAny>) -> PyResult<()> {
    let libraries = libraries(py)?;
    // SAFETY: these are the libraries of the TensorFlow that Python has imported.
    unsafe { fastpipe_tensorflow::register(&libraries, Box::new(PythonHost(begin))) }.map_err(PyImportError::new_err)
}

/// Registers a decoder under a number, by which graphs refer to its schema and features.
///
/// `wanted` contains the name of each column and, if its nested arrays are wanted as coordinates, the shape of a row
/// with -1 for an open dimension.
#[pyfunction]
pub(crate) fn register_tensorflow_parser(
    number: i64,
    decoder: &Bound<'_, MessageDecoder>,
    wanted: Vec<Wanted>,
) -> PyResult<()> {
    let known = decoder.get().known();
    let known = known.ok_or_else(|| PyValueError::new_err("no schema is known yet"))?;
    fastpipe_tensorflow::register_parser(number, known, wanted)
        .map_err(|failure| PyValueError::new_err(failure.message))
}

/// Returns the paths of the libraries of the TensorFlow that Python has imported. Only Python knows which TensorFlow
/// that is.
fn libraries(py: Python<'_>) -> PyResult<[PathBuf; 2]> {
    let modules = py.import("sys")?.getattr("modules")?;
    let not_imported = |_| PyImportError::new_err("TensorFlow isn't imported");
    let tensorflow = modules.get_item("tensorflow").map_err(not_imported)?;
    let folder: PathBuf = tensorflow.getattr("sysconfig")?.call_method0("get_lib")?.extract()?;
    let version: String = tensorflow.getattr("__version__")?.extract()?;
    let major = version.split('.').next().unwrap_or_default();
    let ending = if cfg!(target_os = "macos") {
        format!("{major}.dylib")
    } else {
        format!("so.{major}")
    };
    Ok(["framework", "cc"].map(|name| folder.join(format!("libtensorflow_{name}.{ending}"))))
}

/// Stops TensorFlow from calling into Python, and waits for calls that are in progress. Its passes end with an error.
#[pyfunction]
pub(crate) fn leave_tensorflow(py: Python<'_>) {
    py.detach(fastpipe_tensorflow::leave);
}

/// Starts passes by calling the function that `register_tensorflow` received.
struct PythonHost(Py<PyAny>);

impl Host for PythonHost {
    fn begin(&self, arguments: Vec<Argument>) -> Option<Result<Iteration, Failure>> {
        Python::try_attach(|py| self.start(py, arguments))
    }

    fn report(&self, keys: EpochKeys) {
        Python::try_attach(|py| {
            if let Err(error) = dropped_keys::report(py, Some(keys)) {
                error.write_unraisable(py, None);
            }
        });
    }

    fn class_name(&self, kind: ErrorKind) -> &'static str {
        errors::name(kind)
    }
}

impl PythonHost {
    fn start(&self, py: Python<'_>, arguments: Vec<Argument>) -> Result<Iteration, Failure> {
        let failed = |error: PyErr| Failure::new(code(py, &error), error.to_string());
        let made = || {
            let arguments = arguments.into_iter().map(|argument| to_python(py, argument));
            let arguments = PyTuple::new(py, arguments.collect::<PyResult<Vec<_>>>()?)?;
            self.0.bind(py).call1(arguments)?.extract()
        };
        let (pass, wanted, shapes, errors, skips): Begun<'_> = made().map_err(failed)?;
        let failure = |(error, told)| Failure::new(code(py, &PyErr::from_value(error)), told);
        let failures = errors.into_iter().map(failure).collect();
        let Some(pass) = pass else {
            return Ok(Iteration::new(None, Vec::new(), shapes, failures, skips));
        };
        let closed = || Failure::new(Code::Internal, "the pass was closed before it began");
        let running = pass.get().running().ok_or_else(closed)?;
        let columns = columns(running.columns(), wanted)?;
        Ok(Iteration::new(Some(running), columns, shapes, failures, skips))
    }
}

/// Converts a scalar to an int or a bool, and strings to a list of bytes.
fn to_python<'py>(py: Python<'py>, argument: Argument) -> PyResult<Bound<'py, PyAny>> {
    Ok(match argument {
        Argument::Int(number) => number.into_pyobject(py)?.into_any(),
        Argument::Bool(flag) => flag.into_pyobject(py)?.to_owned().into_any(),
        Argument::Texts(texts) => PyList::new(py, texts.iter().map(|text| PyBytes::new(py, text)))?.into_any(),
    })
}

/// The result of Python's `begin`: the pass, the columns of elements, the shapes of features, exceptions with their
/// texts, and whether damaged blocks are skipped.
type Begun<'py> = (
    Option<Bound<'py, Pass>>,
    Vec<Wanted>,
    Option<HashMap<String, String>>,
    Vec<(Bound<'py, PyAny>, String)>,
    bool,
);

/// Returns TensorFlow's error code for a Python exception.
fn code(py: Python<'_>, error: &PyErr) -> Code {
    if error.is_instance_of::<PyFileNotFoundError>(py) {
        Code::NotFound
    } else if error.is_instance_of::<PyValueError>(py) {
        Code::InvalidArgument
    } else if error.is_instance_of::<PyNotImplementedError>(py) {
        Code::Unimplemented
    } else {
        Code::Unknown
    }
}
