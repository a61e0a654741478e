//! Converts decimals to the nearest floating-point numbers.

use std::fmt::{Display, Write};
use std::str::FromStr;

use arrow_array::cast::AsArray;
use arrow_array::types::{ArrowPrimitiveType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type};
use arrow_array::{Array, ArrayRef};
use arrow_buffer::Buffer;
use arrow_schema::DataType;
use fastpipe_batch::{DType, Error, ErrorKind, try_with_capacity};

/// Names the allocated memory in out-of-memory errors.
const WHAT: &str = "decimals as floating-point numbers";

/// The largest exponent of ten for which the power is exact as a double.
const EXACT_POWERS: u8 = 22;

/// The largest integer up to which all integers are exact as doubles.
const EXACT: u64 = 1 << 53;

/// Converts decimals to elements of the floating-point type `to`.
pub(crate) fn nearest(array: &ArrayRef, to: DType) -> Result<Buffer, Error> {
    match *array.data_type() {
        DataType::Decimal32(_, scale) => of::<Decimal32Type>(array, to, scale, |v| Some(i64::from(v))),
        DataType::Decimal64(_, scale) => of::<Decimal64Type>(array, to, scale, Some),
        DataType::Decimal128(_, scale) => of::<Decimal128Type>(array, to, scale, |v| i64::try_from(v).ok()),
        DataType::Decimal256(_, scale) => {
            of::<Decimal256Type>(array, to, scale, |v| v.to_i128().and_then(|v| i64::try_from(v).ok()))
        }
        ref other => Err(Error::new(
            ErrorKind::Internal,
            format!("expected a column of decimals, found {other}"),
        )),
    }
}

fn of<P: ArrowPrimitiveType>(
    array: &ArrayRef,
    to: DType,
    scale: i8,
    short: fn(P::Native) -> Option<i64>,
) -> Result<Buffer, Error>
where
    P::Native: Display,
{
    let array = array.as_primitive::<P>();
    let mut numbers = Numbers::<P> {
        scale,
        power: 10f64.powi(i32::from(scale.unsigned_abs().min(EXACT_POWERS))),
        short,
        text: String::new(),
    };
    // The stored value of a null may be anything, so zero is used instead.
    let values = (0..array.len()).map(|i| {
        if array.is_null(i) {
            P::Native::default()
        } else {
            array.value(i)
        }
    });
    match to {
        DType::F32 => {
            let mut found: Vec<f32> = try_with_capacity(array.len(), WHAT)?;
            found.extend(values.map(|value| numbers.single(value)));
            Ok(Buffer::from_vec(found))
        }
        DType::F64 => {
            let mut found: Vec<f64> = try_with_capacity(array.len(), WHAT)?;
            found.extend(values.map(|value| numbers.double(value)));
            Ok(Buffer::from_vec(found))
        }
        other => Err(Error::new(
            ErrorKind::Internal,
            format!("cannot convert decimals to {other}, which is not a floating-point type"),
        )),
    }
}

/// Converts the integers of a column of decimals.
struct Numbers<P: ArrowPrimitiveType> {
    scale: i8,
    /// `10**|scale|`, if it is exact as a double.
    power: f64,
    /// Returns the integer if it fits into 64 bits.
    short: fn(P::Native) -> Option<i64>,
    text: String,
}

impl<P: ArrowPrimitiveType> Numbers<P>
where
    P::Native: Display,
{
    #[inline]
    fn double(&mut self, value: P::Native) -> f64 {
        match (self.short)(value) {
            // Both operands are exact, so the result is rounded only once.
            Some(short) if short.unsigned_abs() <= EXACT && self.scale.unsigned_abs() <= EXACT_POWERS => {
                if self.scale < 0 {
                    short as f64 * self.power
                } else {
                    short as f64 / self.power
                }
            }
            _ => self.parsed(value),
        }
    }

    #[inline]
    fn single(&mut self, value: P::Native) -> f32 {
        /// The bits of a double that a single lacks, and the highest of these bits, which is half a unit in the last
        /// place of a single.
        const LOST: u64 = (1 << 29) - 1;
        const HALF: u64 = 1 << 28;
        let double = self.double(value);
        let is_between = double.to_bits() & LOST == HALF || double.abs() < f64::from(f32::MIN_POSITIVE);
        // If the double is exactly between two singles, it may be the result of rounding, so the nearer single is
        // unknown.
        if is_between && double != 0.0 {
            self.parsed(value)
        } else {
            double as f32
        }
    }

    #[cold]
    fn parsed<F: FromStr + Default>(&mut self, value: P::Native) -> F {
        self.text.clear();
        // Writing to a string can't fail, and the text is always a number.
        let _ = write!(self.text, "{value}e{}", -i16::from(self.scale));
        self.text.parse().unwrap_or_default()
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{Decimal32Array, Decimal64Array, Decimal128Array, Decimal256Array};
    use arrow_buffer::i256;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn every_width_converts_and_null_values_are_ignored() {
        let nulls = || Some(vec![true, false].into());
        let arrays: [ArrayRef; 4] = [
            Arc::new(
                Decimal32Array::new(vec![-125, 7].into(), nulls())
                    .with_precision_and_scale(9, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal64Array::new(vec![-125, 7].into(), nulls())
                    .with_precision_and_scale(18, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal128Array::new(vec![-125, i128::MAX].into(), nulls())
                    .with_precision_and_scale(38, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal256Array::new(vec![i256::from(-125), i256::MAX].into(), nulls())
                    .with_precision_and_scale(76, 2)
                    .unwrap(),
            ),
        ];
        for array in &arrays {
            assert_eq!(nearest(array, DType::F64).unwrap().typed_data::<f64>(), [-1.25, 0.0]);
            assert_eq!(nearest(array, DType::F32).unwrap().typed_data::<f32>(), [-1.25, 0.0]);
        }
    }

    #[test]
    fn decimals_of_more_than_128_bits_convert() {
        let value = i256::from_string(&"7".repeat(76)).unwrap();
        let array = Decimal256Array::from_iter_values([value, i256::ZERO]);
        for scale in [-100i8, 0, 30, 76] {
            let array: ArrayRef = Arc::new(array.clone().with_data_type(DataType::Decimal256(76, scale)));
            let expected: f64 = format!("{}e{}", "7".repeat(76), -i16::from(scale)).parse().unwrap();
            assert_eq!(
                nearest(&array, DType::F64).unwrap().typed_data::<f64>(),
                [expected, 0.0]
            );
        }
    }

    #[test]
    fn float32_midpoints_are_rounded_once() {
        // The value is slightly above the middle of two neighboring singles, by 1 in 10**20. As a double, it is exactly
        // the middle.
        let middle = (1i128 << 24) + 1;
        let array = Decimal128Array::from(vec![middle * 10i128.pow(20) + 1, middle * 10i128.pow(20) - 1]);
        let array: ArrayRef = Arc::new(array.with_precision_and_scale(38, 20).unwrap());
        let found = nearest(&array, DType::F32).unwrap();
        assert_eq!(found.typed_data::<f32>(), [((1 << 24) + 2) as f32, (1 << 24) as f32]);
    }

    proptest! {
        /// Python, C and Rust parse decimals to the nearest floating-point number.
        #[test]
        fn numbers_are_nearest(values in prop::collection::vec(any::<i128>().prop_map(|v| v >> (v & 127)), 0..20), scale in -38..=38i8) {
            let limit = 10i128.pow(38);
            let values: Vec<i128> = values.into_iter().map(|v| v % limit).collect();
            let array = Decimal128Array::from(values.clone()).with_data_type(DataType::Decimal128(38, scale));
            let array: ArrayRef = Arc::new(array);
            let (doubles, singles) = (nearest(&array, DType::F64).unwrap(), nearest(&array, DType::F32).unwrap());
            for (i, value) in values.iter().enumerate() {
                let text = format!("{value}e{}", -i16::from(scale));
                prop_assert_eq!(doubles.typed_data::<f64>()[i], text.parse::<f64>().unwrap());
                prop_assert_eq!(singles.typed_data::<f32>()[i], text.parse::<f32>().unwrap());
            }
        }
    }
}
