//! Conversion of errors into TensorFlow's errors.

use std::collections::HashMap;

use fastpipe_batch::{Error, ErrorKind, Lengths};

use crate::api::{Code, Failure};
use crate::registered::Registered;

/// Converts an error of reading into TensorFlow's form.
pub(super) fn read_failure(
    registered: &Registered,
    error: &Error,
    shapes: Option<&HashMap<String, String>>,
) -> Failure {
    let code = match error.kind() {
        ErrorKind::NotFound => Code::NotFound,
        kind if kind.is_damage() => Code::InvalidArgument,
        _ => Code::Unknown,
    };
    let message = match shapes.and_then(|shapes| undecoded(error, shapes)) {
        Some(told) => format!("{told}{}", error.location()),
        None => format!("{}: {error}", registered.host.class_name(error.kind())),
    };
    Failure::new(code, message)
}

/// Returns the message of tensorflow-io for a value that can't be decoded, since programs may match on it. `None` for
/// other errors.
fn undecoded(error: &Error, shapes: &HashMap<String, String>) -> Option<String> {
    let feature = error.location().feature.as_deref()?;
    let shape = shapes.get(feature)?;
    let reason = match (error.kind(), error.lengths()) {
        (ErrorKind::Null, _) => format!("Feature value is null. fill={{'{feature}': value}} replaces nulls"),
        (
            _,
            Some(Lengths::Dimension {
                dimension,
                expected,
                found,
            }),
        ) => format!(
            "Number of decoded value {found} does not match the expected dimension size {expected} at the {}th \
             dimension in user defined shape {shape}",
            dimension + 1
        ),
        (_, Some(Lengths::Sparse { first, other })) => {
            let name = |dimension: Option<u32>| dimension.map_or("values".to_owned(), |d| format!("indices{d}"));
            format!(
                "Numbers of decoded value in indice and values array are different. Numbers of decoded value in \
                 [{}, {}] arrays are [{}, {}]",
                name(first.0),
                name(other.0),
                first.1,
                other.1
            )
        }
        _ => return None,
    };
    Some(format!("Failed to decode feature {feature}. Reason: {reason}"))
}
