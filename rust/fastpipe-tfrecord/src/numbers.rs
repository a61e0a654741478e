//! Converts numbers to the element type of a column. A number that doesn't fit is an error; it is never wrapped or
//! rounded. The only exception is a float read as `float16`, which is rounded.

use fastpipe_batch::{DType, Element, Error, ErrorKind, Overflow, Writer};
use half::f16;

use crate::trouble::Trouble;
use crate::wire::Cursor;

type Result<T> = std::result::Result<T, Trouble>;

#[cold]
fn misfit(value: impl std::fmt::Display, dtype: DType) -> Trouble {
    let reason = match dtype.is_float() {
        true => format!("{value} can't be represented in {dtype}: read it as \"int64\" or \"float64\""),
        false => format!("{value} doesn't fit {dtype}: read it as \"int64\""),
    };
    Trouble::misfit(ErrorKind::ValueRange, reason)
}

/// Writes `n` packed integers.
#[inline(always)]
pub(crate) fn ints(piece: Cursor<'_>, n: usize, dtype: DType, out: &mut Writer) -> Result<()> {
    #[inline(always)]
    fn fill<T: Element>(
        mut piece: Cursor<'_>,
        n: usize,
        dtype: DType,
        out: &mut Writer,
        convert: impl Fn(i64) -> Option<T>,
    ) -> Result<()> {
        for slot in out.take::<T>(n)? {
            let value = piece.varint()? as i64;
            *slot = convert(value).ok_or_else(|| misfit(value, dtype))?;
        }
        Ok(())
    }
    macro_rules! to {
        ($t:ty) => {
            fill(piece, n, dtype, out, |value| <$t>::try_from(value).ok())
        };
    }
    match dtype {
        DType::I64 => fill(piece, n, dtype, out, Some),
        DType::I32 => to!(i32),
        DType::I16 => to!(i16),
        DType::I8 => to!(i8),
        DType::U64 => to!(u64),
        DType::U32 => to!(u32),
        DType::U16 => to!(u16),
        DType::U8 => to!(u8),
        DType::Bool => fill(piece, n, dtype, out, |value| {
            u8::try_from(value).ok().filter(|&bit| bit <= 1)
        }),
        DType::F32 => fill(piece, n, dtype, out, |value| {
            // Compares as i128, because `as i64` saturates at exactly the value that rounds up.
            Some(value as f32).filter(|&float| float as i128 == i128::from(value))
        }),
        DType::F64 => fill(piece, n, dtype, out, |value| {
            Some(value as f64).filter(|&float| float as i128 == i128::from(value))
        }),
        DType::F16 => fill(piece, n, dtype, out, |value| {
            let half = f16::from_f64(value as f64);
            (f64::from(half) as i128 == i128::from(value)).then_some(half.to_bits())
        }),
        DType::Datetime(_) | DType::Timedelta(_) => Err(Overflow::Row.into()),
    }
}

/// Writes packed floats, whose bytes are a multiple of 4.
#[inline(always)]
pub(crate) fn floats(piece: Cursor<'_>, dtype: DType, out: &mut Writer) -> Result<()> {
    let bytes = piece.rest();
    let values = bytes
        .chunks_exact(4)
        .map(|four| f32::from_le_bytes([four[0], four[1], four[2], four[3]]));
    match dtype {
        DType::F32 => Ok(out.extend(bytes)?),
        DType::F64 => {
            let to = out.take::<f64>(bytes.len() / 4)?;
            to.iter_mut().zip(values).for_each(|(to, value)| *to = value.into());
            Ok(())
        }
        DType::F16 => {
            for (to, value) in out.take::<u16>(bytes.len() / 4)?.iter_mut().zip(values) {
                let half = f16::from_f32(value);
                if half.is_infinite() && value.is_finite() {
                    return Err(misfit(value, dtype));
                }
                *to = half.to_bits();
            }
            Ok(())
        }
        _ => Err(Overflow::Row.into()),
    }
}

/// Writes an index, which the dtype of its spec can hold.
pub(crate) fn index(value: i64, dtype: DType, out: &mut Writer) -> Result<()> {
    macro_rules! push {
        ($t:ty) => {
            Ok(out.push(<$t>::try_from(value).map_err(|_| misfit(value, dtype))?)?)
        };
    }
    match dtype {
        DType::I8 => push!(i8),
        DType::I16 => push!(i16),
        DType::I32 => push!(i32),
        DType::I64 => push!(i64),
        DType::U8 => push!(u8),
        DType::U16 => push!(u16),
        DType::U32 => push!(u32),
        DType::U64 => push!(u64),
        _ => Err(Overflow::Row.into()),
    }
}

/// Returns an error for a dtype that lists have no values of.
///
/// # Errors
/// [`ErrorKind::Schema`].
pub(crate) fn check(dtype: DType) -> std::result::Result<(), Error> {
    if dtype.is_time() {
        let reason =
            format!("TFRecord files store no times: read \"int64\" instead of {dtype}, and convert the batches");
        return Err(Error::new(ErrorKind::Schema, reason));
    }
    Ok(())
}
