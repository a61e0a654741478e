//! Collects decoded values by type, and converts them to Arrow arrays.

use std::sync::Arc;

use arrow_array::{
    ArrayRef, BinaryArray, BooleanArray, Date32Array, Decimal128Array, Decimal256Array, DictionaryArray,
    FixedSizeBinaryArray, Float32Array, Float64Array, Int32Array, Int64Array, IntervalMonthDayNanoArray, ListArray,
    MapArray, NullArray, StringArray, StructArray, Time32MillisecondArray, Time64MicrosecondArray,
    TimestampMicrosecondArray, TimestampMillisecondArray, TimestampNanosecondArray,
};
use arrow_buffer::{
    BooleanBufferBuilder, Buffer, IntervalMonthDayNano, NullBuffer, NullBufferBuilder, OffsetBuffer, ScalarBuffer, i256,
};
use arrow_schema::{ArrowError, DataType, TimeUnit};
use fastpipe_batch::{Error, ErrorKind, Result};

use super::input::{DAY_MILLIS, Input, decimal, malformed, time_of_day};
use crate::schema::{Null, NullableType, Type};

/// Maximum bytes of a column of fixed values in a batch that contains nulls. For each null, Arrow stores the number of
/// bytes that the schema declares, while the file needs only one byte.
const MAX_FIXED_BYTES: usize = 1 << 28;

/// Ends of the items of rows. The first offset is 0.
pub(super) struct Offsets(Vec<i32>);

impl Offsets {
    fn push(&mut self, length: usize) -> Result<()> {
        let last = self.0.last().copied().unwrap_or(0);
        let end = i32::try_from(length).ok().and_then(|length| last.checked_add(length));
        let end = end.ok_or_else(|| {
            let reason = "the rows of a batch have more than 2^31 bytes or items in total: use a smaller --batch-size";
            Error::new(ErrorKind::Limit, reason)
        })?;
        self.0.push(end);
        Ok(())
    }

    fn finish(self) -> OffsetBuffer<i32> {
        OffsetBuffer::new(self.0.into())
    }
}

/// An item of an array, a value of a map, or a field of a record.
pub(super) struct Child {
    valid: NullBufferBuilder,
    values: Values,
}

impl Child {
    fn new(target: &NullableType) -> Child {
        Child {
            valid: NullBufferBuilder::new(0),
            values: Values::new(&target.ty),
        }
    }

    fn read(&mut self, target: &NullableType, input: &mut Input<'_>) -> Result<()> {
        self.values.read(target, &mut self.valid, input)
    }

    fn finish(mut self, ty: &DataType) -> std::result::Result<ArrayRef, ArrowError> {
        self.values.finish(ty, self.valid.finish())
    }
}

/// Values decoded so far.
pub(super) enum Values {
    Null(usize),
    Boolean(BooleanBufferBuilder),
    Ints(Vec<i32>),
    Longs(Vec<i64>),
    Floats(Vec<f32>),
    Doubles(Vec<f64>),
    Bytes(Offsets, Vec<u8>),
    Fixed(usize, Vec<u8>),
    Decimals(Vec<i256>),
    Durations(Vec<IntervalMonthDayNano>),
    Symbols(Vec<i32>, Vec<String>),
    Lists(Offsets, Box<Child>),
    Maps(Offsets, Box<(Values, Child)>),
    Records(usize, Vec<Child>),
}

impl Values {
    pub(super) fn new(ty: &Type) -> Values {
        let offsets = || Offsets(vec![0]);
        match ty {
            Type::Null | Type::Refused(_) => Values::Null(0),
            Type::Boolean => Values::Boolean(BooleanBufferBuilder::new(0)),
            Type::Int | Type::Date | Type::TimeMillis => Values::Ints(Vec::new()),
            Type::Long | Type::TimeMicros | Type::Timestamp { .. } => Values::Longs(Vec::new()),
            Type::Float => Values::Floats(Vec::new()),
            Type::Double => Values::Doubles(Vec::new()),
            Type::Bytes | Type::Text | Type::Uuid => Values::Bytes(offsets(), Vec::new()),
            Type::Fixed(_) => Values::Fixed(0, Vec::new()),
            Type::Decimal { .. } => Values::Decimals(Vec::new()),
            Type::Duration => Values::Durations(Vec::new()),
            Type::Enum(symbols) => Values::Symbols(Vec::new(), symbols.clone()),
            Type::Array(item) => Values::Lists(offsets(), Box::new(Child::new(item))),
            Type::Map(value) => {
                let keys = Values::Bytes(offsets(), Vec::new());
                Values::Maps(offsets(), Box::new((keys, Child::new(value))))
            }
            Type::Record(fields) => Values::Records(0, fields.iter().map(|(_, target)| Child::new(target)).collect()),
        }
    }

    /// Reads a value, or a null.
    pub(super) fn read(
        &mut self,
        target: &NullableType,
        valid: &mut NullBufferBuilder,
        input: &mut Input<'_>,
    ) -> Result<()> {
        let is_null = match target.null {
            None => false,
            Some(Null::First) => input.index(2, "union branches")? == 0,
            Some(Null::Second) => input.index(2, "union branches")? == 1,
            Some(Null::Never) => input.index(1, "union branches")? > 0,
        };
        if is_null {
            valid.append_null();
            return self.absent(&target.ty);
        }
        valid.append_non_null();
        self.value(&target.ty, input)
    }

    fn value(&mut self, ty: &Type, input: &mut Input<'_>) -> Result<()> {
        match (self, ty) {
            (Values::Null(count), _) => *count += 1,
            (Values::Boolean(values), _) => match input.array()? {
                [byte @ 0..=1] => values.append(byte == 1),
                [byte] => return Err(malformed(format!("expected a boolean, 0 or 1, found byte {byte}"))),
            },
            (Values::Ints(values), ty) => {
                let value = input.int()?;
                if *ty == Type::TimeMillis {
                    time_of_day(i64::from(value), DAY_MILLIS)?;
                }
                values.push(value);
            }
            (Values::Longs(values), ty) => {
                let value = input.long()?;
                if *ty == Type::TimeMicros {
                    time_of_day(value, DAY_MILLIS * 1000)?;
                }
                values.push(value);
            }
            (Values::Floats(values), _) => values.push(f32::from_le_bytes(input.array()?)),
            (Values::Doubles(values), _) => values.push(f64::from_le_bytes(input.array()?)),
            (Values::Bytes(offsets, bytes), ty) => {
                let text = input.text()?;
                if *ty != Type::Bytes && std::str::from_utf8(text).is_err() {
                    return Err(malformed("expected UTF-8 text, found other bytes"));
                }
                offsets.push(text.len())?;
                bytes.extend_from_slice(text);
            }
            (Values::Fixed(count, bytes), Type::Fixed(size)) => {
                bytes.extend_from_slice(input.take(*size)?);
                *count += 1;
            }
            (Values::Decimals(values), Type::Decimal { precision, size, .. }) => {
                let bytes = match size {
                    Some(size) => input.take(*size)?,
                    None => input.text()?,
                };
                values.push(decimal(bytes, *precision)?);
            }
            (Values::Durations(values), _) => {
                let mut part = || Ok::<_, Error>(u32::from_le_bytes(input.array()?));
                let (months, days, millis): (_, _, u32) = (part()?, part()?, part()?);
                let (months, days) = (i32::try_from(months), i32::try_from(days));
                let (Ok(months), Ok(days)) = (months, days) else {
                    let reason = "a duration has more than 2^31 - 1 months or days, the limit of Arrow";
                    return Err(Error::new(ErrorKind::ValueRange, reason));
                };
                values.push(IntervalMonthDayNano::new(months, days, i64::from(millis) * 1_000_000));
            }
            (Values::Symbols(codes, symbols), _) => codes.push(input.index(symbols.len(), "enum symbols")? as i32),
            (Values::Lists(offsets, child), Type::Array(item)) => {
                offsets.push(input.items(|input| child.read(item, input))?)?;
            }
            (Values::Maps(offsets, pair), Type::Map(value)) => {
                let (keys, values) = &mut **pair;
                let entry = |input: &mut Input<'_>| {
                    keys.value(&Type::Text, input)?;
                    values.read(value, input)
                };
                offsets.push(input.items(entry)?)?;
            }
            (Values::Records(count, children), Type::Record(fields)) => {
                for (child, (_, target)) in children.iter_mut().zip(fields) {
                    child.read(target, input)?;
                }
                *count += 1;
            }
            _ => {
                return Err(Error::new(ErrorKind::Internal, "values of another type were expected"));
            }
        }
        Ok(())
    }

    /// Appends a placeholder for a null.
    pub(super) fn absent(&mut self, ty: &Type) -> Result<()> {
        match (self, ty) {
            (Values::Null(count), _) => *count += 1,
            (Values::Boolean(values), _) => values.append(false),
            (Values::Ints(values) | Values::Symbols(values, _), _) => values.push(0),
            (Values::Longs(values), _) => values.push(0),
            (Values::Floats(values), _) => values.push(0.0),
            (Values::Doubles(values), _) => values.push(0.0),
            (Values::Bytes(offsets, _) | Values::Lists(offsets, _) | Values::Maps(offsets, _), _) => offsets.push(0)?,
            (Values::Fixed(count, bytes), Type::Fixed(size)) => {
                let length = bytes.len().saturating_add(*size);
                if length > MAX_FIXED_BYTES {
                    let reason = format!(
                        "a column of fixed values of {size} bytes takes more than 2^28 bytes with its nulls: use a \
                         smaller --batch-size, or leave the column out with --columns"
                    );
                    return Err(Error::new(ErrorKind::Limit, reason));
                }
                bytes.resize(length, 0);
                *count += 1;
            }
            (Values::Decimals(values), _) => values.push(i256::ZERO),
            (Values::Durations(values), _) => values.push(IntervalMonthDayNano::default()),
            (Values::Records(count, children), Type::Record(fields)) => {
                for (child, (_, target)) in children.iter_mut().zip(fields) {
                    // Within a null record, placeholders of fields that aren't nullable must be valid.
                    child.valid.append(!target.is_nullable());
                    child.values.absent(&target.ty)?;
                }
                *count += 1;
            }
            _ => {
                return Err(Error::new(ErrorKind::Internal, "values of another type were expected"));
            }
        }
        Ok(())
    }

    pub(super) fn finish(self, ty: &DataType, nulls: Option<NullBuffer>) -> std::result::Result<ArrayRef, ArrowError> {
        Ok(match (self, ty) {
            (Values::Null(count), _) => Arc::new(NullArray::new(count)),
            (Values::Boolean(mut values), _) => Arc::new(BooleanArray::new(values.finish(), nulls)),
            (Values::Ints(values), DataType::Date32) => Arc::new(Date32Array::try_new(values.into(), nulls)?),
            (Values::Ints(values), DataType::Time32(_)) => {
                Arc::new(Time32MillisecondArray::try_new(values.into(), nulls)?)
            }
            (Values::Ints(values), _) => Arc::new(Int32Array::try_new(values.into(), nulls)?),
            (Values::Longs(values), DataType::Time64(_)) => {
                Arc::new(Time64MicrosecondArray::try_new(values.into(), nulls)?)
            }
            (Values::Longs(values), DataType::Timestamp(unit, zone)) => {
                let (values, zone) = (ScalarBuffer::from(values), zone.clone());
                match unit {
                    TimeUnit::Nanosecond => {
                        Arc::new(TimestampNanosecondArray::try_new(values, nulls)?.with_timezone_opt(zone))
                    }
                    TimeUnit::Microsecond => {
                        Arc::new(TimestampMicrosecondArray::try_new(values, nulls)?.with_timezone_opt(zone))
                    }
                    _ => Arc::new(TimestampMillisecondArray::try_new(values, nulls)?.with_timezone_opt(zone)),
                }
            }
            (Values::Longs(values), _) => Arc::new(Int64Array::try_new(values.into(), nulls)?),
            (Values::Floats(values), _) => Arc::new(Float32Array::try_new(values.into(), nulls)?),
            (Values::Doubles(values), _) => Arc::new(Float64Array::try_new(values.into(), nulls)?),
            (Values::Bytes(offsets, bytes), DataType::Utf8) => {
                Arc::new(StringArray::try_new(offsets.finish(), Buffer::from_vec(bytes), nulls)?)
            }
            (Values::Bytes(offsets, bytes), _) => {
                Arc::new(BinaryArray::try_new(offsets.finish(), Buffer::from_vec(bytes), nulls)?)
            }
            (Values::Fixed(count, bytes), DataType::FixedSizeBinary(size)) => Arc::new(
                FixedSizeBinaryArray::try_new_with_len(*size, Buffer::from_vec(bytes), nulls, count)?,
            ),
            (Values::Decimals(values), DataType::Decimal128(precision, scale)) => {
                let values: Vec<_> = values.into_iter().map(i256::as_i128).collect();
                let array = Decimal128Array::try_new(values.into(), nulls)?;
                Arc::new(array.with_precision_and_scale(*precision, *scale)?)
            }
            (Values::Decimals(values), DataType::Decimal256(precision, scale)) => {
                let array = Decimal256Array::try_new(values.into(), nulls)?;
                Arc::new(array.with_precision_and_scale(*precision, *scale)?)
            }
            (Values::Durations(values), _) => Arc::new(IntervalMonthDayNanoArray::try_new(values.into(), nulls)?),
            (Values::Symbols(codes, symbols), _) => {
                let symbols: StringArray = symbols.into_iter().map(Some).collect();
                let codes = Int32Array::try_new(codes.into(), nulls)?;
                Arc::new(DictionaryArray::try_new(codes, Arc::new(symbols))?)
            }
            (Values::Lists(offsets, child), DataType::List(item)) => {
                let values = child.finish(item.data_type())?;
                Arc::new(ListArray::try_new(item.clone(), offsets.finish(), values, nulls)?)
            }
            (Values::Maps(offsets, pair), DataType::Map(entries, _)) => {
                let DataType::Struct(fields) = entries.data_type() else {
                    return Err(ArrowError::SchemaError("a map has entries".into()));
                };
                let (keys, values) = *pair;
                let columns = vec![
                    keys.finish(fields[0].data_type(), None)?,
                    values.finish(fields[1].data_type())?,
                ];
                let pairs = StructArray::try_new(fields.clone(), columns, None)?;
                Arc::new(MapArray::try_new(
                    entries.clone(),
                    offsets.finish(),
                    pairs,
                    nulls,
                    false,
                )?)
            }
            (Values::Records(count, children), DataType::Struct(fields)) => {
                let columns = children.into_iter().zip(fields);
                let columns = columns.map(|(child, field)| child.finish(field.data_type()));
                let columns = columns.collect::<std::result::Result<Vec<_>, _>>()?;
                Arc::new(StructArray::try_new_with_length(fields.clone(), columns, nulls, count)?)
            }
            (_, ty) => return Err(ArrowError::SchemaError(format!("no values of type {ty} were read"))),
        })
    }
}
