//! Batches as TensorFlow's tensors, made by kernels of its own: no call into Python and no GIL between a batch and the
//! graph.
//!
//! Two ops are registered through TensorFlow's C API for kernels. `FastpipeParseAvro` decodes records that a graph has.
//! `FastpipeNext` hands out the batches of passes. Without a *ticket* it asks Python for a pass and returns one: a
//! tensor that whoever keeps it keeps the pass alive with. With a ticket it waits for the pass's next batch and returns
//! tensors over the batch's own memory, which goes back to its pool when the last of them dies. Strings are copied,
//! since TensorFlow has its own; so are shapes of sparse tensors.
#![allow(unsafe_code)]

mod api;
mod coordinates;
mod failure;
mod gate;
mod inputs;
mod iteration;
mod kernels;
mod outputs;
mod parsing;
mod registered;
mod ticket;

use std::path::PathBuf;

use pyo3::exceptions::{PyImportError, PyValueError};
use pyo3::prelude::*;

use crate::sources::avro_messages::MessageDecoder;
use outputs::Wanted;

/// Registers the ops, once in a process.
///
/// `begin` is called with the number of a dataset and the values of its arguments (ints, bools, lists of bytes). It
/// returns a pass, or None if there is nothing to be read; for each column of an element its name and, where nested
/// arrays are wanted as coordinates, the shape of a row with -1 for any length; for errors in tensorflow-io's words the
/// shape of each feature, or None; exceptions that are told of before the first batch, each with its text; and whether
/// to go on behind damaged blocks.
#[pyfunction]
pub(crate) fn register_tensorflow(py: Python<'_>, begin: Py<PyAny>) -> PyResult<()> {
    let libraries = libraries(py)?;
    // SAFETY: the libraries of the TensorFlow that Python has imported.
    unsafe { kernels::register(&libraries, begin) }.map_err(PyImportError::new_err)
}

/// Makes a decoder known to graphs by a number, which says its schema and features.
///
/// `wanted` is each column's name and, where its nested arrays are wanted as coordinates, the shape of a row with -1
/// for any length.
#[pyfunction]
pub(crate) fn register_tensorflow_parser(
    number: i64,
    decoder: &Bound<'_, MessageDecoder>,
    wanted: Vec<Wanted>,
) -> PyResult<()> {
    let known = decoder.get().known();
    let known = known.ok_or_else(|| PyValueError::new_err("no schema is known yet"))?;
    parsing::register(number, known, wanted).map_err(|failure| PyValueError::new_err(failure.message))
}

/// The libraries of the TensorFlow that Python has imported: nobody else says which files they are.
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

/// Lets TensorFlow call into Python no longer, and waits for calls that are under way. Its passes end with an error.
#[pyfunction]
pub(crate) fn leave_tensorflow(py: Python<'_>) {
    py.detach(kernels::leave);
}
