//! Converts Python's specs to features and back. Python first lowers its specs to plain tuples.

use std::sync::Arc;

use fastpipe_batch::{
    DType, Feature, Leaf, MAX_DIMENSIONS, MAX_FIXED_DIMENSIONS, Nulls, Request, Scalar, SparseLayout,
};
use pyo3::exceptions::PyValueError;
use pyo3::prelude::*;
use pyo3::types::{PyBool, PyBytes, PyFloat, PyInt, PyString};

/// A lowered spec: kind, shape (-1 for open dimensions), dtype, nulls, fill, pad, layout and check_indices. They are
/// followed by the field if its name differs from the feature's, whether its items are counted, and the scale of
/// decimals that are stored as integers.
pub(crate) type Lowered<'py> = (
    String,
    Vec<i64>,
    String,
    String,
    Option<Bound<'py, PyAny>>,
    Option<Bound<'py, PyAny>>,
    String,
    bool,
    Option<String>,
    bool,
    Option<i8>,
);

fn leaf(name: &str) -> PyResult<Leaf> {
    match name {
        "string" => Ok(Leaf::Bytes { utf8: true }),
        "bytes" => Ok(Leaf::Bytes { utf8: false }),
        _ => DType::from_name(name)
            .map(Leaf::Fixed)
            .ok_or_else(|| PyValueError::new_err(format!("unknown dtype {name:?}"))),
    }
}

fn scalar(value: &Bound<'_, PyAny>) -> PyResult<Scalar> {
    Ok(if value.is_instance_of::<PyBool>() {
        Scalar::Bool(value.extract()?)
    } else if value.is_instance_of::<PyInt>() {
        Scalar::Int(value.extract()?)
    } else if value.is_instance_of::<PyFloat>() {
        Scalar::Float(value.extract()?)
    } else if let Ok(text) = value.cast::<PyString>() {
        Scalar::Bytes(text.extract::<String>()?.into_bytes())
    } else {
        Scalar::Bytes(value.cast::<PyBytes>()?.as_bytes().to_vec())
    })
}

/// Builds a feature from its name and its lowered spec.
pub(crate) fn feature(name: String, lowered: Lowered<'_>) -> PyResult<Feature> {
    let (kind, shape, dtype, nulls, fill, pad, layout, check_indices, field, counts, scale) = lowered;
    // Specs have already checked the shape. NumPy can't create arrays of more dimensions.
    let fixed = shape.iter().rev().take_while(|&&d| d >= 0).count();
    if shape.len() > MAX_DIMENSIONS || (kind != "sparse" && fixed > MAX_FIXED_DIMENSIONS) {
        let reason = format!(
            "feature {name:?}: a shape must have at most {MAX_DIMENSIONS} dimensions, and at most {MAX_FIXED_DIMENSIONS} fixed dimensions at its end"
        );
        return Err(PyValueError::new_err(reason));
    }
    let leaf = leaf(&dtype)?;
    let fixed = |d: &i64| usize::try_from(*d).ok();
    let encoded = kind == "encoded";
    let request = match kind.as_str() {
        "dense" | "encoded" => {
            let shape = shape.iter().map(fixed).collect::<Option<Vec<_>>>();
            let shape = shape.ok_or_else(|| PyValueError::new_err("dense shapes must not have open dimensions"))?;
            Request::Dense {
                shape,
                leaf,
                pad: pad.as_ref().map(scalar).transpose()?,
            }
        }
        "ragged" => Request::Ragged {
            shape: shape.iter().map(fixed).collect(),
            leaf,
        },
        "sparse" => Request::Sparse {
            shape: shape.iter().map(|d| u64::try_from(*d).ok()).collect(),
            leaf,
            layout: if layout == "csr" {
                SparseLayout::Csr
            } else {
                SparseLayout::Coo
            },
            check_indices,
        },
        _ => return Err(PyValueError::new_err(format!("unknown kind of spec {kind:?}"))),
    };
    let nulls = match nulls.as_str() {
        "mask" => Nulls::Mask,
        "fill" => Nulls::Fill(fill.as_ref().map(scalar).transpose()?),
        _ => Nulls::Error,
    };
    Ok(Feature {
        field: field.unwrap_or_else(|| name.clone()),
        name,
        request,
        nulls,
        counts,
        encoded,
        scale,
        lookup: None,
    })
}

/// Returns the categories of each categorical feature: the texts that its codes represent.
pub(crate) fn listed<'a>(categories: impl Iterator<Item = (&'a str, &'a [Arc<str>])>) -> Vec<(String, Vec<String>)> {
    let texts = |texts: &[Arc<str>]| texts.iter().map(|text| text.to_string()).collect();
    categories
        .map(|(name, found)| (name.to_owned(), texts(found)))
        .collect()
}

/// The name, kind, shape, dtype, nulls and scale of a feature.
pub(crate) type Described = (String, &'static str, Vec<Option<u64>>, String, &'static str, Option<i8>);

/// Describes an inferred feature.
pub(crate) fn describe(feature: &Feature) -> Described {
    let (kind, shape) = match &feature.request {
        Request::Dense { shape, .. } => ("dense", shape.iter().map(|&d| Some(d as u64)).collect()),
        Request::Ragged { shape, .. } => ("ragged", shape.iter().map(|d| d.map(|d| d as u64)).collect()),
        Request::Sparse { shape, .. } => ("sparse", shape.clone()),
    };
    let nulls = match feature.nulls {
        Nulls::Error => "error",
        Nulls::Mask => "mask",
        Nulls::Fill(_) => "fill",
    };
    (
        feature.name.clone(),
        kind,
        shape,
        feature.request.leaf().to_string(),
        nulls,
        feature.scale,
    )
}
