//! Conversions between Arrow's types and fastpipe's types.

use arrow_schema::{DataType, TimeUnit as ArrowUnit};
use fastpipe_batch::{DType, Leaf, TimeUnit};

fn unit(unit: ArrowUnit) -> TimeUnit {
    match unit {
        ArrowUnit::Second => TimeUnit::Seconds,
        ArrowUnit::Millisecond => TimeUnit::Milliseconds,
        ArrowUnit::Microsecond => TimeUnit::Microseconds,
        ArrowUnit::Nanosecond => TimeUnit::Nanoseconds,
    }
}

fn arrow_unit(unit: TimeUnit) -> Option<ArrowUnit> {
    match unit {
        TimeUnit::Days => None,
        TimeUnit::Seconds => Some(ArrowUnit::Second),
        TimeUnit::Milliseconds => Some(ArrowUnit::Millisecond),
        TimeUnit::Microseconds => Some(ArrowUnit::Microsecond),
        TimeUnit::Nanoseconds => Some(ArrowUnit::Nanosecond),
    }
}

/// Returns the default type of values of an Arrow type, or `None` if the type isn't supported.
pub(crate) fn leaf(ty: &DataType) -> Option<Leaf> {
    let dtype = match ty {
        DataType::Null | DataType::Boolean => DType::Bool,
        DataType::Int8 => DType::I8,
        DataType::Int16 => DType::I16,
        DataType::Int32 => DType::I32,
        DataType::Int64 => DType::I64,
        DataType::UInt8 => DType::U8,
        DataType::UInt16 => DType::U16,
        DataType::UInt32 => DType::U32,
        DataType::UInt64 => DType::U64,
        DataType::Float16 => DType::F16,
        DataType::Float32 => DType::F32,
        DataType::Float64
        | DataType::Decimal32(..)
        | DataType::Decimal64(..)
        | DataType::Decimal128(..)
        | DataType::Decimal256(..) => DType::F64,
        DataType::Date32 => DType::Datetime(TimeUnit::Days),
        DataType::Date64 => DType::Datetime(TimeUnit::Milliseconds),
        // Timestamps are instants. Those with a time zone are read as UTC.
        DataType::Timestamp(of, _) => DType::Datetime(unit(*of)),
        DataType::Time32(of) | DataType::Time64(of) | DataType::Duration(of) => DType::Timedelta(unit(*of)),
        DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View => return Some(Leaf::Bytes { utf8: true }),
        DataType::Binary | DataType::LargeBinary | DataType::BinaryView | DataType::FixedSizeBinary(_) => {
            return Some(Leaf::Bytes { utf8: false });
        }
        _ => return None,
    };
    Some(Leaf::Fixed(dtype))
}

/// Returns the Arrow type with the same memory layout, except that Arrow counts days in 32 bits.
pub(crate) fn arrow(leaf: Leaf) -> DataType {
    let dtype = match leaf {
        Leaf::Bytes { utf8: true } => return DataType::LargeUtf8,
        Leaf::Bytes { utf8: false } => return DataType::LargeBinary,
        Leaf::Fixed(dtype) => dtype,
    };
    match dtype {
        DType::Bool => DataType::Boolean,
        DType::I8 => DataType::Int8,
        DType::I16 => DataType::Int16,
        DType::I32 => DataType::Int32,
        DType::I64 => DataType::Int64,
        DType::U8 => DataType::UInt8,
        DType::U16 => DataType::UInt16,
        DType::U32 => DataType::UInt32,
        DType::U64 => DataType::UInt64,
        DType::F16 => DataType::Float16,
        DType::F32 => DataType::Float32,
        DType::F64 => DataType::Float64,
        DType::Datetime(of) => arrow_unit(of).map_or(DataType::Date32, |of| DataType::Timestamp(of, None)),
        // Arrow has no durations in days, and callers reject them before this point.
        DType::Timedelta(of) => DataType::Duration(arrow_unit(of).unwrap_or(ArrowUnit::Second)),
    }
}

/// Returns the number of decimal places of a type's values, which is 0 for integers.
pub(crate) fn scale(ty: &DataType) -> Option<i8> {
    match ty {
        DataType::Decimal32(_, scale)
        | DataType::Decimal64(_, scale)
        | DataType::Decimal128(_, scale)
        | DataType::Decimal256(_, scale) => Some(*scale),
        _ if ty.is_integer() => Some(0),
        _ => None,
    }
}

/// Checks that values of a type can be read as integers in units of `10**-asked`. Otherwise, returns the reason and
/// what to request instead.
pub(crate) fn fits_scale(ty: &DataType, asked: i8) -> Result<(), String> {
    match scale(ty) {
        Some(own) if own > asked => Err(format!(
            "the column's values have {own} decimal places, and scale={asked} would round them: use scale={own} or more"
        )),
        Some(_) => Ok(()),
        None if *ty == DataType::Null => Ok(()),
        None => Err(format!(
            "scale= requires decimals or integers, but the column's values are of type {ty}: remove it"
        )),
    }
}

/// Checks that values of a type can be read as the requested type. Otherwise, returns what to request instead.
pub(crate) fn fits(ty: &DataType, asked: Leaf) -> Result<(), &'static str> {
    let number = |d: DType| d.is_integer() || d.is_float();
    let (fits, ask) = match ty {
        DataType::Null => (true, ""),
        DataType::Boolean => (
            matches!(asked, Leaf::Fixed(d) if d == DType::Bool || number(d)),
            "bool or a number",
        ),
        _ if ty.is_integer() => (
            matches!(asked, Leaf::Fixed(d) if number(d)),
            "an integer or floating-point dtype",
        ),
        _ if ty.is_floating() => (
            matches!(asked, Leaf::Fixed(d) if d.is_float()),
            "a floating-point dtype",
        ),
        DataType::Decimal32(..) | DataType::Decimal64(..) | DataType::Decimal128(..) | DataType::Decimal256(..) => (
            matches!(asked, Leaf::Fixed(DType::F32 | DType::F64)),
            "\"float64\" or \"float32\", or for integers with scale=",
        ),
        _ => match leaf(ty) {
            Some(Leaf::Fixed(DType::Datetime(_))) => (
                matches!(asked, Leaf::Fixed(DType::Datetime(_) | DType::I64)),
                "a datetime64 dtype, or int64 for numbers of its unit",
            ),
            Some(Leaf::Fixed(DType::Timedelta(_))) => (
                matches!(asked, Leaf::Fixed(DType::I64))
                    || matches!(asked, Leaf::Fixed(DType::Timedelta(of)) if of != TimeUnit::Days),
                "a timedelta64 dtype of seconds or less, or int64 for numbers of its unit",
            ),
            Some(Leaf::Bytes { .. }) => (matches!(asked, Leaf::Bytes { .. }), "\"string\" or \"bytes\""),
            _ => (false, "another column"),
        },
    };
    if fits { Ok(()) } else { Err(ask) }
}
