//! The features or columns of a source that Python asks to read.

use fastpipe_batch::Feature;
use pyo3::prelude::*;
use pyo3::types::PyDict;

use crate::specs::features::{self, Lowered};
use crate::specs::lookups::{self, LoweredLookup};

/// Features from a dict that maps each name to its lowered spec and, if text is read as indices, its lookup.
pub(crate) struct Features(pub(crate) Vec<Feature>);

impl<'py> FromPyObject<'_, 'py> for Features {
    type Error = PyErr;

    fn extract(lowered: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        let py = lowered.py();
        let lift = |(name, lowered): (Bound<'py, PyAny>, Bound<'py, PyAny>)| {
            let (spec, lookup): (Lowered<'py>, Option<LoweredLookup<'py>>) = lowered.extract()?;
            let name = name.extract()?;
            match lookup {
                Some(lookup) => lookups::feature(py, name, spec, lookup),
                None => features::feature(name, spec),
            }
        };
        Ok(Features(
            lowered.cast::<PyDict>()?.iter().map(lift).collect::<PyResult<_>>()?,
        ))
    }
}

/// A dict of features, or a list of columns whose specs are inferred (None for all columns).
pub(crate) enum Wanted {
    Features(Vec<Feature>),
    Columns(Option<Vec<String>>),
}

impl<'py> FromPyObject<'_, 'py> for Wanted {
    type Error = PyErr;

    fn extract(wanted: Borrowed<'_, 'py, PyAny>) -> PyResult<Self> {
        Ok(match wanted.is_instance_of::<PyDict>() {
            true => Wanted::Features(wanted.extract::<Features>()?.0),
            false => Wanted::Columns(wanted.extract()?),
        })
    }
}
