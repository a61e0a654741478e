//! Columns of a record batch, bound to what is wanted of them: from here on rows are gathered without a look at types.
//!
//! Layouts that only say how values are stored (dictionaries, run ends, views), and values of another type than the wanted
//! one, are rewritten when a unit is opened. All others stay where they are.

use std::ops::Range;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef, make_array};
use arrow_buffer::{BooleanBuffer, Buffer, NullBuffer, OffsetBuffer, ScalarBuffer};
use arrow_cast::{CastOptions, cast_with_options};
use arrow_schema::{ArrowError, DataType};
use fastpipe_batch::{DType, Error, ErrorKind, Leaf, TimeUnit, try_collect};

use crate::layout::{Column, into_lists};
use crate::scaled::unscaled;
use crate::trace::Step;
use crate::types::{arrow, scale};

/// How the items of a level are found.
#[derive(Debug)]
pub(crate) enum Lists {
    Short(OffsetBuffer<i32>),
    Long(OffsetBuffer<i64>),
    ShortViews(ScalarBuffer<i32>, ScalarBuffer<i32>),
    LongViews(ScalarBuffer<i64>, ScalarBuffer<i64>),
    Fixed(usize),
}

impl Lists {
    /// The first item of list `i`, and how many it has.
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
}

/// The values.
#[derive(Debug)]
pub(crate) enum Values {
    /// Elements of a fixed width, one after the other.
    Elements(Buffer),
    Bits(BooleanBuffer),
    ShortText(OffsetBuffer<i32>, Buffer),
    LongText(OffsetBuffer<i64>, Buffer),
}

impl Values {
    /// The bytes of string `i`.
    #[inline]
    pub(crate) fn text(&self, i: usize) -> &[u8] {
        match self {
            Values::ShortText(offsets, bytes) => &bytes[offsets[i] as usize..offsets[i + 1] as usize],
            Values::LongText(offsets, bytes) => &bytes[offsets[i] as usize..offsets[i + 1] as usize],
            Values::Elements(_) | Values::Bits(_) => &[],
        }
    }

    /// The bytes of all these strings, if they lie one after the other.
    pub(crate) fn texts(&self, rows: Range<usize>) -> Option<&[u8]> {
        let (start, end) = match self {
            Values::ShortText(offsets, _) => (offsets[rows.start] as usize, offsets[rows.end] as usize),
            Values::LongText(offsets, _) => (offsets[rows.start] as usize, offsets[rows.end] as usize),
            Values::Elements(_) | Values::Bits(_) => return None,
        };
        match self {
            Values::ShortText(_, bytes) | Values::LongText(_, bytes) => bytes.get(start..end),
            Values::Elements(_) | Values::Bits(_) => None,
        }
    }
}

/// One level: nulls, and the lists of the next one.
#[derive(Debug)]
pub(crate) struct Level {
    pub(crate) nulls: Option<NullBuffer>,
    pub(crate) lists: Lists,
}

/// What is wanted of the values of a column.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wanted {
    leaf: Leaf,
    /// Of decimals as integers, the decimal places.
    scale: Option<i8>,
    /// Whether it is the lengths of lists.
    counts: bool,
}

impl Wanted {
    const INDEX: Wanted = Wanted {
        leaf: Leaf::Fixed(DType::I64),
        scale: None,
        counts: false,
    };
}

/// A column of one record batch.
#[derive(Debug)]
pub(crate) struct Bound {
    pub(crate) levels: Vec<Level>,
    /// Of the values.
    pub(crate) nulls: Option<NullBuffer>,
    pub(crate) values: Values,
    /// Values that don't fit what is wanted: bits are set where they do.
    pub(crate) fitting: Option<BooleanBuffer>,
    /// Indices of a sparse column, one for each dimension; its values are the column's own.
    pub(crate) indices: Vec<Bound>,
    /// Memory that was taken to rewrite it.
    pub(crate) bytes: usize,
}

fn malformed(error: &ArrowError) -> Error {
    Error::new(ErrorKind::Malformed, format!("damaged Arrow data: {error}"))
}

#[cold]
fn internal(what: &str, array: &dyn Array) -> Error {
    let reason = format!("{what} was expected of a column, found {}", array.data_type());
    Error::new(ErrorKind::Internal, reason)
}

/// Rewrites an array, with nulls for values that don't fit.
fn rewritten(array: &dyn Array, to: &DataType) -> Result<ArrayRef, Error> {
    let options = CastOptions {
        safe: true,
        ..CastOptions::default()
    };
    cast_with_options(array, to, &options).map_err(|error| {
        let reason = format!("{} can't be read as {to}: {error}", array.data_type());
        Error::new(ErrorKind::Unsupported, reason)
    })
}

/// The same values under another type of the same width.
fn relabelled(array: &dyn Array, ty: DataType) -> Result<ArrayRef, Error> {
    let data = array.to_data().into_builder().data_type(ty).build();
    data.map(make_array).map_err(|error| malformed(&error))
}

/// Without dictionaries and run ends.
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

impl Bound {
    /// Binds a column of a record batch, whose columns these are.
    pub(crate) fn new(column: &Column, columns: &[ArrayRef]) -> Result<Bound, Error> {
        let wanted = Wanted {
            leaf: column.feature.request.leaf(),
            scale: column.feature.scale,
            counts: column.feature.counts,
        };
        let steps = &column.trace.steps;
        let bound = match &column.sparse {
            None => Bound::follow(columns, steps, wanted),
            Some((indices, values)) => {
                let mut bound = Bound::follow(columns, &into_lists(steps, *values), wanted)?;
                for &field in indices {
                    let index = Bound::follow(columns, &into_lists(steps, field), Wanted::INDEX)?;
                    bound.bytes += index.bytes;
                    bound.indices.push(index);
                }
                Ok(bound)
            }
        };
        bound.map_err(|error| error.at_feature(column.feature.name.as_str()))
    }

    fn follow(columns: &[ArrayRef], steps: &[Step], wanted: Wanted) -> Result<Bound, Error> {
        let missing = || Error::new(ErrorKind::Schema, "a record batch lacks a column of the schema");
        let Some((Step::Field(first), steps)) = steps.split_first() else {
            return Err(missing());
        };
        let mut array = columns.get(*first).ok_or_else(missing)?.clone();
        let (mut nulls, mut levels, mut bytes): (Option<NullBuffer>, Vec<Level>, usize) = (None, Vec::new(), 0);
        for step in steps {
            let taken;
            (array, taken) = flat(array)?;
            bytes += taken;
            nulls = NullBuffer::union(nulls.as_ref(), array.nulls());
            if let Step::Field(field) = step {
                let fields = array.as_struct_opt().ok_or_else(|| internal("a struct", &array))?;
                array = fields.columns().get(*field).ok_or_else(missing)?.clone();
                continue;
            }
            let (lists, items) = lists_of(&array, *step)?;
            let nulls = nulls.take();
            levels.push(Level { nulls, lists });
            array = items;
        }
        let taken;
        (array, taken) = flat(array)?;
        bytes += taken;
        if wanted.counts {
            let lengths = lengths(&array)?;
            return Ok(Bound {
                nulls: NullBuffer::union(nulls.as_ref(), array.nulls()),
                bytes: bytes + lengths.len(),
                values: Values::Elements(lengths),
                ..Bound::of(levels)
            });
        }
        if let (DataType::FixedSizeBinary(size), Leaf::Fixed(DType::U8)) = (array.data_type(), wanted.leaf) {
            let size = usize::try_from(*size).unwrap_or(0);
            let lists = Lists::Fixed(size);
            let nulls = NullBuffer::union(nulls.as_ref(), array.nulls());
            levels.push(Level { nulls, lists });
            let values = elements(&array, size)?;
            return Ok(Bound {
                values,
                bytes,
                ..Bound::of(levels)
            });
        }
        let (values, fitting, taken) = Bound::values(&array, wanted)?;
        Ok(Bound {
            // Of a type without values all are null.
            nulls: NullBuffer::union(nulls.as_ref(), array.logical_nulls().as_ref()),
            values,
            fitting,
            bytes: bytes + taken,
            ..Bound::of(levels)
        })
    }

    fn of(levels: Vec<Level>) -> Bound {
        Bound {
            levels,
            nulls: None,
            values: Values::Elements(Buffer::from(Vec::<u8>::new())),
            fitting: None,
            indices: Vec::new(),
            bytes: 0,
        }
    }

    /// The values as they are wanted, which of them fit, and the memory that was taken.
    fn values(array: &ArrayRef, wanted: Wanted) -> Result<(Values, Option<BooleanBuffer>, usize), Error> {
        let leaf = wanted.leaf;
        if let (Some(asked), Leaf::Fixed(dtype)) = (wanted.scale, leaf)
            && let Some(own) = scale(array.data_type())
        {
            let whole = match array.data_type() {
                DataType::Decimal32(..) => DType::I32,
                DataType::Decimal64(..) => DType::I64,
                _ => DType::Bool,
            };
            if own == asked && whole == dtype {
                return Ok((elements(array, dtype.size())?, None, 0));
            }
            let (values, fitting) = unscaled(array, dtype, asked)?;
            let taken = values.len();
            return Ok((Values::Elements(values), fitting, taken));
        }
        let to = arrow(leaf);
        let mut taken = 0;
        let mut found = array.clone();
        // Times of a day are counted as durations are, and instants without their zone.
        let same = match array.data_type() {
            DataType::Time32(unit) => Some((DataType::Int32, *unit)),
            DataType::Time64(unit) => Some((DataType::Int64, *unit)),
            _ => None,
        };
        if let Some((stored, unit)) = same {
            found = rewritten(&relabelled(&found, stored)?, &DataType::Int64)?;
            taken += found.get_array_memory_size();
            found = relabelled(&found, DataType::Duration(unit))?;
        }
        if let DataType::Timestamp(unit, Some(_)) = found.data_type() {
            found = relabelled(&found, DataType::Timestamp(*unit, None))?;
        }
        let text_fits = match (found.data_type(), leaf) {
            (DataType::Utf8 | DataType::LargeUtf8, Leaf::Bytes { .. }) => true,
            (DataType::Binary | DataType::LargeBinary, Leaf::Bytes { utf8 }) => !utf8,
            _ => false,
        };
        if *found.data_type() != to && !text_fits {
            let before = found.logical_null_count();
            let cast = rewritten(&found, &to)?;
            taken += cast.get_array_memory_size();
            let lost = cast.logical_null_count() > before;
            let fitting = lost.then(|| {
                let (was, is) = (found.logical_nulls(), cast.logical_nulls());
                BooleanBuffer::collect_bool(cast.len(), |i| {
                    is.as_ref().is_none_or(|nulls| nulls.is_valid(i))
                        || was.as_ref().is_some_and(|nulls| nulls.is_null(i))
                })
            });
            let (values, more) = stored(&cast, leaf)?;
            return Ok((values, fitting, taken + more));
        }
        let (values, more) = stored(&found, leaf)?;
        Ok((values, None, taken + more))
    }
}

/// The memory of values of the wanted type.
fn stored(array: &ArrayRef, leaf: Leaf) -> Result<(Values, usize), Error> {
    Ok(match (array.data_type(), leaf) {
        (DataType::Utf8, _) => {
            let text = array.as_string::<i32>();
            (Values::ShortText(text.offsets().clone(), text.values().clone()), 0)
        }
        (DataType::LargeUtf8, _) => {
            let text = array.as_string::<i64>();
            (Values::LongText(text.offsets().clone(), text.values().clone()), 0)
        }
        (DataType::Binary, _) => {
            let text = array.as_binary::<i32>();
            (Values::ShortText(text.offsets().clone(), text.values().clone()), 0)
        }
        (DataType::LargeBinary, _) => {
            let text = array.as_binary::<i64>();
            (Values::LongText(text.offsets().clone(), text.values().clone()), 0)
        }
        (DataType::Boolean, _) => (Values::Bits(array.as_boolean().values().clone()), 0),
        // Days are counted in 32 bits in Arrow, and in 64 in NumPy.
        (DataType::Date32, Leaf::Fixed(DType::Datetime(TimeUnit::Days))) => {
            let days = array.as_primitive::<arrow_array::types::Date32Type>().values();
            let days = try_collect(days.iter().map(|&day| i64::from(day)), "dates")?;
            let bytes = days.len() * size_of::<i64>();
            (Values::Elements(Buffer::from_vec(days)), bytes)
        }
        (_, Leaf::Fixed(dtype)) => (elements(array, dtype.size())?, 0),
        (_, Leaf::Bytes { .. }) => return Err(internal("text", array)),
    })
}

/// The memory of elements of so many bytes.
fn elements(array: &ArrayRef, size: usize) -> Result<Values, Error> {
    let data = array.to_data();
    let buffer = data.buffers().first().ok_or_else(|| internal("values", array))?;
    let (from, bytes) = (data.offset() * size, data.len() * size);
    if buffer.len() < from + bytes {
        return Err(internal("as many values as rows", array));
    }
    Ok(Values::Elements(buffer.slice_with_length(from, bytes)))
}

/// The lists of an array, and their items.
fn lists_of(array: &ArrayRef, step: Step) -> Result<(Lists, ArrayRef), Error> {
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

/// The numbers of items of an array's lists, as int64.
fn lengths(array: &ArrayRef) -> Result<Buffer, Error> {
    let (lists, _) = lists_of(array, Step::Keys)?;
    let lengths = (0..array.len()).map(|i| lists.range(i).1 as i64);
    Ok(Buffer::from_vec(try_collect(lengths, "the lengths of lists")?))
}
