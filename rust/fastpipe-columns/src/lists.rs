//! The lists of an array.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_buffer::{Buffer, OffsetBuffer, ScalarBuffer};
use arrow_schema::DataType;
use fastpipe_batch::{Error, try_collect};

use crate::trace::Step;
use crate::values::internal;

/// The lists of a level, in one of Arrow's layouts.
#[derive(Debug)]
pub(crate) enum Lists {
    Short(OffsetBuffer<i32>),
    Long(OffsetBuffer<i64>),
    ShortViews(ScalarBuffer<i32>, ScalarBuffer<i32>),
    LongViews(ScalarBuffer<i64>, ScalarBuffer<i64>),
    Fixed(usize),
}

impl Lists {
    /// Returns the first item of list `i` and its number of items.
    #[inline]
    pub(crate) fn range(&self, i: usize) -> (usize, usize) {
        match self {
            Lists::Short(offsets) => (offsets[i] as usize, (offsets[i + 1] - offsets[i]) as usize),
            Lists::Long(offsets) => (offsets[i] as usize, (offsets[i + 1] - offsets[i]) as usize),
            Lists::ShortViews(offsets, sizes) => (offsets[i] as usize, sizes[i] as usize),
            Lists::LongViews(offsets, sizes) => (offsets[i] as usize, sizes[i] as usize),
            Lists::Fixed(size) => (i * size, *size),
        }
    }

    /// Returns the number of lists. `items` is the total number of items.
    pub(crate) fn len(&self, items: usize) -> usize {
        match self {
            Lists::Short(offsets) => offsets.len() - 1,
            Lists::Long(offsets) => offsets.len() - 1,
            Lists::ShortViews(offsets, _) => offsets.len(),
            Lists::LongViews(offsets, _) => offsets.len(),
            Lists::Fixed(size) => items.checked_div(*size).unwrap_or(0),
        }
    }
}

/// Returns the lists of an array and their items.
pub(crate) fn lists_of(array: &ArrayRef, step: Step) -> Result<(Lists, ArrayRef), Error> {
    Ok(match array.data_type() {
        DataType::List(_) => {
            let list = array.as_list::<i32>();
            (Lists::Short(list.offsets().clone()), list.values().clone())
        }
        DataType::LargeList(_) => {
            let list = array.as_list::<i64>();
            (Lists::Long(list.offsets().clone()), list.values().clone())
        }
        DataType::ListView(_) => {
            let list = array.as_list_view::<i32>();
            (
                Lists::ShortViews(list.offsets().clone(), list.sizes().clone()),
                list.values().clone(),
            )
        }
        DataType::LargeListView(_) => {
            let list = array.as_list_view::<i64>();
            (
                Lists::LongViews(list.offsets().clone(), list.sizes().clone()),
                list.values().clone(),
            )
        }
        DataType::FixedSizeList(_, size) => {
            let list = array.as_fixed_size_list();
            (Lists::Fixed(usize::try_from(*size).unwrap_or(0)), list.values().clone())
        }
        DataType::Map(..) => {
            let map = array.as_map();
            let items = if step == Step::Keys { map.keys() } else { map.values() };
            (Lists::Short(map.offsets().clone()), items.clone())
        }
        _ => return Err(internal("a list", array)),
    })
}

/// Returns the lengths of an array's lists as int64.
pub(crate) fn lengths(array: &ArrayRef) -> Result<Buffer, Error> {
    let (lists, _) = lists_of(array, Step::Keys)?;
    let lengths = (0..array.len()).map(|i| lists.range(i).1 as i64);
    Ok(Buffer::from_vec(try_collect(lengths, "the lengths of lists")?))
}
