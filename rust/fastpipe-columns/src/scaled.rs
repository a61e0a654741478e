//! Converts decimals to integers in units of a power of ten. The integers have a given dtype or 128 bits.

use arrow_array::cast::AsArray;
use arrow_array::types::{
    ArrowPrimitiveType, Decimal32Type, Decimal64Type, Decimal128Type, Decimal256Type, Int8Type, Int16Type, Int32Type,
    Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type,
};
use arrow_array::{Array, ArrayRef, PrimitiveArray};
use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, i256};
use arrow_schema::DataType;
use fastpipe_batch::{DType, Error, ErrorKind, try_with_capacity};

use crate::types;

/// Names the allocated memory in out-of-memory errors.
const WHAT: &str = "decimals as integers";

/// Converts decimals to integers of type `to`, or of 128 bits if `to` is `None`, in units of `10**-scale`. Also returns
/// which values fit, if some don't.
pub(crate) fn unscaled(
    array: &ArrayRef,
    to: Option<DType>,
    scale: i8,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    match array.data_type() {
        DataType::Decimal32(..) => of::<Decimal32Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::Decimal64(..) => of::<Decimal64Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::Decimal128(..) => of::<Decimal128Type>(array, to, scale, Some),
        // No dtype can represent numbers beyond 128 bits, and scaling can only make them larger.
        DataType::Decimal256(..) => of::<Decimal256Type>(array, to, scale, i256::to_i128),
        DataType::Int8 => of::<Int8Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::Int16 => of::<Int16Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::Int32 => of::<Int32Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::Int64 => of::<Int64Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::UInt8 => of::<UInt8Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::UInt16 => of::<UInt16Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::UInt32 => of::<UInt32Type>(array, to, scale, |v| Some(i128::from(v))),
        DataType::UInt64 => of::<UInt64Type>(array, to, scale, |v| Some(i128::from(v))),
        other => Err(Error::new(
            ErrorKind::Internal,
            format!("expected a column of decimals, found {other}"),
        )),
    }
}

fn of<P: ArrowPrimitiveType>(
    array: &ArrayRef,
    to: Option<DType>,
    scale: i8,
    widened: fn(P::Native) -> Option<i128>,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    let own = types::scale(array.data_type()).unwrap_or(0);
    let places = u32::try_from(i16::from(scale) - i16::from(own));
    let places = places.map_err(|_| Error::new(ErrorKind::Internal, "decimals would be rounded"))?;
    let array = array.as_primitive::<P>();
    // If the factor exceeds 128 bits, only 0 fits.
    let factor = 10i128.checked_pow(places);
    let exact = |v: P::Native| {
        let v = widened(v)?;
        match factor {
            Some(1) => Some(v),
            Some(factor) => v.checked_mul(factor),
            None => (v == 0).then_some(0),
        }
    };
    let Some(to) = to else {
        return integers(array, exact, Some);
    };
    match to {
        DType::I8 => integers(array, exact, |v| i8::try_from(v).ok()),
        DType::I16 => integers(array, exact, |v| i16::try_from(v).ok()),
        DType::I32 => integers(array, exact, |v| i32::try_from(v).ok()),
        DType::I64 => integers(array, exact, |v| i64::try_from(v).ok()),
        DType::U8 => integers(array, exact, |v| u8::try_from(v).ok()),
        DType::U16 => integers(array, exact, |v| u16::try_from(v).ok()),
        DType::U32 => integers(array, exact, |v| u32::try_from(v).ok()),
        DType::U64 => integers(array, exact, |v| u64::try_from(v).ok()),
        other => Err(Error::new(
            ErrorKind::Internal,
            format!("cannot convert decimals to {other}, which is not an integer type"),
        )),
    }
}

fn integers<P: ArrowPrimitiveType, T: ArrowNativeType>(
    array: &PrimitiveArray<P>,
    exact: impl Fn(P::Native) -> Option<i128>,
    fit: fn(i128) -> Option<T>,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    let mut found: Vec<T> = try_with_capacity(array.len(), WHAT)?;
    let mut lost = false;
    for &value in array.values() {
        let value = exact(value).and_then(fit);
        lost |= value.is_none();
        found.push(value.unwrap_or_default());
    }
    // The stored value of a null may be anything and is never read.
    let fits = |i: usize| exact(array.values()[i]).and_then(fit).is_some();
    let fitting = lost.then(|| BooleanBuffer::collect_bool(array.len(), |i| array.is_null(i) || fits(i)));
    let fitting = fitting.filter(|fitting| fitting.count_set_bits() < fitting.len());
    Ok((Buffer::from_vec(found), fitting))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{
        Decimal32Array, Decimal64Array, Decimal128Array, Decimal256Array, Int64Array, UInt64Array, types::DecimalType,
    };
    use proptest::prelude::*;

    use super::*;

    fn int64s(found: &Buffer) -> Vec<i64> {
        found.typed_data::<i64>().to_vec()
    }

    #[test]
    fn every_width_converts_and_null_values_are_ignored() {
        let arrays: [ArrayRef; 5] = [
            Arc::new(
                Decimal32Array::from(vec![1234, -5])
                    .with_precision_and_scale(9, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal64Array::from(vec![1234, -5])
                    .with_precision_and_scale(18, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal128Array::from(vec![1234, -5])
                    .with_precision_and_scale(38, 2)
                    .unwrap(),
            ),
            Arc::new(
                Decimal256Array::from_iter_values([1234, -5].map(i256::from_i128))
                    .with_precision_and_scale(76, 2)
                    .unwrap(),
            ),
            Arc::new(Int64Array::from(vec![1234, -5])),
        ];
        for array in &arrays {
            let more = 2 - types::scale(array.data_type()).unwrap();
            let (found, fitting) = unscaled(array, Some(DType::I64), 5).unwrap();
            let factor = 10i64.pow(3 + u32::from(more.unsigned_abs()));
            assert_eq!((int64s(&found), fitting), (vec![1234 * factor, -5 * factor], None));
        }
        let nulls = vec![false, true].into();
        let array = Decimal128Array::new(vec![i128::MAX, 7].into(), Some(nulls));
        let array: ArrayRef = Arc::new(array.with_precision_and_scale(38, 0).unwrap());
        let (found, fitting) = unscaled(&array, Some(DType::I64), 1).unwrap();
        assert_eq!((int64s(&found), fitting), (vec![0, 70], None));
    }

    #[test]
    fn only_zero_fits_beyond_all_powers_of_ten() {
        let wide = Decimal256Array::from_iter_values([i256::MAX, i256::ZERO, i256::ONE]);
        let array: ArrayRef = Arc::new(wide.with_precision_and_scale(76, -50).unwrap());
        let (found, fitting) = unscaled(&array, Some(DType::U64), 0).unwrap();
        assert_eq!(found.typed_data::<u64>(), [0, 0, 0]);
        assert_eq!(fitting.unwrap().iter().collect::<Vec<_>>(), [false, true, false]);
        let array: ArrayRef = Arc::new(UInt64Array::from(vec![u64::MAX]));
        let (found, fitting) = unscaled(&array, Some(DType::U64), 0).unwrap();
        assert_eq!((found.typed_data::<u64>(), fitting), (&[u64::MAX][..], None));
    }

    #[test]
    fn integers_of_128_bits_are_exact_or_do_not_fit() {
        let most = 10i128.pow(38) - 1;
        let array = Decimal128Array::from(vec![most, -most, 10i128.pow(36)]).with_precision_and_scale(38, 2);
        let array: ArrayRef = Arc::new(array.unwrap());
        let (found, fitting) = unscaled(&array, None, 2).unwrap();
        assert_eq!(
            (found.typed_data::<i128>(), fitting),
            (&[most, -most, 10i128.pow(36)][..], None)
        );
        let (found, fitting) = unscaled(&array, None, 4).unwrap();
        assert_eq!(found.typed_data::<i128>(), [0, 0, 10i128.pow(38)]);
        assert_eq!(fitting.unwrap().iter().collect::<Vec<_>>(), [false, false, true]);
    }

    proptest! {
        /// Each value equals the exact product if the product fits.
        #[test]
        fn products_are_exact(values in prop::collection::vec(any::<i128>().prop_map(|v| v >> (v & 127)), 0..20), own in -3..5i8, more in 0..4i8) {
            let limit = 10i128.pow(u32::from(Decimal128Type::MAX_PRECISION));
            let values: Vec<i128> = values.into_iter().map(|v| v % limit).collect();
            let array = Decimal128Array::from(values.clone()).with_precision_and_scale(38, own).unwrap();
            let (found, fitting) = unscaled(&(Arc::new(array) as ArrayRef), Some(DType::I32), own + more).unwrap();
            for (i, (&value, &found)) in values.iter().zip(found.typed_data::<i32>()).enumerate() {
                let exact = value.checked_mul(10i128.pow(more.unsigned_abs().into())).and_then(|v| i32::try_from(v).ok());
                prop_assert_eq!(exact.unwrap_or(0), found);
                prop_assert_eq!(exact.is_some(), fitting.as_ref().is_none_or(|fitting| fitting.value(i)));
            }
        }
    }
}
