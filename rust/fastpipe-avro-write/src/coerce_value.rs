//! Converts values to the types of a schema. All conversions and checks of values are in this module.
//!
//! Values are never rounded or truncated, except floating-point numbers, which are rounded to the precision of `float`
//! or `double`.

use std::collections::HashMap;
use std::fmt::Write;
use std::sync::Arc;

use arrow_array::builder::StringBuilder;
use arrow_array::cast::AsArray;
use arrow_array::types::{Int32Type, Int64Type};
use arrow_array::{Array, ArrayRef, Int32Array, Int64Array, NullArray};
use arrow_buffer::BooleanBuffer;
use arrow_cast::{CastOptions, cast, cast_with_options};
use arrow_schema::{ArrowError, DataType, TimeUnit};
use fastpipe_batch::{Error, ErrorKind, Result};

use crate::schema::Type;

/// Which values are visible; `None` if all are.
pub(crate) type Seen = Option<BooleanBuffer>;

/// Returns the index of the first visible value for which `fails` is true.
pub(crate) fn first_seen(seen: &Seen, len: usize, fails: impl Fn(usize) -> bool) -> Option<usize> {
    (0..len).find(|&i| seen.as_ref().is_none_or(|seen| seen.value(i)) && fails(i))
}

/// The target type of values, and which of the values are visible.
pub(crate) struct Leaf<'a> {
    pub(crate) ty: &'a Type,
    pub(crate) path: &'a str,
    pub(crate) seen: &'a Seen,
}

fn malformed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

#[cold]
pub(crate) fn misfit(array: &dyn Array, wanted: &str, path: &str) -> Error {
    let reason = format!(
        "values of Arrow type {} aren't {wanted}: cast the column, or pass another schema",
        array.data_type()
    );
    Error::new(ErrorKind::Schema, reason).at_feature(path)
}

/// Returns the values of dictionaries and run-end-encoded arrays.
pub(crate) fn unpacked(array: &ArrayRef) -> Result<ArrayRef> {
    let mut array = array.clone();
    loop {
        let inner = match array.data_type() {
            DataType::Dictionary(_, values) => values.as_ref().clone(),
            DataType::RunEndEncoded(_, values) => values.data_type().clone(),
            _ => return Ok(array),
        };
        array = cast(&array, &inner).map_err(|error| malformed(&error))?;
    }
}

pub(crate) fn coerce_value(leaf: &Leaf<'_>, array: &ArrayRef) -> Result<ArrayRef> {
    use DataType as D;
    let found = array.data_type();
    match leaf.ty {
        Type::Null => leaf.null(array),
        Type::Boolean if *found == D::Boolean => Ok(array.clone()),
        Type::Boolean => Err(misfit(array, "booleans", leaf.path)),
        Type::Int if found.is_integer() => leaf.cast(array, &D::Int32, "an int"),
        Type::Int => Err(misfit(array, "ints", leaf.path)),
        Type::Long if found.is_integer() || matches!(found, D::Duration(_)) => leaf.cast(array, &D::Int64, "a long"),
        Type::Long => Err(misfit(array, "longs", leaf.path)),
        Type::Float if found.is_numeric() && !is_decimal(found) => leaf.cast(array, &D::Float32, "a float"),
        Type::Float => Err(misfit(array, "floats", leaf.path)),
        Type::Double if found.is_numeric() && !is_decimal(found) => leaf.cast(array, &D::Float64, "a double"),
        Type::Double => Err(misfit(array, "doubles", leaf.path)),
        Type::Bytes => leaf.bytes(array),
        Type::Text => leaf.text(array),
        Type::Uuid if *found == D::FixedSizeBinary(16) => Ok(uuids(array)),
        Type::Uuid => leaf.text(array),
        Type::Fixed(size) => leaf.fixed(array, *size),
        Type::Date => leaf.time(array, DAY, &D::Int32, "dates"),
        Type::TimeMillis => leaf.time(array, nanoseconds(TimeUnit::Millisecond), &D::Int32, "times of day"),
        Type::TimeMicros => leaf.time(array, nanoseconds(TimeUnit::Microsecond), &D::Int64, "times of day"),
        Type::Timestamp { unit, .. } => leaf.time(array, nanoseconds(*unit), &D::Int64, "timestamps"),
        Type::Enum(symbols) => leaf.symbols(array, symbols),
        // Bytes are written as the stored decimals.
        Type::Decimal { size: None, .. } if is_binary(found) => Ok(array.clone()),
        Type::Decimal { size: Some(size), .. } if is_binary(found) || matches!(found, D::FixedSizeBinary(_)) => {
            leaf.fixed(array, *size)
        }
        Type::Decimal { precision, scale, .. } => leaf.decimal(array, *precision, *scale),
        Type::Duration if matches!(found, D::Interval(_)) => Ok(array.clone()),
        Type::Duration if is_binary(found) || matches!(found, D::FixedSizeBinary(_)) => leaf.fixed(array, 12),
        Type::Duration => Err(misfit(array, "durations of months, days and milliseconds", leaf.path)),
        Type::Array(_) | Type::Map(_) | Type::Record(_) | Type::Refused(_) => {
            Err(Error::new(ErrorKind::Internal, "a type with components is not a leaf"))
        }
    }
}

const DAY: i64 = 86_400_000_000_000;

const fn nanoseconds(unit: TimeUnit) -> i64 {
    match unit {
        TimeUnit::Second => 1_000_000_000,
        TimeUnit::Millisecond => 1_000_000,
        TimeUnit::Microsecond => 1_000,
        TimeUnit::Nanosecond => 1,
    }
}

fn is_decimal(ty: &DataType) -> bool {
    use DataType::{Decimal32, Decimal64, Decimal128, Decimal256};
    matches!(ty, Decimal32(..) | Decimal64(..) | Decimal128(..) | Decimal256(..))
}

fn is_text(ty: &DataType) -> bool {
    matches!(ty, DataType::Utf8 | DataType::LargeUtf8 | DataType::Utf8View)
}

fn is_binary(ty: &DataType) -> bool {
    matches!(ty, DataType::Binary | DataType::LargeBinary | DataType::BinaryView)
}

/// Converts values that don't fit to null. The caller reports these nulls.
const CAST: CastOptions<'_> = CastOptions {
    safe: true,
    format_options: arrow_cast::display::FormatOptions::new(),
};

impl Leaf<'_> {
    #[cold]
    fn out_of_range(&self, array: &ArrayRef, row: usize, what: &str) -> Error {
        let shown = arrow_cast::display::array_value_to_string(array, row).unwrap_or_default();
        let reason = format!("the value {shown} doesn't fit {what}: pass a schema with a type that can represent it");
        Error::new(ErrorKind::ValueRange, reason).at_feature(self.path)
    }

    /// Returns an error if a visible value became null.
    fn checked(&self, array: &ArrayRef, fitted: ArrayRef, what: &str) -> Result<ArrayRef> {
        if fitted.null_count() > array.null_count()
            && let Some(row) = first_seen(self.seen, array.len(), |i| fitted.is_null(i) && array.is_valid(i))
        {
            return Err(self.out_of_range(array, row, what));
        }
        Ok(fitted)
    }

    fn cast(&self, array: &ArrayRef, to: &DataType, what: &str) -> Result<ArrayRef> {
        if array.data_type() == to {
            return Ok(array.clone());
        }
        let fitted = cast_with_options(array, to, &CAST).map_err(|_| misfit(array, what, self.path))?;
        self.checked(array, fitted, what)
    }

    fn null(&self, array: &ArrayRef) -> Result<ArrayRef> {
        let nulls = array.logical_nulls();
        let is_valid = |i| nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
        if *array.data_type() != DataType::Null && first_seen(self.seen, array.len(), is_valid).is_some() {
            return Err(misfit(array, "nulls", self.path));
        }
        Ok(Arc::new(NullArray::new(array.len())))
    }

    fn bytes(&self, array: &ArrayRef) -> Result<ArrayRef> {
        match array.data_type() {
            found if is_binary(found) => Ok(array.clone()),
            DataType::Utf8View => self.cast(array, &DataType::BinaryView, "bytes"),
            found if is_text(found) || matches!(found, DataType::FixedSizeBinary(_)) => {
                self.cast(array, &DataType::LargeBinary, "bytes")
            }
            _ => Err(misfit(array, "bytes", self.path)),
        }
    }

    fn text(&self, array: &ArrayRef) -> Result<ArrayRef> {
        match array.data_type() {
            found if is_text(found) => Ok(array.clone()),
            DataType::BinaryView => {
                let bytes = cast(array, &DataType::LargeBinary).map_err(|error| malformed(&error))?;
                self.cast(&bytes, &DataType::LargeUtf8, "text of UTF-8")
            }
            found if is_binary(found) => self.cast(array, &DataType::LargeUtf8, "text of UTF-8"),
            _ => Err(misfit(array, "text", self.path)),
        }
    }

    fn fixed(&self, array: &ArrayRef, size: usize) -> Result<ArrayRef> {
        let what = format!("a fixed of {size} bytes");
        match array.data_type() {
            DataType::FixedSizeBinary(found) if usize::try_from(*found) == Ok(size) => Ok(array.clone()),
            found if is_binary(found) => {
                let bytes = cast(array, &DataType::LargeBinary).map_err(|error| malformed(&error))?;
                let bytes = bytes.as_binary::<i64>();
                let misfits = |i: usize| bytes.is_valid(i) && bytes.value(i).len() != size;
                if let Some(row) = first_seen(self.seen, array.len(), misfits) {
                    return Err(self.out_of_range(array, row, &what));
                }
                let width = i32::try_from(size).map_err(|_| misfit(array, &what, self.path))?;
                let mut out = arrow_array::builder::FixedSizeBinaryBuilder::with_capacity(bytes.len(), width);
                for i in 0..bytes.len() {
                    if bytes.is_valid(i) && bytes.value(i).len() == size {
                        out.append_value(bytes.value(i)).map_err(|error| malformed(&error))?;
                    } else {
                        out.append_null();
                    }
                }
                Ok(Arc::new(out.finish()))
            }
            _ => Err(misfit(array, &what, self.path)),
        }
    }

    /// Converts times to ticks of `tick` nanoseconds. Integers are used unchanged.
    fn time(&self, array: &ArrayRef, tick: i64, to: &DataType, what: &str) -> Result<ArrayRef> {
        use DataType as D;
        let (clock, stamp) = (what == "times of day", what == "timestamps");
        let (found, stored) = match array.data_type() {
            D::Int32 | D::Int64 => return self.cast(array, to, "its type"),
            D::Date32 if !clock => (DAY, D::Int32),
            D::Date64 if !clock => (nanoseconds(TimeUnit::Millisecond), D::Int64),
            D::Time32(unit) if clock => (nanoseconds(*unit), D::Int32),
            D::Time64(unit) if clock => (nanoseconds(*unit), D::Int64),
            // Readers of Avro may represent times of day as durations.
            D::Duration(unit) if clock => (nanoseconds(*unit), D::Int64),
            D::Timestamp(unit, _) if stamp => (nanoseconds(*unit), D::Int64),
            _ => return Err(misfit(array, what, self.path)),
        };
        let ticks = cast(array, &stored).map_err(|error| malformed(&error))?;
        if found == tick && stored == *to {
            return Ok(ticks);
        }
        let ticks = cast(&ticks, &D::Int64).map_err(|error| malformed(&error))?;
        let ticks = ticks.as_primitive::<Int64Type>();
        let scaled: Int64Array = if found >= tick {
            ticks.unary_opt(|value| value.checked_mul(found / tick))
        } else {
            let each = tick / found;
            ticks.unary_opt(|value| (value % each == 0).then_some(value / each))
        };
        let fitted = self.checked(array, Arc::new(scaled), &format!("{what} of this unit exactly"))?;
        // A value that is out of range here was null or isn't visible.
        let narrow = cast_with_options(&fitted, to, &CAST).map_err(|error| malformed(&error))?;
        self.checked(array, narrow, "an int")
    }

    fn symbols(&self, array: &ArrayRef, symbols: &[String]) -> Result<ArrayRef> {
        if array.data_type().is_integer() {
            let codes = self.cast(array, &DataType::Int32, "an enum")?;
            let codes = codes.as_primitive::<Int32Type>();
            let beyond =
                |i: usize| codes.is_valid(i) && usize::try_from(codes.value(i)).is_ok_and(|c| c >= symbols.len());
            let below = |i: usize| codes.is_valid(i) && codes.value(i) < 0;
            if let Some(row) = first_seen(self.seen, codes.len(), |i| beyond(i) || below(i)) {
                let what = format!("an enum of {} symbols, as a code of one", symbols.len());
                return Err(self.out_of_range(array, row, &what));
            }
            return Ok(Arc::new(codes.clone()));
        }
        let texts = self
            .text(array)
            .map_err(|_| misfit(array, "symbols of an enum", self.path))?;
        let texts = cast(&texts, &DataType::LargeUtf8).map_err(|error| malformed(&error))?;
        let texts = texts.as_string::<i64>();
        let codes: HashMap<&str, i32> = symbols.iter().map(String::as_str).zip(0..).collect();
        let codes: Int32Array = texts
            .iter()
            .map(|text| text.and_then(|text| codes.get(text).copied()))
            .collect();
        let first: Vec<_> = symbols.iter().take(10).map(String::as_str).collect();
        let more = if symbols.len() > first.len() { ", …" } else { "" };
        self.checked(
            array,
            Arc::new(codes),
            &format!("the enum of {}{more}", first.join(", ")),
        )
    }

    fn decimal(&self, array: &ArrayRef, precision: u8, scale: i8) -> Result<ArrayRef> {
        let to = if precision <= 38 {
            DataType::Decimal128(precision, scale)
        } else {
            DataType::Decimal256(precision, scale)
        };
        let what = format!("a decimal of {precision} digits, {scale} of them after the decimal point");
        let found = array.data_type();
        if found.is_integer() {
            return self.cast(array, &to, &what);
        }
        if !is_decimal(found) {
            return Err(misfit(array, "decimals", self.path));
        }
        // Arrow doesn't guarantee the precision of decimals from other libraries, so equal types are checked as well.
        let wide = match found {
            DataType::Decimal256(_, found_scale) => DataType::Decimal256(76, *found_scale),
            DataType::Decimal32(_, found_scale)
            | DataType::Decimal64(_, found_scale)
            | DataType::Decimal128(_, found_scale) => DataType::Decimal128(38, *found_scale),
            _ => return Err(misfit(array, "decimals", self.path)),
        };
        let wide = cast_with_options(array, &wide, &CAST).map_err(|error| malformed(&error))?;
        let wide = self.checked(array, wide, &what)?;
        let fitted = cast_with_options(&wide, &to, &CAST).map_err(|_| misfit(array, &what, self.path))?;
        let fitted = self.checked(array, fitted, &what)?;
        // A smaller scale rounds the value. A rounded value differs after it is converted back.
        let back = cast_with_options(&fitted, wide.data_type(), &CAST).map_err(|error| malformed(&error))?;
        let differs = |i: usize| match (wide.as_primitive_opt(), back.as_primitive_opt()) {
            (Some(wide), Some(back)) => {
                let (wide, back): (&arrow_array::Decimal128Array, &arrow_array::Decimal128Array) = (wide, back);
                wide.is_valid(i) && (back.is_null(i) || wide.value(i) != back.value(i))
            }
            _ => {
                let (wide, back): (&arrow_array::Decimal256Array, &arrow_array::Decimal256Array) =
                    (wide.as_primitive(), back.as_primitive());
                wide.is_valid(i) && (back.is_null(i) || wide.value(i) != back.value(i))
            }
        };
        match first_seen(self.seen, array.len(), differs) {
            Some(row) => Err(self.out_of_range(array, row, &what)),
            None => Ok(fitted),
        }
    }
}

/// Formats UUIDs as text (RFC 9562, section 4).
fn uuids(array: &ArrayRef) -> ArrayRef {
    let bytes = array.as_fixed_size_binary();
    let mut out = StringBuilder::with_capacity(bytes.len(), bytes.len() * 36);
    let mut text = String::with_capacity(36);
    for uuid in bytes {
        match uuid {
            None => out.append_null(),
            Some(uuid) => {
                text.clear();
                for (i, byte) in uuid.iter().enumerate() {
                    if matches!(i, 4 | 6 | 8 | 10) {
                        text.push('-');
                    }
                    // Writing to a String never fails.
                    let _ = write!(text, "{byte:02x}");
                }
                out.append_value(&text);
            }
        }
    }
    Arc::new(out.finish())
}
