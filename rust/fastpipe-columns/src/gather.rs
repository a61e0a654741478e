//! Copies rows of finished columns to batches, one column at a time.
//!
//! There are specialized loops for columns with one fixed width per row, for strings, and for lists of fixed-width
//! elements. They copy all values first and then overwrite the nulls. Consecutive rows of a record batch are copied at
//! once. Columns with deeper nesting are written value by value (`nested.rs`). So are columns with a null that the spec
//! doesn't allow, so that only that module reports it.

use std::ops::Range;

use arrow_buffer::NullBuffer;
use fastpipe_batch::{
    ColumnarRows, Error, ErrorKind, Form, KeyCount, LengthRule, Lengths, NestedForm, Overflow, TextParts, ValueParts,
    hint, try_collect, try_with_capacity,
};

use crate::binding::{Binding, Level};
use crate::layout::Column;
use crate::lists::Lists;
use crate::values::Values;

/// Number of rows in advance that memory is prefetched.
const AHEAD: usize = 8;

/// Size of a cache line in bytes.
const LINE: usize = 64;

/// Maximum number of bytes of a string that is copied without a call.
const SHORT: usize = 32;

/// The location of a picked row.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct At {
    /// Index of the record batch.
    pub(crate) chunk: u32,
    /// Row in that record batch.
    pub(crate) row: usize,
}

/// A range of consecutive rows of a record batch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Stretch {
    /// The first row.
    pub(crate) start: At,
    /// Number of rows.
    pub(crate) len: usize,
}

impl Stretch {
    /// Returns the rows in their record batch.
    pub(crate) fn rows(&self) -> Range<usize> {
        self.start.row..self.start.row + self.len
    }
}

/// An error and the index of the picked row that caused it.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) at: usize,
    pub(crate) error: Error,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// The arguments to gather one column: the column in each record batch, and the picked rows.
pub(crate) struct Gather<'a> {
    pub(crate) column: &'a Column,
    pub(crate) chunks: &'a [&'a Binding],
    pub(crate) rows: &'a [At],
    /// The same rows as contiguous ranges if they are read in sequence. Empty if they were picked at random.
    pub(crate) stretches: &'a [Stretch],
}

impl Gather<'_> {
    /// Writes all parts of the column.
    pub(crate) fn write(&self, columnar: &mut ColumnarRows<'_, '_>) -> Result<(), Fault> {
        let done = match &self.column.spec.form {
            Form::Nested(form) if self.chunks.iter().all(|chunk| chunk.fitting.is_none()) => self.copy(form, columnar),
            Form::Nested(_) | Form::Sparse(_) => Ok(false),
        };
        match done {
            Ok(true) => {}
            Ok(false) => self.value_by_value(columnar)?,
            Err(error) => return Err(Fault { at: 0, error }),
        }
        self.count_keys(columnar).map_err(|error| Fault { at: 0, error })
    }

    /// Counts the keys of the rows, if keys may be left out.
    fn count_keys(&self, columnar: &mut ColumnarRows<'_, '_>) -> Result<()> {
        if !self.column.feature.lookup.as_ref().is_some_and(|lookup| lookup.drops()) {
            return Ok(());
        }
        let mut keys = KeyCount::default();
        for stretch in self.stretches {
            keys += self.chunk(stretch.start)?.keys_of(stretch.rows());
        }
        if self.stretches.is_empty() {
            for row in self.rows {
                keys += self.chunk(*row)?.keys_of_row(row.row);
            }
        }
        Ok(columnar.count_keys(self.column.first_part as usize, keys)?)
    }

    /// Copies the column if a specialized loop exists. Returns whether it did.
    fn copy(&self, form: &NestedForm, columnar: &mut ColumnarRows<'_, '_>) -> Result<bool> {
        match (form.ragged, self.column.parts.values) {
            (0, ValueParts::Elements(dtype, part)) if self.is_plain(form) => {
                self.plain((form.width(), dtype.size()), part as usize, columnar)
            }
            (0, ValueParts::Text { to, .. }) if form.shape.is_empty() => self.texts(to, columnar),
            (1, ValueParts::Elements(dtype, part))
                if form.shape.is_empty() && self.column.length_rule(0) == LengthRule::Free =>
            {
                self.lists(dtype.size(), part as usize, columnar)
            }
            _ => Ok(false),
        }
    }

    /// Whether all rows have the same number of consecutive elements. Only rows of one element may be null.
    fn is_plain(&self, form: &NestedForm) -> bool {
        self.chunks.iter().all(|chunk| {
            let fixed = |(dim, level): (usize, &Level)| {
                level.nulls.is_none()
                    && matches!((&level.lists, self.column.length_rule(dim)), (Lists::Fixed(n), LengthRule::Exact(m)) if *n == m)
            };
            (chunk.nulls.is_none() || form.shape.is_empty())
                && chunk.levels.len() == form.shape.len()
                && chunk.levels.iter().enumerate().all(fixed)
        })
    }

    /// Copies rows of `width` elements with `size` bytes each.
    fn plain(&self, (width, size): (usize, usize), part: usize, columnar: &mut ColumnarRows<'_, '_>) -> Result<bool> {
        let leaf_mask = self.column.parts.leaf_mask();
        let Some(nulls) = self.null_rows(|chunk| chunk.nulls.as_ref(), leaf_mask.is_some())? else {
            return Ok(false);
        };
        if let Some(part) = leaf_mask {
            mask(columnar.placed(part as usize)?, &nulls);
        }
        let out = columnar.placed::<u8>(part)?;
        if !self.chunks.iter().all(|chunk| is_elements(chunk)) {
            match size {
                1 => self.one_by_one::<1>(width, out)?,
                2 => self.one_by_one::<2>(width, out)?,
                4 => self.one_by_one::<4>(width, out)?,
                _ => self.one_by_one::<8>(width, out)?,
            }
        } else if !self.stretches.is_empty() {
            self.copy_stretches(width * size, out)?;
        } else {
            match width * size {
                1 => self.elements::<1>(out)?,
                2 => self.elements::<2>(out)?,
                4 => self.elements::<4>(out)?,
                8 => self.elements::<8>(out)?,
                16 => self.elements::<16>(out)?,
                32 => self.elements::<32>(out)?,
                LINE => self.elements::<LINE>(out)?,
                bytes => self.wide(bytes, out)?,
            }
        }
        for row in nulls {
            let value = out.get_mut(row * size..(row + 1) * size).ok_or_else(lost)?;
            value.copy_from_slice(&self.column.fill);
        }
        Ok(true)
    }

    /// Returns the indices of the null rows among the picked rows. Returns `None` if there are nulls that the spec
    /// doesn't allow.
    fn null_rows<'c>(
        &'c self,
        nulls: impl Fn(&'c Binding) -> Option<&'c NullBuffer>,
        shown: bool,
    ) -> Result<Option<Vec<usize>>> {
        let nulls: Vec<Option<&NullBuffer>> = self.chunks.iter().map(|chunk| nulls(chunk)).collect();
        if nulls.iter().all(Option::is_none) {
            return Ok(Some(Vec::new()));
        }
        let is_null = |row: &At| {
            nulls
                .get(row.chunk as usize)
                .is_some_and(|nulls| nulls.is_some_and(|nulls| nulls.is_null(row.row)))
        };
        let null = self.rows.iter().enumerate().filter(|(_, row)| is_null(row));
        let null = try_collect(null.map(|(at, _)| at), "the list of null rows")?;
        Ok((null.is_empty() || self.check_null(shown).is_ok()).then_some(null))
    }

    pub(crate) fn chunk(&self, row: At) -> Result<&Binding> {
        self.chunks.get(row.chunk as usize).copied().ok_or_else(lost)
    }

    /// Returns the elements of one chunk.
    fn bytes_of(&self, chunk: usize) -> Result<&[u8]> {
        match self.chunks.get(chunk).map(|chunk| &chunk.values) {
            Some(Values::Elements(bytes)) => Ok(bytes),
            _ => Err(lost()),
        }
    }

    /// Copies elements that must be located one by one. Elements of null rows may be out of range and are skipped.
    fn one_by_one<const N: usize>(&self, width: usize, out: &mut [u8]) -> Result<()> {
        let rows = out.as_chunks_mut::<N>().0.chunks_exact_mut(width.max(1));
        for (row, out) in self.rows.iter().zip(rows) {
            let chunk = self.chunk(*row)?;
            if chunk.nulls.as_ref().is_some_and(|nulls| nulls.is_null(row.row)) {
                continue;
            }
            for (i, out) in out.iter_mut().enumerate() {
                let at = chunk.at(row.row * width + i);
                chunk.values.element(at, out).ok_or_else(lost)?;
            }
        }
        Ok(())
    }

    /// Copies `width` bytes per row for contiguous ranges of rows.
    fn copy_stretches(&self, width: usize, out: &mut [u8]) -> Result<()> {
        let mut rest = out;
        for stretch in self.stretches {
            let (out, behind) = rest.split_at_mut_checked(stretch.len * width).ok_or_else(lost)?;
            let rows = stretch.rows();
            let from = self.bytes_of(stretch.start.chunk as usize)?;
            let from = from.get(rows.start * width..rows.end * width);
            out.copy_from_slice(from.ok_or_else(lost)?);
            rest = behind;
        }
        Ok(())
    }

    /// Copies `N` bytes per row. Copying a fixed number of bytes needs no call.
    fn elements<const N: usize>(&self, out: &mut [u8]) -> Result<()> {
        let chunks = (0..self.chunks.len()).map(|i| Ok(self.bytes_of(i)?.as_chunks::<N>().0));
        let chunks: Vec<&[[u8; N]]> = chunks.collect::<Result<_>>()?;
        let of = |row: &At| chunks.get(row.chunk as usize)?.get(row.row);
        for (i, (out, row)) in out.as_chunks_mut::<N>().0.iter_mut().zip(self.rows).enumerate() {
            if N > 8
                && let Some(next) = self.rows.get(i + AHEAD).and_then(of)
            {
                hint(&next[0]);
            }
            *out = *of(row).ok_or_else(lost)?;
        }
        Ok(())
    }

    /// Copies `width` bytes per row.
    fn wide(&self, width: usize, out: &mut [u8]) -> Result<()> {
        if width == 0 {
            return Ok(());
        }
        let chunks: Vec<&[u8]> = (0..self.chunks.len())
            .map(|i| self.bytes_of(i))
            .collect::<Result<_>>()?;
        let of = |row: &At| -> Option<&[u8]> {
            let start = row.row.checked_mul(width)?;
            chunks.get(row.chunk as usize)?.get(start..start.checked_add(width)?)
        };
        for (i, (out, row)) in out.chunks_exact_mut(width).zip(self.rows).enumerate() {
            if let Some(next) = self.rows.get(i + AHEAD).and_then(of) {
                next.iter().step_by(LINE).for_each(|byte| hint(byte));
            }
            out.copy_from_slice(of(row).ok_or_else(lost)?);
        }
        Ok(())
    }

    /// Copies strings. Returns whether it did.
    fn texts(&self, to: TextParts, columnar: &mut ColumnarRows<'_, '_>) -> Result<bool> {
        let leaf_mask = self.column.parts.leaf_mask();
        let Some(nulls) = self.null_rows(|chunk| chunk.nulls.as_ref(), leaf_mask.is_some())? else {
            return Ok(false);
        };
        if let Some(part) = leaf_mask {
            mask(columnar.placed(part as usize)?, &nulls);
        }
        let is_contiguous = self.chunks.iter().all(|chunk| chunk.has_contiguous_texts());
        if is_contiguous && nulls.is_empty() && !self.stretches.is_empty() {
            self.text_stretches(to, columnar)?;
            return Ok(true);
        }
        let fill = &self.column.fill[..];
        let mut next_null = nulls.into_iter().peekable();
        // The bytes of each text and of texts after it, and the length of the text.
        let mut texts = try_with_capacity(self.rows.len(), "the locations of texts")?;
        // Locations of rows without nulls are found a range at a time, which is faster.
        if next_null.peek().is_none() {
            for stretch in self.stretches {
                let chunk = self.chunk(stretch.start)?;
                chunk.locate_texts(stretch.rows(), &mut texts).ok_or_else(lost)?;
            }
        }
        for (at, row) in self.rows.iter().enumerate().skip(texts.len()) {
            let text = match next_null.next_if_eq(&at) {
                Some(_) => (fill, fill.len()),
                None => self.chunk(*row)?.text_and_rest(row.row).ok_or_else(lost)?,
            };
            // These bytes are read later, and may be anywhere in memory.
            text.0.first().into_iter().for_each(|byte| hint(byte));
            texts.push(text);
        }
        let lens = texts.iter().map(|(_, len)| *len);
        for (out, len) in columnar
            .placed::<i64>(to.lengths as usize)?
            .iter_mut()
            .zip(lens.clone())
        {
            *out = len as i64;
        }
        let mut arena = columnar.arena(to.bytes as usize)?;
        let mut out = arena.take_rows(lens)?;
        for (bytes, len) in texts {
            // Most texts are short, and copying a fixed number of bytes needs no call. Later texts overwrite the rest.
            match (bytes.first_chunk::<SHORT>(), out.first_chunk_mut::<SHORT>()) {
                (Some(bytes), Some(out)) if len <= SHORT => *out = *bytes,
                _ => out
                    .get_mut(..len)
                    .ok_or_else(lost)?
                    .copy_from_slice(bytes.get(..len).ok_or_else(lost)?),
            }
            out = out.get_mut(len..).ok_or_else(lost)?;
        }
        Ok(true)
    }

    /// Copies strings without nulls that are contiguous in each range of rows.
    fn text_stretches(&self, to: TextParts, columnar: &mut ColumnarRows<'_, '_>) -> Result<()> {
        let mut rest = columnar.placed::<i64>(to.lengths as usize)?;
        for stretch in self.stretches {
            let (out, behind) = rest.split_at_mut_checked(stretch.len).ok_or_else(lost)?;
            let values = &self.chunk(stretch.start)?.values;
            let lens = values.text_lens(stretch.rows()).ok_or_else(lost)?;
            out.iter_mut().zip(lens).for_each(|(out, len)| *out = len as i64);
            rest = behind;
        }
        let mut arena = columnar.arena(to.bytes as usize)?;
        for stretch in self.stretches {
            let values = &self.chunk(stretch.start)?.values;
            let lens = values.text_lens(stretch.rows()).ok_or_else(lost)?;
            let bytes = values.texts(stretch.rows()).ok_or_else(lost)?;
            arena.take_rows(lens)?.copy_from_slice(bytes);
        }
        Ok(())
    }

    /// Copies lists of elements with `size` bytes each. Returns whether it did.
    fn lists(&self, size: usize, values: usize, columnar: &mut ColumnarRows<'_, '_>) -> Result<bool> {
        let parts = &self.column.parts;
        if !self
            .chunks
            .iter()
            .all(|chunk| is_elements(chunk) && chunk.levels.len() == 1)
        {
            return Ok(false);
        }
        let Some(nulls) = self.null_rows(|chunk| chunk.levels[0].nulls.as_ref(), parts.mask_at(0).is_some())? else {
            return Ok(false);
        };
        let null_items = self.chunks.iter().any(|chunk| chunk.nulls.is_some());
        if null_items && self.check_null(parts.leaf_mask().is_some()).is_err() {
            return Ok(false);
        }
        if let Some(part) = parts.mask_at(0) {
            mask(columnar.placed(part as usize)?, &nulls);
        }
        let ranges = self.ranges(&nulls)?;
        let lengths = *parts.lengths.first().ok_or_else(lost)?;
        for (out, (_, start, end)) in columnar.placed::<i64>(lengths as usize)?.iter_mut().zip(&ranges.rows) {
            *out = (end - start) as i64;
        }
        if let Some(part) = parts.leaf_mask() {
            let mut arena = columnar.arena(part as usize)?;
            for (chunk, items, lens) in ranges.runs() {
                let out = arena.take_rows(lens)?;
                out.fill(1);
                if let Some(nulls) = &self.chunks[chunk].nulls {
                    out.iter_mut()
                        .zip(items)
                        .for_each(|(out, item)| *out = u8::from(nulls.is_valid(item)));
                }
            }
        }
        let mut arena = columnar.arena(values)?;
        for (chunk, items, lens) in ranges.runs() {
            let from = self.bytes_of(chunk)?.get(items.start * size..items.end * size);
            let out = arena.take_rows(lens.map(|len| len * size))?;
            out.copy_from_slice(from.ok_or_else(lost)?);
            if let Some(nulls) = &self.chunks[chunk].nulls {
                let null = out
                    .chunks_exact_mut(size)
                    .zip(items)
                    .filter(|(_, item)| nulls.is_null(*item));
                null.for_each(|(out, _)| out.copy_from_slice(&self.column.fill));
            }
        }
        Ok(true)
    }

    /// Returns the item ranges of the picked rows. Null rows have empty ranges.
    fn ranges(&self, nulls: &[usize]) -> Result<Ranges> {
        let mut nulls = nulls.iter().copied().peekable();
        let mut last = (0, 0);
        let ranges = self.rows.iter().enumerate().map(|(at, row)| {
            let chunk = row.chunk as usize;
            let (start, len) = match nulls.next_if_eq(&at) {
                Some(_) => (0, 0),
                None => self.chunks[chunk].levels[0].lists.range(row.row),
            };
            // The position of an empty row is irrelevant, so it must not split a contiguous run of items.
            let start = match (len, last.0 == chunk) {
                (0, true) => last.1,
                (0, false) => 0,
                _ => start,
            };
            last = (chunk, start + len);
            (chunk, start, start + len)
        });
        Ok(Ranges {
            rows: try_collect(ranges, "the item ranges of lists")?,
        })
    }
}

/// Marks all rows as valid except the given ones.
fn mask(out: &mut [u8], nulls: &[usize]) {
    out.fill(1);
    for &row in nulls {
        if let Some(valid) = out.get_mut(row) {
            *valid = 0;
        }
    }
}

/// The item ranges of lists.
struct Ranges {
    /// For each row: the index of the record batch, the first item and the end of the items.
    rows: Vec<(usize, usize, usize)>,
}

impl Ranges {
    /// Groups consecutive rows with contiguous items. Returns the record batch, the items, and the item count of each
    /// row.
    fn runs(&self) -> impl Iterator<Item = (usize, std::ops::Range<usize>, impl Iterator<Item = usize>)> {
        let follow = |one: &(usize, usize, usize), next: &(usize, usize, usize)| one.0 == next.0 && one.2 == next.1;
        self.rows.chunk_by(follow).map(|rows| {
            let (chunk, start, _) = rows[0];
            let lens = rows.iter().map(|(_, start, end)| end - start);
            (chunk, start..start + lens.clone().sum::<usize>(), lens)
        })
    }
}

/// Whether the elements of the rows are contiguous.
fn is_elements(chunk: &Binding) -> bool {
    chunk.is_direct() && matches!(chunk.values, Values::Elements(_))
}

#[cold]
pub(crate) fn lost() -> Error {
    Error::new(ErrorKind::Internal, "a row was picked that isn't in its record batch")
}

#[cold]
pub(crate) fn null() -> Error {
    Error::new(
        ErrorKind::Null,
        "found null, which the feature's spec doesn't allow; on_null=\"mask\" marks nulls, fill=... replaces them",
    )
}

/// Returns the error for a null that can't be marked because the schema says that the values are never null.
pub(crate) fn denied_null() -> Error {
    Error::new(
        ErrorKind::Null,
        "found null, which the schema doesn't allow; fill=... replaces nulls, and on_null=\"mask\" marks them if \
         the schema allows them",
    )
}

#[cold]
pub(crate) fn wrong_length(dimension: usize, expected: usize, found: usize) -> Error {
    Error::new(ErrorKind::Shape, format!("expected {expected} items, found {found}")).with_lengths(Lengths::Dimension {
        dimension: dimension as u32,
        expected: expected as u64,
        found: found as u64,
    })
}

impl From<Overflow> for Fault {
    fn from(overflow: Overflow) -> Fault {
        Fault {
            at: 0,
            error: overflow.into(),
        }
    }
}
