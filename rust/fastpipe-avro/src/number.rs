//! Converts encoded numbers to the element type of a column. A number that doesn't fit raises an error; it is never
//! wrapped or rounded. The only exception is a `double` read as `float32`, which is rounded.

use std::marker::PhantomData;

use fastpipe_batch::{DType, Element, Writer};

use crate::convert::Convert;
#[cfg(target_arch = "x86_64")]
use crate::convert::one_by_one;
use crate::cursor::{Cursor, SLACK, int};
use crate::decode_error::DecodeError;
use crate::plan::Wire;
#[cfg(target_arch = "x86_64")]
use crate::x86::{GROUP, Short};

type Result<T> = std::result::Result<T, DecodeError>;

/// Conversion of longs to another type.
#[derive(Clone, Copy)]
pub(crate) struct Longs<T>(PhantomData<T>);

impl<T> Longs<T> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Longs(PhantomData)
    }
}

impl<T: Number> Convert for Longs<T> {
    type To = T;

    #[inline(always)]
    fn one(&self, value: i64) -> (T, bool) {
        T::wrap(value)
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [T; GROUP]) -> u32 {
        T::short(values, to)
    }
}

/// Conversion of ints to another type.
#[derive(Clone, Copy)]
pub(crate) struct Ints<T>(PhantomData<T>);

impl<T> Ints<T> {
    #[inline(always)]
    pub(crate) fn new() -> Self {
        Ints(PhantomData)
    }
}

impl<T: Number> Convert for Ints<T> {
    type To = T;

    #[inline(always)]
    fn one(&self, value: i64) -> (T, bool) {
        let (number, bad) = T::wrap(value);
        (number, bad | (value != i64::from(value as i32)))
    }

    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(&self, values: Short, to: &mut [T; GROUP]) -> u32 {
        T::short(values, to)
    }
}

/// An element type that numbers are converted to.
pub(crate) trait Number: Element {
    /// Converts a number with wrapping. Also returns whether the number changed.
    fn wrap(value: i64) -> (Self, bool);
    /// See [`Convert::short`].
    #[cfg(target_arch = "x86_64")]
    #[inline(always)]
    fn short(values: Short, to: &mut [Self; GROUP]) -> u32 {
        one_by_one(values, to, Self::wrap)
    }
    fn from_long(value: i64) -> Result<Self>;
    /// Returns the nearest number of this type.
    #[inline(always)]
    fn rounded(value: i64) -> Result<Self> {
        Self::from_long(value)
    }
    fn from_wide(value: i128) -> Result<Self>;
    fn from_float(value: f32) -> Result<Self>;
    fn from_double(value: f64) -> Result<Self>;
}

macro_rules! integers {
    ($($t:ty => $dtype:ident $(by $store:ident)?),*) => {$(
        impl Number for $t {
            $(
                #[cfg(target_arch = "x86_64")]
                #[inline(always)]
                fn short(values: Short, to: &mut [Self; GROUP]) -> u32 {
                    values.$store(to);
                    0
                }
            )?
            #[inline(always)]
            fn wrap(value: i64) -> (Self, bool) {
                (value as $t, <$t>::try_from(value).is_err())
            }
            #[inline(always)]
            fn from_long(value: i64) -> Result<Self> {
                <$t>::try_from(value).map_err(|_| DecodeError::Range { value, dtype: DType::$dtype })
            }
            #[inline(always)]
            fn from_wide(value: i128) -> Result<Self> {
                <$t>::try_from(value).map_err(|_| DecodeError::Decimal { dtype: DType::$dtype })
            }
            #[cold]
            fn from_float(value: f32) -> Result<Self> {
                Err(DecodeError::FloatRange { value: f64::from(value), dtype: DType::$dtype })
            }
            #[cold]
            fn from_double(value: f64) -> Result<Self> {
                Err(DecodeError::FloatRange { value, dtype: DType::$dtype })
            }
        }
    )*};
}
integers!(i8 => I8, i16 => I16, i32 => I32 by ints, i64 => I64 by longs, u8 => U8, u16 => U16, u32 => U32, u64 => U64);

impl Number for f32 {
    #[inline(always)]
    fn rounded(value: i64) -> Result<Self> {
        Ok(value as f32)
    }
    #[inline(always)]
    fn from_wide(value: i128) -> Result<Self> {
        Ok(value as f32)
    }
    #[inline(always)]
    fn wrap(value: i64) -> (Self, bool) {
        let float = value as f32;
        (float, float as i128 != i128::from(value))
    }
    #[inline(always)]
    fn from_long(value: i64) -> Result<Self> {
        let float = value as f32;
        // Compares as i128, because `as i64` saturates at exactly the value that rounds up.
        if float as i128 == i128::from(value) {
            Ok(float)
        } else {
            Err(DecodeError::Inexact {
                value,
                dtype: DType::F32,
            })
        }
    }
    #[inline(always)]
    fn from_float(value: f32) -> Result<Self> {
        Ok(value)
    }
    #[inline(always)]
    fn from_double(value: f64) -> Result<Self> {
        let float = value as f32;
        if float.is_infinite() && value.is_finite() {
            return Err(DecodeError::FloatRange {
                value,
                dtype: DType::F32,
            });
        }
        Ok(float)
    }
}

impl Number for f64 {
    #[inline(always)]
    fn rounded(value: i64) -> Result<Self> {
        Ok(value as f64)
    }
    #[inline(always)]
    fn from_wide(value: i128) -> Result<Self> {
        Ok(value as f64)
    }
    #[inline(always)]
    fn wrap(value: i64) -> (Self, bool) {
        let float = value as f64;
        (float, float as i128 != i128::from(value))
    }
    #[inline(always)]
    fn from_long(value: i64) -> Result<Self> {
        let float = value as f64;
        if float as i128 == i128::from(value) {
            Ok(float)
        } else {
            Err(DecodeError::Inexact {
                value,
                dtype: DType::F64,
            })
        }
    }
    #[inline(always)]
    fn from_float(value: f32) -> Result<Self> {
        Ok(f64::from(value))
    }
    #[inline(always)]
    fn from_double(value: f64) -> Result<Self> {
        Ok(value)
    }
}

/// Calls a generic function with the Rust type of a dtype. Booleans are stored as bytes.
macro_rules! with_type {
    ($dtype:expr, $f:ident($($arg:expr),*)) => {
        match $dtype {
            DType::Bool | DType::U8 => $f::<u8>($($arg),*),
            DType::I8 => $f::<i8>($($arg),*),
            DType::I16 => $f::<i16>($($arg),*),
            DType::I32 => $f::<i32>($($arg),*),
            DType::I64 | DType::Datetime(_) | DType::Timedelta(_) => $f::<i64>($($arg),*),
            // Half floats never occur: features with this dtype are rejected before anything is read.
            DType::U16 | DType::F16 => $f::<u16>($($arg),*),
            DType::U32 => $f::<u32>($($arg),*),
            DType::U64 => $f::<u64>($($arg),*),
            DType::F32 => $f::<f32>($($arg),*),
            DType::F64 => $f::<f64>($($arg),*),
        }
    };
}

/// Returns the size of a number whose encoding equals its representation in memory.
#[inline(always)]
pub(crate) fn as_encoded(wire: Wire, to: DType) -> Option<usize> {
    match (wire, to) {
        (Wire::Float, DType::F32) => Some(4),
        (Wire::Double, DType::F64) => Some(8),
        _ => None,
    }
}

/// Reads one number.
#[inline(always)]
pub(crate) fn number(wire: Wire, to: DType, cursor: &mut Cursor<'_>, out: &mut Writer) -> Result<()> {
    with_type!(to, one(wire, cursor, out))
}

/// Reads `n` numbers.
#[inline(always)]
pub(crate) fn numbers(wire: Wire, to: DType, n: usize, cursor: &mut Cursor<'_>, out: &mut Writer) -> Result<()> {
    match as_encoded(wire, to) {
        Some(width) => {
            let (bytes, n) = cursor.bytes_and_rest(width * n)?;
            Ok(out.extend_loosely(bytes, n)?)
        }
        None => with_type!(to, many(wire, n, cursor, out)),
    }
}

/// Writes an integer of 128 bits.
pub(crate) fn wide(value: i128, to: DType, out: &mut Writer) -> Result<()> {
    with_type!(to, push_wide(value, out))
}

fn push_wide<T: Number>(value: i128, out: &mut Writer) -> Result<()> {
    Ok(out.push(T::from_wide(value)?)?)
}

/// Writes one code of an enum.
#[inline(always)]
pub(crate) fn code(code: i64, to: DType, out: &mut Writer) -> Result<()> {
    with_type!(to, push_long(code, out))
}

/// Writes numbers that have already been read: integers, or the bits of floats.
#[inline(always)]
pub(crate) fn stored(wire: Wire, to: DType, bits: &[u64], out: &mut Writer) -> Result<()> {
    with_type!(to, store(wire, bits, out))
}

fn store<T: Number>(wire: Wire, bits: &[u64], out: &mut Writer) -> Result<()> {
    let out = out.take::<T>(bits.len())?;
    for (to, &bits) in out.iter_mut().zip(bits) {
        *to = match wire {
            Wire::Float => T::from_float(f32::from_bits(bits as u32))?,
            Wire::Double => T::from_double(f64::from_bits(bits))?,
            Wire::Boolean | Wire::Int | Wire::Long => T::from_long(bits as i64)?,
            Wire::IntRounded | Wire::LongRounded => T::rounded(bits as i64)?,
        };
    }
    Ok(())
}

#[inline(always)]
fn push_long<T: Number>(value: i64, out: &mut Writer) -> Result<()> {
    Ok(out.push(T::from_long(value)?)?)
}

#[inline(always)]
fn one<T: Number>(wire: Wire, cursor: &mut Cursor<'_>, out: &mut Writer) -> Result<()> {
    let value = match wire {
        Wire::Boolean => T::from_long(i64::from(cursor.boolean()?))?,
        Wire::Int => T::from_long(cursor.int()?)?,
        Wire::Long => T::from_long(cursor.long()?)?,
        Wire::IntRounded => T::rounded(cursor.int()?)?,
        Wire::LongRounded => T::rounded(cursor.long()?)?,
        Wire::Float => T::from_float(f32::from_le_bytes(cursor.array()?))?,
        Wire::Double => T::from_double(f64::from_le_bytes(cursor.array()?))?,
    };
    Ok(out.push(value)?)
}

#[inline(never)]
fn many<T: Number>(wire: Wire, n: usize, cursor: &mut Cursor<'_>, out: &mut Writer) -> Result<()> {
    #[inline(always)]
    fn fill<T: Number>(out: &mut [T], mut next: impl FnMut() -> Result<T>) -> Result<()> {
        for slot in out {
            *slot = next()?;
        }
        Ok(())
    }
    if let Wire::Int | Wire::Long = wire {
        let out = out.take_loosely::<T>(n, SLACK)?;
        return match wire {
            Wire::Int => cursor.longs_to(n, out, Ints::new(), |value| T::from_long(int(value)?)),
            _ => cursor.longs_to(n, out, Longs::new(), T::from_long),
        };
    }
    let out = out.take::<T>(n)?;
    match wire {
        Wire::Boolean => fill(out, || T::from_long(i64::from(cursor.boolean()?))),
        Wire::Int | Wire::Long => Ok(()),
        Wire::IntRounded => fill(out, || T::rounded(cursor.int()?)),
        Wire::LongRounded => fill(out, || T::rounded(cursor.long()?)),
        Wire::Float => fill(out, || T::from_float(f32::from_le_bytes(cursor.array()?))),
        Wire::Double => fill(out, || T::from_double(f64::from_le_bytes(cursor.array()?))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_exact_integers_become_floats() {
        assert_eq!(f32::from_long(1 << 24), Ok(16_777_216.0));
        assert!(f32::from_long((1 << 24) + 1).is_err());
        assert!(f32::from_long(i64::MAX).is_err() && f64::from_long(i64::MAX).is_err());
        assert_eq!(f64::from_long(i64::MIN), Ok(-(2f64.powi(63))));
    }

    #[test]
    fn narrow_types_are_range_checked() {
        assert_eq!(i8::from_long(-128), Ok(-128));
        assert_eq!(
            i8::from_long(128),
            Err(DecodeError::Range {
                value: 128,
                dtype: DType::I8
            })
        );
        assert!(u64::from_long(-1).is_err() && u16::from_long(65_536).is_err());
        assert!(f32::from_double(1e39).is_err());
        assert_eq!(f32::from_double(f64::INFINITY), Ok(f32::INFINITY));
        assert!(f32::from_double(f64::NAN).unwrap().is_nan());
    }
}
