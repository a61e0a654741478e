//! The values of columns and their memory layouts.

use std::ops::Range;

use arrow_array::cast::AsArray;
use arrow_array::{Array, ArrayRef};
use arrow_buffer::{ArrowNativeType, BooleanBuffer, Buffer, OffsetBuffer};
use arrow_schema::DataType;
use fastpipe_batch::{Error, ErrorKind};

/// The values of a column in one record batch.
#[derive(Clone, Debug)]
pub(crate) enum Values {
    /// Consecutive elements of a fixed width.
    Elements(Buffer),
    Bits(BooleanBuffer),
    ShortText(OffsetBuffer<i32>, Buffer),
    LongText(OffsetBuffer<i64>, Buffer),
    /// Views of strings, and the buffers that contain the long strings.
    Views(Buffer, Vec<Buffer>),
}

impl Values {
    /// Returns the strings of a string array.
    pub(crate) fn of_text(array: &ArrayRef) -> Result<Values, Error> {
        Ok(match array.data_type() {
            DataType::Utf8 => {
                let text = array.as_string::<i32>();
                Values::ShortText(text.offsets().clone(), text.values().clone())
            }
            DataType::LargeUtf8 => {
                let text = array.as_string::<i64>();
                Values::LongText(text.offsets().clone(), text.values().clone())
            }
            DataType::Binary => {
                let text = array.as_binary::<i32>();
                Values::ShortText(text.offsets().clone(), text.values().clone())
            }
            DataType::LargeBinary => {
                let text = array.as_binary::<i64>();
                Values::LongText(text.offsets().clone(), text.values().clone())
            }
            DataType::Utf8View => {
                let text = array.as_string_view();
                Values::Views(text.views().inner().clone(), text.data_buffers().to_vec())
            }
            DataType::BinaryView => {
                let text = array.as_binary_view();
                Values::Views(text.views().inner().clone(), text.data_buffers().to_vec())
            }
            _ => return Err(internal("text", array)),
        })
    }

    /// Returns the bytes of string `i`.
    #[inline]
    pub(crate) fn text(&self, i: usize) -> Option<&[u8]> {
        let end = i.checked_add(1)?;
        match self {
            Values::ShortText(offsets, bytes) => bytes.get(*offsets.get(i)? as usize..*offsets.get(end)? as usize),
            Values::LongText(offsets, bytes) => bytes.get(*offsets.get(i)? as usize..*offsets.get(end)? as usize),
            Values::Views(views, buffers) => viewed(views.as_chunks().0.get(i)?, buffers),
            Values::Elements(_) | Values::Bits(_) => None,
        }
    }

    /// Returns the bytes of string `i` and of strings after it, and the length of string `i`.
    #[inline]
    pub(crate) fn text_and_rest(&self, i: usize) -> Option<(&[u8], usize)> {
        match self {
            Values::ShortText(offsets, bytes) => located(offsets, bytes, i),
            Values::LongText(offsets, bytes) => located(offsets, bytes, i),
            Values::Views(views, buffers) => {
                let text = viewed(views.as_chunks().0.get(i)?, buffers)?;
                Some((text, text.len()))
            }
            Values::Elements(_) | Values::Bits(_) => None,
        }
    }

    /// Returns the bytes of all these strings, if they are contiguous.
    pub(crate) fn texts(&self, rows: Range<usize>) -> Option<&[u8]> {
        match self {
            Values::ShortText(offsets, bytes) => {
                bytes.get(*offsets.get(rows.start)? as usize..*offsets.get(rows.end)? as usize)
            }
            Values::LongText(offsets, bytes) => {
                bytes.get(*offsets.get(rows.start)? as usize..*offsets.get(rows.end)? as usize)
            }
            Values::Elements(_) | Values::Bits(_) | Values::Views(..) => None,
        }
    }

    /// Returns the length of each of these strings, if they are contiguous.
    pub(crate) fn text_lens(&self, rows: Range<usize>) -> Option<impl Iterator<Item = usize>> {
        let (short, long): (&[i32], &[i64]) = match self {
            Values::ShortText(offsets, _) => (offsets.get(rows.start..=rows.end)?, &[]),
            Values::LongText(offsets, _) => (&[], offsets.get(rows.start..=rows.end)?),
            Values::Elements(_) | Values::Bits(_) | Values::Views(..) => return None,
        };
        let short = short.windows(2).map(|ends| (ends[1] - ends[0]) as usize);
        Some(short.chain(long.windows(2).map(|ends| (ends[1] - ends[0]) as usize)))
    }

    /// Writes element `i` to `out`. Returns `None` if it doesn't exist.
    #[inline]
    pub(crate) fn element(&self, i: usize, out: &mut [u8]) -> Option<()> {
        match self {
            Values::Elements(bytes) => {
                let start = i.checked_mul(out.len())?;
                out.copy_from_slice(bytes.get(start..start.checked_add(out.len())?)?);
            }
            Values::Bits(bits) if i < bits.len() => out.fill(u8::from(bits.value(i))),
            _ => return None,
        }
        Some(())
    }
}

/// Returns the bytes of string `i` and of strings after it, and the length of string `i`.
#[inline]
pub(crate) fn located<'a>(offsets: &[impl ArrowNativeType], bytes: &'a [u8], i: usize) -> Option<(&'a [u8], usize)> {
    let ends = offsets.get(i..)?.first_chunk::<2>()?;
    let (start, end) = (ends[0].as_usize(), ends[1].as_usize());
    let bytes = bytes.get(start..)?;
    let len = end.checked_sub(start)?;
    (len <= bytes.len()).then_some((bytes, len))
}

/// Returns the string of a view. Bytes 0 to 3 of a view are the length. A short string follows directly. For a long
/// string, the first four bytes of the string follow, then the index of its buffer, then its offset in the buffer.
#[inline]
fn viewed<'a>(view: &'a [u8; 16], buffers: &'a [Buffer]) -> Option<&'a [u8]> {
    const SHORT: usize = 12;
    let number = |at: usize| u32::from_le_bytes([view[at], view[at + 1], view[at + 2], view[at + 3]]) as usize;
    let len = number(0);
    if len <= SHORT {
        return view.get(4..4 + len);
    }
    let start = number(12);
    buffers.get(number(8))?.get(start..start.checked_add(len)?)
}

#[cold]
pub(crate) fn internal(what: &str, array: &dyn Array) -> Error {
    let reason = format!("expected {what} in a column, found {}", array.data_type());
    Error::new(ErrorKind::Internal, reason)
}

/// Returns the memory of elements with `size` bytes each.
pub(crate) fn elements(array: &ArrayRef, size: usize) -> Result<Values, Error> {
    let data = array.to_data();
    let buffer = data.buffers().first().ok_or_else(|| internal("values", array))?;
    let (from, bytes) = (data.offset() * size, data.len() * size);
    if buffer.len() < from + bytes {
        return Err(internal("as many values as rows", array));
    }
    Ok(Values::Elements(buffer.slice_with_length(from, bytes)))
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use arrow_array::{LargeStringArray, StringArray, StringViewArray};

    use super::*;

    #[test]
    fn ranges_of_texts_have_their_lengths_and_bytes() {
        let texts = ["a", "", "\u{e4}bc", "long enough for a buffer", ""];
        let arrays: [ArrayRef; 2] = [
            Arc::new(StringArray::from(texts.to_vec())),
            Arc::new(LargeStringArray::from(texts.to_vec())),
        ];
        for values in arrays.iter().map(|array| Values::of_text(&array.slice(1, 4)).unwrap()) {
            for range in [0..0, 0..4, 1..3, 4..4] {
                let expected = &texts[1..][range.clone()];
                let lens: Vec<usize> = values.text_lens(range.clone()).unwrap().collect();
                assert_eq!(lens, expected.iter().map(|text| text.len()).collect::<Vec<_>>());
                assert_eq!(values.texts(range), Some(expected.concat().as_bytes()));
            }
            assert!(values.text_lens(2..5).is_none() && values.text_and_rest(4).is_none());
            let (bytes, len) = values.text_and_rest(1).unwrap();
            assert_eq!(&bytes[..len], texts[2].as_bytes());
        }
        let views: ArrayRef = Arc::new(StringViewArray::from(texts.to_vec()));
        assert!(Values::of_text(&views).unwrap().text_lens(0..1).is_none());
    }
}
