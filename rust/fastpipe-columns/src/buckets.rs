//! Converts columns of numbers to the indices of their buckets.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    Float16Type, Float32Type, Float64Type, Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type,
    UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, ArrowPrimitiveType};
use arrow_buffer::{BooleanBuffer, Buffer};
use arrow_schema::DataType;
use fastpipe_batch::{Buckets, DType, Error, ErrorKind, UNKNOWN, try_with_capacity};

use crate::nearest::nearest;

/// Names the allocated memory in out-of-memory errors.
const WHAT: &str = "the indices of buckets";

/// Whether values of a type have buckets.
pub(crate) fn has_buckets(ty: &DataType) -> bool {
    ty.is_integer() || ty.is_floating() || ty.is_decimal() || *ty == DataType::Null
}

/// Returns the index of each number's bucket as elements of type `to`. Also returns which numbers have an index, if
/// some don't.
pub(crate) fn in_buckets(
    array: &ArrayRef,
    buckets: &Buckets,
    to: DType,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    let integer = |value: i128| buckets.of_integer(value);
    let float = |value: f64| buckets.of_float(value);
    match array.data_type() {
        DataType::Int8 => indices::<Int8Type>(array, to, |v| integer(v.into())),
        DataType::Int16 => indices::<Int16Type>(array, to, |v| integer(v.into())),
        DataType::Int32 => indices::<Int32Type>(array, to, |v| integer(v.into())),
        DataType::Int64 => indices::<Int64Type>(array, to, |v| integer(v.into())),
        DataType::UInt8 => indices::<UInt8Type>(array, to, |v| integer(v.into())),
        DataType::UInt16 => indices::<UInt16Type>(array, to, |v| integer(v.into())),
        DataType::UInt32 => indices::<UInt32Type>(array, to, |v| integer(v.into())),
        DataType::UInt64 => indices::<UInt64Type>(array, to, |v| integer(v.into())),
        DataType::Float16 => indices::<Float16Type>(array, to, |v| float(v.to_f64())),
        DataType::Float32 => indices::<Float32Type>(array, to, |v| float(v.into())),
        DataType::Float64 => indices::<Float64Type>(array, to, float),
        ty if ty.is_decimal() => {
            let doubles = nearest(array, DType::F64)?;
            let (doubles, _) = doubles.as_chunks::<8>();
            let found = doubles.iter().map(|double| float(f64::from_le_bytes(*double)));
            written(array, to, found)
        }
        other => {
            let reason = format!("expected a column of numbers, found {other}");
            Err(Error::new(ErrorKind::Internal, reason))
        }
    }
}

fn indices<P: ArrowPrimitiveType>(
    array: &ArrayRef,
    to: DType,
    index: impl Fn(P::Native) -> i64,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    let values = array.as_primitive::<P>().values();
    written(array, to, values.iter().map(|value| index(*value)))
}

/// Writes the indices of an array's values.
fn written(
    array: &ArrayRef,
    to: DType,
    indices: impl Iterator<Item = i64>,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    let size = to.size();
    let mut found: Vec<u8> = try_with_capacity(array.len().saturating_mul(size), WHAT)?;
    let mut lost = false;
    let mut known: Vec<bool> = try_with_capacity(array.len(), WHAT)?;
    for (i, index) in indices.take(array.len()).enumerate() {
        // The stored value of a null may be anything.
        let fits = index != UNKNOWN || array.is_null(i);
        lost |= !fits;
        known.push(fits);
        // All indices fit the dtype because the spec was checked. Little-endian numbers begin with their lowest bytes.
        found.extend_from_slice(&index.max(0).to_le_bytes()[..size]);
    }
    Ok((Buffer::from_vec(found), lost.then(|| BooleanBuffer::from(known))))
}
