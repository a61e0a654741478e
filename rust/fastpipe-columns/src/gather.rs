//! Rows of finished columns, copied to where they belong, a column at a time.
//!
//! Columns of one fixed width a row without nulls, strings, and lists of such elements are copied by loops of their own. What is
//! nested deeper, or has nulls, is written value by value (`by_value.rs`).

use fastpipe_batch::{Block, Error, ErrorKind, Form, Leaf, Lengths, NestedForm, Overflow, hint};

use crate::bound::{Bound, Lists};
use crate::layout::{Column, Rule};
use crate::values::Values;

/// Rows that are asked for before they are copied.
const AHEAD: usize = 8;

/// Bytes of a line of the processor's cache.
const LINE: usize = 64;

/// Where a picked row is.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct At {
    /// Which of the record batches.
    pub(crate) chunk: u32,
    /// Its row there.
    pub(crate) row: usize,
}

/// What went wrong, in which of the picked rows.
#[derive(Debug)]
pub(crate) struct Fault {
    pub(crate) at: usize,
    pub(crate) error: Error,
}

pub(crate) type Result<T, E = Error> = std::result::Result<T, E>;

/// Rows of one column: the column in each of the record batches, and the picked rows.
pub(crate) struct Gather<'a> {
    pub(crate) column: &'a Column,
    pub(crate) chunks: &'a [&'a Bound],
    pub(crate) rows: &'a [At],
}

impl Gather<'_> {
    /// Writes the parts of the column.
    pub(crate) fn write(&self, block: &mut Block<'_, '_>) -> Result<(), Fault> {
        let done = match &self.column.spec.form {
            Form::Nested(form) if self.is_plain(form) => self.plain(form, block).map(|()| true),
            Form::Nested(form) => self.listed(form, block),
            Form::Sparse(_) => Ok(false),
        };
        match done {
            Ok(true) => Ok(()),
            Ok(false) => self.value_by_value(block),
            Err(error) => Err(Fault { at: 0, error }),
        }
    }

    /// Whether every row is so many elements, one after the other, none of them null.
    fn is_plain(&self, form: &NestedForm) -> bool {
        let Leaf::Fixed(_) = form.leaf else { return false };
        form.ragged == 0
            && self.chunks.iter().all(|chunk| {
                let fixed = |(dim, level): (usize, &crate::bound::Level)| {
                    level.nulls.is_none()
                        && matches!((&level.lists, self.column.rule(dim)), (Lists::Fixed(n), Rule::Exact(m)) if *n == m)
                };
                chunk.fitting.is_none()
                    && chunk.nulls.is_none()
                    && chunk.levels.len() == form.shape.len()
                    && chunk.levels.iter().enumerate().all(fixed)
            })
    }

    /// Copies rows of a fixed width.
    fn plain(&self, form: &NestedForm, block: &mut Block<'_, '_>) -> Result<()> {
        let mut part = self.column.first_part;
        if form.leaf_mask.is_some() {
            block.placed::<u8>(part)?.fill(1);
            part += 1;
        }
        let Leaf::Fixed(dtype) = form.leaf else {
            return Err(lost());
        };
        let width = form.width();
        if !self.chunks.iter().all(|chunk| is_elements(chunk)) {
            let out = block.placed::<u8>(part)?;
            return match dtype.size() {
                1 => self.one_by_one::<1>(width, out),
                2 => self.one_by_one::<2>(width, out),
                4 => self.one_by_one::<4>(width, out),
                _ => self.one_by_one::<8>(width, out),
            };
        }
        match (width, dtype.size()) {
            (1, 1) => self.elements::<1>(block.placed(part)?),
            (1, 2) => self.elements::<2>(block.placed(part)?),
            (1, 4) => self.elements::<4>(block.placed(part)?),
            (1, 8) => self.elements::<8>(block.placed(part)?),
            (_, size) => self.stretches(width * size, block.placed(part)?),
        }
    }

    pub(crate) fn chunk(&self, row: At) -> Result<&Bound> {
        self.chunks.get(row.chunk as usize).copied().ok_or_else(lost)
    }

    /// Elements of one chunk.
    fn bytes_of(&self, chunk: usize) -> Result<&[u8]> {
        match self.chunks.get(chunk).map(|chunk| &chunk.values) {
            Some(Values::Elements(bytes)) => Ok(bytes),
            _ => Err(lost()),
        }
    }

    /// Copies one element a row.
    fn elements<const N: usize>(&self, out: &mut [u8]) -> Result<()> {
        let out = out.as_chunks_mut::<N>().0.iter_mut().zip(self.rows);
        if let [_] = self.chunks {
            let elements = self.bytes_of(0)?.as_chunks::<N>().0;
            for (out, row) in out {
                *out = *elements.get(row.row).ok_or_else(lost)?;
            }
            return Ok(());
        }
        let chunks = (0..self.chunks.len()).map(|i| Ok(self.bytes_of(i)?.as_chunks::<N>().0));
        let chunks: Vec<&[[u8; N]]> = chunks.collect::<Result<_>>()?;
        for (out, row) in out {
            let elements = chunks.get(row.chunk as usize).ok_or_else(lost)?;
            *out = *elements.get(row.row).ok_or_else(lost)?;
        }
        Ok(())
    }

    /// Copies elements that are found one by one.
    fn one_by_one<const N: usize>(&self, width: usize, out: &mut [u8]) -> Result<()> {
        let rows = out.as_chunks_mut::<N>().0.chunks_exact_mut(width.max(1));
        for (row, out) in self.rows.iter().zip(rows) {
            let chunk = self.chunk(*row)?;
            for (i, out) in out.iter_mut().enumerate() {
                let at = chunk.at(row.row * width + i);
                chunk.values.element(at, out).ok_or_else(lost)?;
            }
        }
        Ok(())
    }

    /// Copies so many bytes a row.
    fn stretches(&self, width: usize, out: &mut [u8]) -> Result<()> {
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

    /// Copies strings, or lists of elements, if none of them is null. Says whether it has.
    fn listed(&self, form: &NestedForm, block: &mut Block<'_, '_>) -> Result<bool> {
        let sound = |chunk: &&Bound| {
            chunk.fitting.is_none() && chunk.nulls.is_none() && chunk.levels.iter().all(|level| level.nulls.is_none())
        };
        if !self.chunks.iter().all(sound) {
            return Ok(false);
        }
        let first = self.column.first_part;
        match (form.ragged, form.leaf) {
            (0, Leaf::Bytes { .. }) if form.shape.is_empty() => {
                let part = first + usize::from(form.leaf_mask.is_some());
                if form.leaf_mask.is_some() {
                    block.placed::<u8>(first)?.fill(1);
                }
                for (out, row) in block.placed::<i64>(part)?.iter_mut().zip(self.rows) {
                    let text = self.chunk(*row)?.text(row.row).ok_or_else(lost)?;
                    // Its bytes are wanted in a moment, and may be anywhere.
                    text.first().into_iter().for_each(|byte| hint(byte));
                    *out = text.len() as i64;
                }
                let mut arena = block.arena(part + 1)?;
                for row in self.rows {
                    arena.begin_row()?;
                    arena
                        .writer()
                        .extend(self.chunk(*row)?.text(row.row).ok_or_else(lost)?)?;
                }
                Ok(true)
            }
            (1, Leaf::Fixed(dtype)) if form.shape.is_empty() && self.column.rule(0) == Rule::Free => {
                let mut part = first;
                if form.masks[0] {
                    block.placed::<u8>(part)?.fill(1);
                    part += 1;
                }
                let range = |row: &At| -> Result<(usize, usize)> {
                    let level = self.chunk(*row)?.levels.first().ok_or_else(lost)?;
                    Ok(level.lists.range(row.row))
                };
                for (out, row) in block.placed::<i64>(part)?.iter_mut().zip(self.rows) {
                    *out = range(row)?.1 as i64;
                }
                part += 1;
                let items = |row: &At| -> Result<(usize, usize)> { range(row) };
                if form.leaf_mask.is_some() {
                    let mut arena = block.arena(part)?;
                    for row in self.rows {
                        arena.begin_row()?;
                        arena.writer().take::<u8>(items(row)?.1)?.fill(1);
                    }
                    part += 1;
                }
                let size = dtype.size();
                let mut arena = block.arena(part)?;
                for row in self.rows {
                    let (start, len) = items(row)?;
                    let chunk = self.chunk(*row)?;
                    arena.begin_row()?;
                    if let (true, Values::Elements(bytes)) = (chunk.is_direct(), &chunk.values) {
                        let bytes = bytes.get(start * size..(start + len) * size).ok_or_else(lost)?;
                        arena.writer().extend(bytes)?;
                        continue;
                    }
                    let out = arena.writer().take::<u8>(len.saturating_mul(size))?;
                    for (item, out) in (start..).zip(out.chunks_exact_mut(size)) {
                        chunk.values.element(chunk.at(item), out).ok_or_else(lost)?;
                    }
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }
}

/// Whether the elements of its rows lie side by side.
fn is_elements(chunk: &Bound) -> bool {
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
        "found null, which the feature's spec does not allow; nulls=\"mask\" marks nulls, fill=... replaces them",
    )
}

/// The error of a null that can't be marked: there is no mask where the schema says that nothing is null.
pub(crate) fn denied_null() -> Error {
    Error::new(
        ErrorKind::Null,
        "found null, which the schema does not allow; fill=... replaces nulls, and where the schema lets values be null, \
         nulls=\"mask\" marks them",
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
