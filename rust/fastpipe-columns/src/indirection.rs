//! Layouts that refer to values: dictionaries and run ends. Values are gathered through them and never rewritten.

use arrow_array::cast::AsArray;
use arrow_array::types::{Int8Type, Int16Type, Int32Type, Int64Type, UInt8Type, UInt16Type, UInt32Type, UInt64Type};
use arrow_array::{Array, ArrayRef};
use arrow_buffer::{RunEndBuffer, ScalarBuffer};
use arrow_schema::DataType;

/// A mapping from rows to values.
#[derive(Clone, Debug)]
pub(crate) enum Indirection {
    I8(ScalarBuffer<i8>),
    I16(ScalarBuffer<i16>),
    I32(ScalarBuffer<i32>),
    I64(ScalarBuffer<i64>),
    U8(ScalarBuffer<u8>),
    U16(ScalarBuffer<u16>),
    U32(ScalarBuffer<u32>),
    U64(ScalarBuffer<u64>),
    ShortRuns(RunEndBuffer<i16>),
    Runs(RunEndBuffer<i32>),
    LongRuns(RunEndBuffer<i64>),
}

impl Indirection {
    /// Returns the mapping of an array and the values that it refers to. Returns `None` if the array has another
    /// layout.
    pub(crate) fn of(array: &ArrayRef) -> Option<(Indirection, ArrayRef)> {
        match array.data_type() {
            DataType::Dictionary(keys, _) => {
                let dictionary = array.as_any_dictionary();
                let of = dictionary.keys();
                let keys = match **keys {
                    DataType::Int8 => Indirection::I8(of.as_primitive::<Int8Type>().values().clone()),
                    DataType::Int16 => Indirection::I16(of.as_primitive::<Int16Type>().values().clone()),
                    DataType::Int32 => Indirection::I32(of.as_primitive::<Int32Type>().values().clone()),
                    DataType::Int64 => Indirection::I64(of.as_primitive::<Int64Type>().values().clone()),
                    DataType::UInt8 => Indirection::U8(of.as_primitive::<UInt8Type>().values().clone()),
                    DataType::UInt16 => Indirection::U16(of.as_primitive::<UInt16Type>().values().clone()),
                    DataType::UInt32 => Indirection::U32(of.as_primitive::<UInt32Type>().values().clone()),
                    DataType::UInt64 => Indirection::U64(of.as_primitive::<UInt64Type>().values().clone()),
                    _ => return None,
                };
                Some((keys, dictionary.values().clone()))
            }
            DataType::RunEndEncoded(ends, _) => match ends.data_type() {
                DataType::Int16 => {
                    let runs = array.as_run::<Int16Type>();
                    Some((Indirection::ShortRuns(runs.run_ends().clone()), runs.values().clone()))
                }
                DataType::Int32 => {
                    let runs = array.as_run::<Int32Type>();
                    Some((Indirection::Runs(runs.run_ends().clone()), runs.values().clone()))
                }
                DataType::Int64 => {
                    let runs = array.as_run::<Int64Type>();
                    Some((Indirection::LongRuns(runs.run_ends().clone()), runs.values().clone()))
                }
                _ => None,
            },
            _ => None,
        }
    }

    /// Returns the index of the value of row `i`. If the row doesn't exist, the index is out of range. For a null row,
    /// the index is arbitrary because keys of null rows are not validated.
    #[inline]
    pub(crate) fn at(&self, i: usize) -> usize {
        const NOWHERE: usize = usize::MAX;
        match self {
            Indirection::I8(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::I16(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::I32(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::I64(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::U8(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::U16(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::U32(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            Indirection::U64(keys) => keys.get(i).map_or(NOWHERE, |&key| key as usize),
            // Uses bisection. Run-end encoding is only used if there are far fewer runs than rows.
            Indirection::ShortRuns(ends) if i < ends.len() => ends.get_physical_index(i),
            Indirection::Runs(ends) if i < ends.len() => ends.get_physical_index(i),
            Indirection::LongRuns(ends) if i < ends.len() => ends.get_physical_index(i),
            Indirection::ShortRuns(_) | Indirection::Runs(_) | Indirection::LongRuns(_) => NOWHERE,
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{DictionaryArray, Int16Array, Int64Array, RunArray, StringArray};
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn keys_map_to_values_and_missing_rows_to_none() {
        let keys = Int16Array::from(vec![Some(2), None, Some(0)]);
        let values = Arc::new(StringArray::from(vec!["a", "b", "c"]));
        let array: ArrayRef = Arc::new(DictionaryArray::new(keys, values));
        let (indirections, values) = Indirection::of(&array.slice(1, 2)).unwrap();
        assert_eq!(
            (indirections.at(1), indirections.at(2), values.len()),
            (0, usize::MAX, 3)
        );
        assert!(Indirection::of(&values).is_none());
    }

    proptest! {
        /// Each row of a slice refers to the run that contains it.
        #[test]
        fn runs_lead_to_their_values(lengths in prop::collection::vec(1..5i16, 1..10), from in 0..10usize, len in 0..20usize) {
            let ends = lengths.iter().scan(0, |end, length| { *end += length; Some(*end) });
            let of: Vec<i64> = lengths.iter().zip(0..).flat_map(|(&n, run)| vec![run; n as usize]).collect();
            let values = Int64Array::from_iter_values(0..lengths.len() as i64);
            let runs = RunArray::<Int16Type>::try_new(&Int16Array::from_iter_values(ends), &values).unwrap();
            let from = from.min(of.len());
            let len = len.min(of.len() - from);
            let array: ArrayRef = Arc::new(runs.slice(from, len));
            let (indirections, _) = Indirection::of(&array).unwrap();
            let found: Vec<i64> = (0..len).map(|i| indirections.at(i) as i64).collect();
            prop_assert_eq!(found, &of[from..from + len]);
            prop_assert_eq!(indirections.at(len), usize::MAX);
        }
    }
}
