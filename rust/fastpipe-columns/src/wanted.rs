//! The requested type of a column's values, and the conversion to it.

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, make_array};
use arrow_buffer::{BooleanBuffer, Buffer};
use arrow_cast::{CastOptions, cast_with_options};
use arrow_schema::{ArrowError, DataType};
use fastpipe_batch::{
    DType, Error, ErrorKind, Key, Leaf, Lookup, MOST_KEYS, TimeUnit, UNKNOWN, try_collect, try_with_capacity,
};

use crate::buckets::in_buckets;
use crate::categories::Categories;
use crate::nearest::nearest;
use crate::scaled::unscaled;
use crate::types::{arrow, scale};
use crate::values::{Values, elements};

/// The request for the values of a column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted<'a> {
    pub(crate) leaf: Leaf,
    /// The number of decimal places, if decimals are read as integers.
    pub(crate) scale: Option<i8>,
    /// Whether decimals are read as 128-bit integers, each a pair of int64.
    pub(crate) pair: bool,
    /// The texts of the codes, if codes of a dictionary are requested.
    pub(crate) categories: Option<&'a Categories>,
    /// How text is converted to indices.
    pub(crate) lookup: Option<&'a Lookup>,
    /// Whether the lengths of lists are requested instead of their items.
    pub(crate) counts: bool,
}

impl Wanted<'_> {
    pub(crate) const INDEX: Wanted<'static> = Wanted {
        leaf: Leaf::Fixed(DType::I64),
        scale: None,
        pair: false,
        categories: None,
        lookup: None,
        counts: false,
    };

    /// Whether values of a type already have the requested type, so that no conversion is necessary.
    pub(crate) fn is(&self, ty: &DataType) -> bool {
        use DataType::{Binary, BinaryView, LargeBinary, LargeUtf8, Timestamp, Utf8, Utf8View};
        if self.categories.is_some() || self.lookup.is_some() {
            return false;
        }
        let whole = |dtype| self.leaf == Leaf::Fixed(dtype) && scale(ty) == self.scale;
        match (ty, self.leaf) {
            (DataType::Decimal32(..), Leaf::Fixed(_)) => whole(DType::I32),
            (DataType::Decimal64(..), Leaf::Fixed(_)) => whole(DType::I64),
            (Utf8 | LargeUtf8 | Utf8View, Leaf::Bytes { .. }) => true,
            (Binary | LargeBinary | BinaryView, Leaf::Bytes { utf8 }) => !utf8,
            // Arrow counts days in 32 bits, NumPy in 64.
            (DataType::Date32, _) => false,
            (Timestamp(unit, _), leaf) => Timestamp(*unit, None) == arrow(leaf),
            (ty, leaf) => *ty == arrow(leaf) && self.scale.is_none_or(|asked| asked == 0),
        }
    }
}

/// Values in the requested type.
#[derive(Clone, Debug)]
pub(crate) struct Finished {
    pub(crate) values: Values,
    /// Which values fit, if some don't.
    pub(crate) fitting: Option<BooleanBuffer>,
    /// The texts of the codes, if the values are codes or indices.
    pub(crate) texts: Option<Values>,
    /// Memory used for converted values, in bytes.
    pub(crate) taken: usize,
}

fn malformed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

/// Casts an array. Values that don't fit are null in the result.
pub(crate) fn rewritten(array: &dyn Array, to: &DataType) -> Result<ArrayRef, Error> {
    let options = CastOptions {
        safe: true,
        ..CastOptions::default()
    };
    cast_with_options(array, to, &options).map_err(|error| {
        let reason = format!("{} can't be read as {to}: {error}", array.data_type());
        Error::new(ErrorKind::Unsupported, reason)
    })
}

/// Returns the same values as another type of the same width.
fn relabeled(array: &dyn Array, ty: DataType) -> Result<ArrayRef, Error> {
    let data = array.to_data().into_builder().data_type(ty).build();
    data.map(make_array).map_err(|error| malformed(&error))
}

/// Converts the values to the requested type.
pub(crate) fn finish(array: &ArrayRef, wanted: Wanted<'_>) -> Result<Finished, Error> {
    let leaf = wanted.leaf;
    let mut finished = Finished {
        values: Values::Bits(BooleanBuffer::new_unset(0)),
        fitting: None,
        texts: None,
        taken: 0,
    };
    if let (Some(categories), Leaf::Fixed(dtype)) = (wanted.categories, leaf) {
        let (codes, known) = categories.codes(array, dtype)?;
        finished.taken = codes.len();
        finished.values = Values::Elements(codes);
        finished.fitting = known;
        finished.texts = Some(Values::of_text(array)?);
        return Ok(finished);
    }
    if let (Some(buckets), Leaf::Fixed(dtype)) = (wanted.lookup.and_then(Lookup::buckets), leaf)
        && *array.data_type() != DataType::Null
    {
        let (indices, known) = in_buckets(array, buckets, dtype)?;
        finished.taken = indices.len();
        finished.values = Values::Elements(indices);
        finished.fitting = known;
        return Ok(finished);
    }
    if let (Some(lookup), Leaf::Fixed(dtype)) = (wanted.lookup, leaf)
        && *array.data_type() != DataType::Null
    {
        let texts = Values::of_text(array)?;
        let (indices, known) = indices_of(&texts, array, lookup, dtype)?;
        finished.taken = indices.len();
        finished.values = Values::Elements(indices);
        finished.fitting = known;
        finished.texts = Some(texts);
        return Ok(finished);
    }
    if let (Some(asked), Leaf::Fixed(dtype)) = (wanted.scale, leaf)
        && *array.data_type() != DataType::Null
    {
        if wanted.is(array.data_type()) {
            finished.values = elements(array, dtype.size())?;
            return Ok(finished);
        }
        let (values, fitting) = unscaled(array, Some(dtype), asked)?;
        finished.taken = values.len();
        finished.values = Values::Elements(values);
        finished.fitting = fitting;
        return Ok(finished);
    }
    if let Leaf::Fixed(dtype) = leaf
        && array.data_type().is_decimal()
    {
        let values = nearest(array, dtype)?;
        finished.taken = values.len();
        finished.values = Values::Elements(values);
        return Ok(finished);
    }
    let to = arrow(leaf);
    let mut found = array.clone();
    // Times of day are read as durations, and instants are read without their time zone.
    let same = match array.data_type() {
        DataType::Time32(unit) => Some((DataType::Int32, *unit)),
        DataType::Time64(unit) => Some((DataType::Int64, *unit)),
        _ => None,
    };
    if let Some((stored, unit)) = same {
        found = rewritten(&relabeled(&found, stored)?, &DataType::Int64)?;
        finished.taken += found.get_array_memory_size();
        found = relabeled(&found, DataType::Duration(unit))?;
    }
    if let DataType::Timestamp(unit, Some(_)) = found.data_type() {
        found = relabeled(&found, DataType::Timestamp(*unit, None))?;
    }
    if *found.data_type() != to && !wanted.is(found.data_type()) {
        let before = found.logical_null_count();
        let cast = rewritten(&found, &to)?;
        finished.taken += cast.get_array_memory_size();
        if cast.logical_null_count() > before {
            let (was, is) = (found.logical_nulls(), cast.logical_nulls());
            finished.fitting = Some(BooleanBuffer::collect_bool(cast.len(), |i| {
                is.as_ref().is_none_or(|nulls| nulls.is_valid(i)) || was.as_ref().is_some_and(|nulls| nulls.is_null(i))
            }));
        }
        found = cast;
    }
    let (values, more) = stored(&found, leaf)?;
    finished.values = values;
    finished.taken += more;
    Ok(finished)
}

/// Returns the indices of texts as elements of type `to`. Also returns which texts have an index, if some don't.
fn indices_of(
    texts: &Values,
    array: &ArrayRef,
    lookup: &Lookup,
    to: DType,
) -> Result<(Buffer, Option<BooleanBuffer>), Error> {
    const WHAT: &str = "the indices of a vocabulary";
    let (count, size) = (array.len(), to.size());
    let mut found: Vec<u8> = try_with_capacity(count.saturating_mul(size), WHAT)?;
    let mut known: Vec<bool> = try_with_capacity(count, WHAT)?;
    let mut keys = [Key::default(); MOST_KEYS];
    let mut indices = [UNKNOWN; MOST_KEYS];
    for start in (0..count).step_by(MOST_KEYS) {
        let some = start..count.min(start + MOST_KEYS);
        for (key, i) in keys.iter_mut().zip(some.clone()) {
            // The stored text of a null may be anything.
            let text = array.is_valid(i).then(|| texts.text(i)).flatten().unwrap_or_default();
            *key = Key { text, term: None };
        }
        lookup.find(&keys[..some.len()], &mut indices);
        for (&index, i) in indices.iter().zip(some) {
            known.push(index != UNKNOWN || array.is_null(i));
            // All indices fit the dtype because the spec was checked. Little-endian numbers begin with their lowest
            // bytes.
            found.extend_from_slice(&index.max(0).to_le_bytes()[..size]);
        }
    }
    let lost = known.contains(&false);
    Ok((Buffer::from_vec(found), lost.then(|| BooleanBuffer::from(known))))
}

/// Converts decimals to pairs of int64, the halves of 128-bit integers, in units of `10**-asked`.
pub(crate) fn pairs(array: &ArrayRef, asked: i8) -> Result<Finished, Error> {
    const WIDTH: usize = size_of::<i128>();
    let mut finished = Finished {
        values: Values::Bits(BooleanBuffer::new_unset(0)),
        fitting: None,
        texts: None,
        taken: 0,
    };
    if matches!(array.data_type(), DataType::Decimal128(_, own) if *own == asked) {
        // The memory is little-endian, so the lower half is first.
        finished.values = elements(array, WIDTH)?;
        return Ok(finished);
    }
    let (values, fitting) = unscaled(array, None, asked)?;
    finished.taken = values.len();
    finished.values = Values::Elements(values);
    finished.fitting = fitting.map(|fitting| BooleanBuffer::collect_bool(fitting.len() * 2, |i| fitting.value(i / 2)));
    Ok(finished)
}

/// Returns the memory of values that have the requested type.
fn stored(array: &ArrayRef, leaf: Leaf) -> Result<(Values, usize), Error> {
    Ok(match (array.data_type(), leaf) {
        (_, Leaf::Bytes { .. }) => (Values::of_text(array)?, 0),
        (DataType::Boolean, _) => (Values::Bits(array.as_boolean().values().clone()), 0),
        // Arrow counts days in 32 bits, NumPy in 64.
        (DataType::Date32, Leaf::Fixed(DType::Datetime(TimeUnit::Days))) => {
            let days = array.as_primitive::<arrow_array::types::Date32Type>().values();
            let days = try_collect(days.iter().map(|&day| i64::from(day)), "dates")?;
            let bytes = days.len() * size_of::<i64>();
            (Values::Elements(Buffer::from_vec(days)), bytes)
        }
        (_, Leaf::Fixed(dtype)) => (elements(array, dtype.size())?, 0),
    })
}
