//! Columns of a record batch, bound to a requested feature. After binding, rows are gathered without checking types.
//!
//! Values stay in place, even if views, dictionary keys or run ends refer to them. Values that need another type are
//! rewritten when a unit is opened: each value of a dictionary once, each run once. Dictionaries and run ends around
//! lists and structs are also rewritten. They are too rare for a faster path.
//!
//! This module doesn't check that offsets, views, keys and run ends are within range: `Columns::check` has already
//! called `ArrayData::validate_full`. If a reference is out of range nevertheless, the result is an error, not a panic.

use std::borrow::Cow;
use std::ops::Range;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer};
use arrow_data::ArrayData;
use arrow_schema::DataType;
use fastpipe_batch::{DType, Error, ErrorKind, KeyCount, Leaf, hint, try_reserve, try_with_capacity};

use crate::indirection::Indirection;
use crate::layout::{Column, into_lists};
use crate::lists::{Lists, lengths, lists_of};
use crate::trace::{Step, plain};
use crate::values::{Values, elements, internal, located};
use crate::wanted::{Finished, Wanted, finish, pairs, rewritten};

/// One level of nesting: its nulls, and the lists that lead to the next level.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) nulls: Option<NullBuffer>,
    pub(crate) lists: Lists,
}

/// One column, bound to one record batch.
#[derive(Debug)]
pub(crate) struct Binding {
    pub(crate) levels: Vec<Level>,
    /// Nulls of the innermost level, indexed by row and not by value.
    pub(crate) nulls: Option<NullBuffer>,
    /// The indirections from rows to values. Empty if row `i` has value `i`.
    indirections: Vec<Indirection>,
    pub(crate) values: Values,
    /// Bits are set for values that fit the requested type. `None` if all values fit.
    pub(crate) fitting: Option<BooleanBuffer>,
    /// The texts of the codes, if the values are codes of a dictionary.
    texts: Option<Values>,
    /// The original values, if they were rewritten. Record batches may share a dictionary.
    origin: Option<ArrayData>,
    /// The indices of a sparse column, one binding per dimension. The other fields describe its values.
    pub(crate) indices: Vec<Binding>,
    /// The number of keys of each innermost list, and how many of them were left out. `None` if all keys are still
    /// there.
    keys: Option<Vec<(u32, u32)>>,
    /// Memory used for rewritten values, in bytes.
    pub(crate) bytes: usize,
}

/// Removes the dictionaries and run ends around an array. Also returns the memory used for it, in bytes.
fn flat(array: ArrayRef) -> Result<(ArrayRef, usize), Error> {
    let mut taken = 0;
    let mut array = array;
    loop {
        let to = match array.data_type() {
            DataType::Dictionary(_, values) => (**values).clone(),
            DataType::RunEndEncoded(_, values) => values.data_type().clone(),
            _ => return Ok((array, taken)),
        };
        array = rewritten(&array, &to)?;
        taken += array.get_array_memory_size();
    }
}

/// The array at the end of a path.
struct Reached {
    array: ArrayRef,
    /// Nulls of outer structs at the array's own level.
    nulls: Option<NullBuffer>,
    levels: Vec<Level>,
    taken: usize,
}

/// Follows the steps of a path through the columns of a record batch.
fn reach(columns: &[ArrayRef], steps: &[Step]) -> Result<Reached, Error> {
    let missing = || Error::new(ErrorKind::Schema, "a record batch lacks a column of the schema");
    let Some((Step::Field(first), steps)) = steps.split_first() else {
        return Err(missing());
    };
    let mut found = Reached {
        array: columns.get(*first).ok_or_else(missing)?.clone(),
        nulls: None,
        levels: Vec::new(),
        taken: 0,
    };
    for step in steps {
        let (array, taken) = flat(found.array)?;
        found.taken += taken;
        found.nulls = NullBuffer::union(found.nulls.as_ref(), array.nulls());
        if let Step::Field(field) = step {
            let fields = array.as_struct_opt().ok_or_else(|| internal("a struct", &array))?;
            found.array = fields.columns().get(*field).ok_or_else(missing)?.clone();
            continue;
        }
        let (lists, items) = lists_of(&array, *step)?;
        let nulls = found.nulls.take();
        found.levels.push(Level { nulls, lists });
        found.array = items;
    }
    Ok(found)
}

/// Returns the indirections of an array and the values that they lead to.
fn peel(array: &ArrayRef) -> (Vec<Indirection>, ArrayRef) {
    let (mut indirections, mut values) = (Vec::new(), array.clone());
    while let Some((step, below)) = Indirection::of(&values) {
        indirections.push(step);
        values = below;
    }
    (indirections, values)
}

/// Returns the dictionary that contains the values of a column.
pub(crate) fn dictionary(column: &Column, columns: &[ArrayRef]) -> Result<ArrayRef, Error> {
    Ok(peel(&reach(columns, &column.value_steps())?.array).1)
}

impl Binding {
    /// Binds a column to a record batch with these columns. `last` is the same column in the previous record batch.
    pub(crate) fn new(column: &Column, columns: &[ArrayRef], last: Option<&Binding>) -> Result<Binding, Error> {
        let wanted = Wanted {
            leaf: column.feature.request.leaf(),
            scale: column.feature.scale,
            pair: column.is_pair(),
            categories: column.categories.as_deref(),
            lookup: column.feature.lookup.as_deref(),
            counts: column.feature.counts,
        };
        let binding = Binding::follow(columns, &column.value_steps(), wanted, last);
        let binding = binding.and_then(|mut binding| {
            let fields = column.sparse.iter().flat_map(|(indices, _)| indices);
            for (dim, &field) in fields.enumerate() {
                let last = last.and_then(|last| last.indices.get(dim));
                let index = Binding::follow(columns, &into_lists(&column.trace.steps, field), Wanted::INDEX, last)?;
                binding.bytes += index.bytes;
                binding.indices.push(index);
            }
            Ok(binding)
        });
        binding.map_err(|error| error.at_feature(column.feature.name.as_str()))
    }

    fn follow(
        columns: &[ArrayRef],
        steps: &[Step],
        wanted: Wanted<'_>,
        last: Option<&Binding>,
    ) -> Result<Binding, Error> {
        let mut found = reach(columns, steps)?;
        let bytes = match (plain(found.array.data_type()), wanted.leaf) {
            (DataType::FixedSizeBinary(size), Leaf::Fixed(DType::U8)) => Some(usize::try_from(*size).unwrap_or(0)),
            _ => None,
        };
        if !wanted.counts && !wanted.pair && bytes.is_none() {
            return Binding::at_leaf(found, wanted, last);
        }
        let (array, taken) = flat(found.array)?;
        let nulls = NullBuffer::union(found.nulls.as_ref(), array.nulls());
        found.taken += taken;
        if let Some(size) = bytes {
            let lists = Lists::Fixed(size);
            found.levels.push(Level { nulls, lists });
            return Ok(Binding {
                bytes: found.taken,
                ..Binding::of(found.levels, elements(&array, size)?)
            });
        }
        if let (true, Some(scale)) = (wanted.pair, wanted.scale) {
            let lists = Lists::Fixed(2);
            found.levels.push(Level { nulls, lists });
            let finished = pairs(&array, scale)?;
            return Ok(Binding {
                fitting: finished.fitting,
                bytes: found.taken + finished.taken,
                ..Binding::of(found.levels, finished.values)
            });
        }
        let lengths = lengths(&array)?;
        Ok(Binding {
            nulls,
            bytes: found.taken + lengths.len(),
            ..Binding::of(found.levels, Values::Elements(lengths))
        })
    }

    /// Binds the values at the end of a path.
    fn at_leaf(found: Reached, wanted: Wanted<'_>, last: Option<&Binding>) -> Result<Binding, Error> {
        let array = found.array;
        let items = array.len();
        // Arrays of the null type have no values: all their rows are null.
        let nulls = NullBuffer::union(found.nulls.as_ref(), array.logical_nulls().as_ref());
        let (mut indirections, mut values) = peel(&array);
        let mut taken = found.taken;
        let rewrites = !wanted.is(values.data_type());
        let origin = (rewrites && !indirections.is_empty()).then(|| values.to_data());
        let shared = last.filter(|last| match (&last.origin, &origin) {
            (Some(last), Some(origin)) => last.ptr_eq(origin),
            _ => false,
        });
        let (finished, origin) = if let Some(last) = shared {
            (last.finished(), origin)
        } else if rewrites && !indirections.is_empty() && values.len() > array.len() {
            // A slice of a column with a large dictionary has fewer rows than values, so rewriting the rows is cheaper.
            let more;
            (values, more) = flat(array)?;
            taken += more;
            indirections.clear();
            (finish(&values, wanted)?, None)
        } else {
            (finish(&values, wanted)?, origin)
        };
        let binding = Binding {
            nulls,
            indirections,
            fitting: finished.fitting,
            texts: finished.texts,
            origin,
            bytes: taken + finished.taken,
            ..Binding::of(found.levels, finished.values)
        };
        match (wanted.lookup, wanted.leaf) {
            (Some(lookup), Leaf::Fixed(dtype)) if lookup.drops() && binding.fitting.is_some() => {
                binding.without_unknown(items, dtype)
            }
            _ => Ok(binding),
        }
    }

    /// Removes the items of the innermost lists that have no index in the vocabulary. `items` is the number of items.
    fn without_unknown(mut self, items: usize, dtype: DType) -> Result<Binding, Error> {
        const WHAT: &str = "the indices of a vocabulary";
        let lost = || Error::new(ErrorKind::Internal, "a list has fewer items than declared");
        let too_long = || Error::new(ErrorKind::Limit, "a list has 2^32 keys or more");
        let Some(level) = self.levels.pop() else {
            return Ok(self);
        };
        let size = dtype.size();
        let mut offsets: Vec<i64> = try_with_capacity(level.lists.len(items) + 1, WHAT)?;
        let mut values: Vec<u8> = try_with_capacity(items.saturating_mul(size), WHAT)?;
        let mut valid: Vec<bool> = try_with_capacity(items, WHAT)?;
        let mut keys: Vec<(u32, u32)> = try_with_capacity(level.lists.len(items), WHAT)?;
        offsets.push(0);
        for i in 0..level.lists.len(items) {
            let (start, len) = level.lists.range(i);
            // The items of a null list don't count.
            let len = if level.nulls.as_ref().is_some_and(|nulls| nulls.is_null(i)) {
                0
            } else {
                len
            };
            // Views may overlap, so there may be more items than values.
            try_reserve(&mut values, len.saturating_mul(size), WHAT)?;
            try_reserve(&mut valid, len, WHAT)?;
            let (mut read, mut dropped) = (0u32, 0u32);
            for item in start..start + len {
                let is_null = self.nulls.as_ref().is_some_and(|nulls| nulls.is_null(item));
                read = read.checked_add(u32::from(!is_null)).ok_or_else(too_long)?;
                if !is_null && !self.fits(item) {
                    dropped += 1;
                    continue;
                }
                let mut element = [0; 8];
                if !is_null {
                    let element = &mut element[..size];
                    self.values.element(self.at(item), element).ok_or_else(lost)?;
                }
                values.extend_from_slice(&element[..size]);
                valid.push(!is_null);
            }
            offsets.push(valid.len() as i64);
            keys.push((read, dropped));
        }
        let lists = Lists::Long(OffsetBuffer::new(offsets.into()));
        let nulls = level.nulls;
        self.levels.push(Level { nulls, lists });
        Ok(Binding {
            nulls: valid.contains(&false).then(|| NullBuffer::from(valid)),
            bytes: self.bytes + values.len() + size_of_val(&keys[..]),
            keys: Some(keys),
            ..Binding::of(self.levels, Values::Elements(Buffer::from_vec(values)))
        })
    }

    fn of(levels: Vec<Level>, values: Values) -> Binding {
        Binding {
            levels,
            nulls: None,
            indirections: Vec::new(),
            values,
            fitting: None,
            texts: None,
            origin: None,
            indices: Vec::new(),
            keys: None,
            bytes: 0,
        }
    }

    /// Returns the number of keys in these rows, and how many of them were left out. Nulls are not keys.
    pub(crate) fn keys_of(&self, rows: Range<usize>) -> KeyCount {
        if let [level] = &self.levels[..] {
            if let Some(keys) = &self.keys {
                return sum(keys, rows);
            }
            let read = match &level.lists {
                _ if level.nulls.is_some() || self.nulls.is_some() => None,
                Lists::Short(offsets) => Some((offsets[rows.end] - offsets[rows.start]) as u64),
                Lists::Long(offsets) => Some((offsets[rows.end] - offsets[rows.start]) as u64),
                _ => None,
            };
            if let Some(read) = read {
                return KeyCount { read, dropped: 0 };
            }
        }
        rows.map(|i| self.keys_at(0, i)).sum()
    }

    /// Returns the keys of row `i`. Rows are random, so the loads of several rows should overlap: this is inlined.
    #[inline(always)]
    pub(crate) fn keys_of_row(&self, i: usize) -> KeyCount {
        match (&self.keys, &self.levels[..]) {
            (Some(keys), [_]) if i < keys.len() => KeyCount {
                read: keys[i].0.into(),
                dropped: keys[i].1.into(),
            },
            _ => self.keys_of(i..i + 1),
        }
    }

    /// Counts the keys of item `i` at a level.
    fn keys_at(&self, level: usize, i: usize) -> KeyCount {
        let is_null = |nulls: &Option<NullBuffer>| nulls.as_ref().is_some_and(|nulls| nulls.is_null(i));
        let read = |read: usize| KeyCount {
            read: read as u64,
            dropped: 0,
        };
        let Some(at) = self.levels.get(level) else {
            return read(usize::from(!is_null(&self.nulls)));
        };
        if is_null(&at.nulls) {
            return KeyCount::default();
        }
        let innermost = level + 1 == self.levels.len();
        if let (true, Some(keys)) = (innermost, &self.keys) {
            return sum(keys, i..i + 1);
        }
        let (start, len) = at.lists.range(i);
        match &self.nulls {
            None if innermost => read(len),
            Some(nulls) if innermost => read(len - nulls.slice(start, len).null_count()),
            _ => (start..start + len).map(|item| self.keys_at(level + 1, item)).sum(),
        }
    }

    /// Returns the values for use in another binding, which then uses no additional memory for them.
    fn finished(&self) -> Finished {
        Finished {
            values: self.values.clone(),
            fitting: self.fitting.clone(),
            texts: self.texts.clone(),
            taken: 0,
        }
    }

    /// Whether the values of the rows are stored in order, without indirection.
    pub(crate) fn is_direct(&self) -> bool {
        self.indirections.is_empty()
    }

    /// Returns the index of the value of row `i` at the innermost level.
    #[inline]
    pub(crate) fn at(&self, i: usize) -> usize {
        self.indirections.iter().fold(i, |i, indirections| indirections.at(i))
    }

    /// Returns the text of row `i`.
    #[inline]
    pub(crate) fn text(&self, i: usize) -> Option<&[u8]> {
        self.values.text(self.at(i))
    }

    /// Returns the bytes of the text of row `i` and of texts after it, and the length of the text of row `i`.
    #[inline]
    pub(crate) fn text_and_rest(&self, i: usize) -> Option<(&[u8], usize)> {
        self.values.text_and_rest(self.at(i))
    }

    /// Appends, for each row, the bytes of its text and of texts after it, and the length of its text.
    pub(crate) fn locate_texts<'b>(&'b self, rows: Range<usize>, texts: &mut Vec<(&'b [u8], usize)>) -> Option<()> {
        let mut push = |text: Option<(&'b [u8], usize)>| {
            let text = text?;
            // These bytes are read later, and may be anywhere in memory.
            text.0.first().into_iter().for_each(|byte| hint(byte));
            texts.push(text);
            Some(())
        };
        match (&self.indirections[..], &self.values) {
            // The layout of most dictionaries.
            ([Indirection::I32(keys)], Values::ShortText(offsets, bytes)) => {
                let mut keys = keys.get(rows)?.iter();
                keys.try_for_each(|&key| push(located(offsets, bytes, key as usize)))
            }
            _ => rows.into_iter().try_for_each(|row| push(self.text_and_rest(row))),
        }
    }

    /// Whether the texts of consecutive rows are contiguous.
    pub(crate) fn has_contiguous_texts(&self) -> bool {
        self.is_direct() && matches!(self.values, Values::ShortText(..) | Values::LongText(..))
    }

    /// Whether the value of row `i` fits the requested type.
    pub(crate) fn fits(&self, i: usize) -> bool {
        self.fitting.as_ref().is_none_or(|fitting| {
            let at = self.at(i);
            at >= fitting.len() || fitting.value(at)
        })
    }

    /// Returns the text of the code in row `i`.
    pub(crate) fn coded(&self, i: usize) -> Option<Cow<'_, str>> {
        Some(String::from_utf8_lossy(self.texts.as_ref()?.text(self.at(i))?))
    }
}

/// Returns the keys of these lists, given the keys of each list.
#[inline]
fn sum(keys: &[(u32, u32)], lists: Range<usize>) -> KeyCount {
    let (mut read, mut dropped) = (0, 0);
    for list in keys.get(lists).unwrap_or_default() {
        read += u64::from(list.0);
        dropped += u64::from(list.1);
    }
    KeyCount { read, dropped }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::types::Int8Type;
    use arrow_array::{DictionaryArray, Int8Array, Int32Array, Int64Array, RunArray, StringArray, StringViewArray};
    use arrow_schema::{Field, Schema};
    use fastpipe_batch::{Feature, Nulls, Request};
    use proptest::prelude::*;

    use super::*;

    fn column(array: &ArrayRef, leaf: Leaf) -> Column {
        let schema = Schema::new(vec![Field::new("x", array.data_type().clone(), true)]);
        let request = Request::Dense {
            shape: Vec::new(),
            leaf,
            pad: None,
        };
        let feature = Feature {
            name: "x".into(),
            field: "x".into(),
            request,
            nulls: Nulls::Error,
            counts: false,
            encoded: false,
            scale: None,
            lookup: None,
        };
        Column::new(&schema, &feature, 0).unwrap()
    }

    fn binding(array: &ArrayRef, leaf: Leaf, last: Option<&Binding>) -> Binding {
        Binding::new(&column(array, leaf), std::slice::from_ref(array), last).unwrap()
    }

    /// Returns the texts as an array in one of several layouts.
    fn laid_out(texts: &[Option<String>], layout: usize) -> ArrayRef {
        let plain = StringArray::from(texts.to_vec());
        let views = StringViewArray::from(texts.iter().map(Option::as_deref).collect::<Vec<_>>());
        let keys = Int8Array::from_iter((0..).zip(texts).map(|(key, text)| text.as_ref().map(|_| key)));
        let ends = Int32Array::from_iter_values(1..=texts.len() as i32);
        match layout {
            0 => Arc::new(plain),
            1 => Arc::new(views),
            2 => Arc::new(DictionaryArray::new(keys, Arc::new(views))),
            3 => Arc::new(RunArray::try_new(&ends, &plain).unwrap()),
            _ => Arc::new(RunArray::try_new(&ends, &DictionaryArray::new(keys, Arc::new(plain))).unwrap()),
        }
    }

    proptest! {
        /// Texts are found in every layout, and nothing is copied.
        #[test]
        fn texts_are_found_in_every_layout(
            texts in prop::collection::vec(prop::option::of("[a-zä]{0,30}"), 1..20),
            layout in 0..5usize,
            from in 0..20usize,
        ) {
            let from = from.min(texts.len() - 1);
            let array = laid_out(&texts, layout).slice(from, texts.len() - from);
            let binding = binding(&array, Leaf::Bytes { utf8: true }, None);
            prop_assert_eq!(binding.bytes, 0);
            prop_assert_eq!(binding.is_direct(), layout < 2);
            for (i, text) in texts[from..].iter().enumerate() {
                let is_null = binding.nulls.as_ref().is_some_and(|nulls| nulls.is_null(i));
                prop_assert_eq!(is_null, text.is_none());
                if let Some(text) = text {
                    prop_assert_eq!(binding.text(i), Some(text.as_bytes()));
                }
            }
            prop_assert_eq!(binding.text(array.len()), None);
        }
    }

    #[test]
    fn a_dictionary_is_rewritten_once_or_not_at_all() {
        let f32 = Leaf::Fixed(DType::F32);
        let values: ArrayRef = Arc::new(Int64Array::from_iter_values(0..100));
        let keys = Int8Array::from_iter_values((0..100).cycle().take(200));
        let whole: ArrayRef = Arc::new(DictionaryArray::<Int8Type>::new(keys, values));
        let first = binding(&whole.slice(0, 100), f32, None);
        let second = binding(&whole.slice(100, 100), f32, Some(&first));
        assert!(
            first.bytes >= 400 && second.bytes == 0,
            "{} {}",
            first.bytes,
            second.bytes
        );
        for binding in [&first, &second] {
            let mut element = [0; 4];
            binding.values.element(binding.at(7), &mut element).unwrap();
            assert_eq!(f32::from_le_bytes(element), 7.0);
        }
        // A slice with few rows uses no memory for the other values.
        let few = binding(&whole.slice(7, 2), f32, None);
        assert!(few.bytes < first.bytes && few.is_direct(), "{}", few.bytes);
        assert_eq!(binding(&whole, Leaf::Fixed(DType::I64), None).bytes, 0);
    }
}
