//! Rows of finished columns, copied to where they belong, a column at a time.
//!
//! Columns of one fixed width a row without nulls, strings, and lists of such elements are copied by loops of their own. What is
//! nested deeper, or has nulls, is written value by value to memory of the column's own first.

use fastpipe_batch::{Block, Error, ErrorKind, Form, Leaf, Lengths, NestedForm, Nulls, Overflow, SparseForm, hint};

use crate::bound::{Bound, Lists, Values};
use crate::layout::{Column, Rule};

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

type Result<T, E = Error> = std::result::Result<T, E>;

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
        if self.chunks.iter().any(|chunk| matches!(chunk.values, Values::Bits(_))) {
            let out = block.placed::<u8>(part)?;
            for (row, out) in self.rows.iter().zip(out.chunks_exact_mut(width.max(1))) {
                let Values::Bits(bits) = &self.chunk(*row)?.values else {
                    return Err(lost());
                };
                for (i, out) in out.iter_mut().enumerate() {
                    *out = u8::from(bits.value(row.row * width + i));
                }
            }
            return Ok(());
        }
        match (width, dtype.size()) {
            (1, 1) => self.elements::<1>(block.placed(part)?),
            (1, 2) => self.elements::<2>(block.placed(part)?),
            (1, 4) => self.elements::<4>(block.placed(part)?),
            (1, 8) => self.elements::<8>(block.placed(part)?),
            (_, size) => self.stretches(width * size, block.placed(part)?),
        }
    }

    fn chunk(&self, row: At) -> Result<&Bound> {
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
                    *out = self.chunk(*row)?.values.text(row.row).len() as i64;
                }
                let mut arena = block.arena(part + 1)?;
                for row in self.rows {
                    arena.begin_row()?;
                    arena.writer().extend(self.chunk(*row)?.values.text(row.row))?;
                }
                Ok(true)
            }
            (1, Leaf::Fixed(dtype)) if form.shape.is_empty() && self.column.rule(0) == Rule::Free => {
                if !self
                    .chunks
                    .iter()
                    .all(|chunk| matches!(chunk.values, Values::Elements(_)))
                {
                    return Ok(false);
                }
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
                    let bytes = self.bytes_of(row.chunk as usize)?;
                    let bytes = bytes.get(start * size..(start + len) * size).ok_or_else(lost)?;
                    arena.begin_row()?;
                    arena.writer().extend(bytes)?;
                }
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Writes whatever there is, value by value.
    fn value_by_value(&self, block: &mut Block<'_, '_>) -> Result<(), Fault> {
        let parts = self.column.spec.parts();
        let mut written = Written::new(parts.len());
        for (at, row) in self.rows.iter().enumerate() {
            written.begin_row();
            let done = self.chunk(*row).and_then(|chunk| match &self.column.spec.form {
                Form::Nested(form) => self.item(form, 0, chunk, row.row, &mut written),
                Form::Sparse(form) => self.sparse(form, chunk, row.row, block.first_slot() + at, &mut written),
            });
            done.map_err(|error| Fault { at, error })?;
        }
        let copied = (0..parts.len()).try_for_each(|i| {
            let part = self.column.first_part + i;
            match parts[i].per_row {
                Some(_) => {
                    let out = block.placed::<u8>(part)?;
                    if out.len() != written.bytes[i].len() {
                        return Err(lost());
                    }
                    out.copy_from_slice(&written.bytes[i]);
                }
                None => {
                    let mut arena = block.arena(part)?;
                    let starts = &written.starts[i];
                    let ends = starts[1..].iter().copied().chain([written.bytes[i].len()]);
                    for (&start, end) in starts.iter().zip(ends) {
                        arena.begin_row()?;
                        arena.writer().extend(&written.bytes[i][start..end])?;
                    }
                }
            }
            Ok(())
        });
        copied.map_err(|error| Fault { at: 0, error })
    }

    /// What is written for a null or for padding at a level that lies within fixed dimensions only, or for a null above.
    fn nothing(&self, form: &NestedForm, level: usize, value: &[u8], out: &mut Written) {
        if level < form.ragged {
            let mut part = masks_above(form, level);
            if form.masks[level] {
                out.push(part, &[0]);
                part += 1;
            }
            out.push(part, &0i64.to_le_bytes());
            return;
        }
        let passed = level - form.ragged;
        let mut part = masks_above(form, form.ragged);
        if let Some(dims) = form.leaf_mask {
            if passed <= dims {
                let times = form.shape[passed..dims].iter().product();
                (0..times).for_each(|_| out.push(part, &[0]));
            }
            part += 1;
        }
        let times: usize = form.shape[passed..].iter().product();
        for _ in 0..times {
            match form.leaf {
                Leaf::Fixed(_) => out.push(part, value),
                Leaf::Bytes { .. } => {
                    out.push(part, &(value.len() as i64).to_le_bytes());
                    out.push(part + 1, value);
                }
            }
        }
    }

    /// Writes what is at a level: a list with all that is in it, or a value.
    fn item(&self, form: &NestedForm, level: usize, chunk: &Bound, i: usize, out: &mut Written) -> Result<()> {
        let nulls = match chunk.levels.get(level) {
            Some(at) => at.nulls.as_ref(),
            None => chunk.nulls.as_ref(),
        };
        if nulls.is_some_and(|nulls| nulls.is_null(i)) {
            if self.column.feature.nulls == Nulls::Error {
                return Err(null());
            }
            self.nothing(form, level, &self.column.fill, out);
            return Ok(());
        }
        if form.leaf_mask.is_some_and(|dims| level == form.ragged + dims) {
            out.push(masks_above(form, form.ragged), &[1]);
        }
        let Some(at) = chunk.levels.get(level) else {
            return self.value(form, chunk, i, out);
        };
        let (start, len) = at.lists.range(i);
        if level < form.ragged {
            let mut part = masks_above(form, level);
            if form.masks[level] {
                out.push(part, &[1]);
                part += 1;
            }
            out.push(part, &(len as i64).to_le_bytes());
        }
        let (taken, missing) = match self.column.rule(level) {
            Rule::Free => (len, 0),
            Rule::Exact(n) if n == len => (len, 0),
            Rule::Exact(n) => return Err(wrong_length(level, n, len)),
            Rule::Pad(n) => (len.min(n), n.saturating_sub(len)),
        };
        for item in start..start + taken {
            self.item(form, level + 1, chunk, item, out)?;
        }
        if let Some(pad) = &self.column.pad {
            (0..missing).for_each(|_| self.nothing(form, level + 1, pad, out));
        }
        Ok(())
    }

    fn value(&self, form: &NestedForm, chunk: &Bound, i: usize, out: &mut Written) -> Result<()> {
        let part = masks_above(form, form.ragged) + usize::from(form.leaf_mask.is_some());
        self.push_value(form.leaf, part, chunk, i, out)
    }

    fn push_value(&self, leaf: Leaf, part: usize, chunk: &Bound, i: usize, out: &mut Written) -> Result<()> {
        if chunk.fitting.as_ref().is_some_and(|fitting| !fitting.value(i)) {
            return Err(Error::new(
                ErrorKind::ValueRange,
                format!("a value of type {} doesn't fit {leaf}", self.column.trace.end),
            ));
        }
        match (&chunk.values, leaf) {
            (Values::Elements(bytes), Leaf::Fixed(dtype)) => {
                let size = dtype.size();
                out.push(part, bytes.get(i * size..(i + 1) * size).ok_or_else(lost)?);
            }
            (Values::Bits(bits), _) => out.push(part, &[u8::from(bits.value(i))]),
            (values, _) => {
                let text = values.text(i);
                out.push(part, &(text.len() as i64).to_le_bytes());
                out.push(part + 1, text);
            }
        }
        Ok(())
    }

    /// Writes the entries of a row of a sparse column.
    fn sparse(&self, form: &SparseForm, chunk: &Bound, i: usize, slot: usize, out: &mut Written) -> Result<()> {
        let level = chunk.levels.first().ok_or_else(lost)?;
        let mut part = 0;
        let is_null = level.nulls.as_ref().is_some_and(|nulls| nulls.is_null(i));
        if is_null && self.column.feature.nulls == Nulls::Error {
            return Err(null());
        }
        if form.mask {
            out.push(part, &[u8::from(!is_null)]);
            part += 1;
        }
        let (start, len) = if is_null { (0, 0) } else { level.lists.range(i) };
        let coo = self.column.has_batch_index();
        if !coo {
            out.push(part, &(len as i64).to_le_bytes());
            part += 1;
        }
        let mut starts = Vec::with_capacity(chunk.indices.len());
        for (dim, index) in chunk.indices.iter().enumerate() {
            let level = index.levels.first().ok_or_else(lost)?;
            let there = !is_null && level.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
            let (first, found) = if there { level.lists.range(i) } else { (0, 0) };
            if found != len {
                let reason = format!("a sparse row has {len} values, and {found} indices of dimension {dim}");
                return Err(Error::new(ErrorKind::Shape, reason));
            }
            starts.push(first);
        }
        for entry in 0..len {
            if coo {
                out.push(part, &(slot as i64).to_le_bytes());
            }
            for ((dim, index), first) in chunk.indices.iter().enumerate().zip(&starts) {
                out.push(part, &self.index_at(form, dim, index, first + entry)?.to_le_bytes());
            }
            let at = start + entry;
            if chunk.nulls.as_ref().is_some_and(|nulls| nulls.is_null(at)) {
                if !matches!(self.column.feature.nulls, Nulls::Fill(_)) {
                    return Err(null());
                }
                match form.leaf {
                    Leaf::Fixed(_) => out.push(part + 1, &self.column.fill),
                    Leaf::Bytes { .. } => {
                        out.push(part + 1, &(self.column.fill.len() as i64).to_le_bytes());
                        out.push(part + 2, &self.column.fill);
                    }
                }
            } else {
                self.push_value(form.leaf, part + 1, chunk, at, out)?;
            }
        }
        Ok(())
    }

    /// One index of an entry.
    fn index_at(&self, form: &SparseForm, dim: usize, index: &Bound, at: usize) -> Result<i64> {
        let Values::Elements(bytes) = &index.values else {
            return Err(lost());
        };
        let known = index.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(at))
            && index.fitting.as_ref().is_none_or(|fitting| fitting.value(at));
        let bytes: [u8; 8] = bytes
            .get(at * 8..at * 8 + 8)
            .and_then(|b| b.try_into().ok())
            .ok_or_else(lost)?;
        let value = i64::from_le_bytes(bytes);
        let checks = matches!(
            &self.column.feature.request,
            fastpipe_batch::Request::Sparse {
                check_indices: true,
                ..
            }
        );
        let inside = value >= 0 && form.shape[dim].is_none_or(|size| (value as u64) < size);
        if !known || (!inside && checks) {
            let shape = form.shape[dim].map_or_else(|| "any size".to_owned(), |size| format!("size {size}"));
            let found = if known { value.to_string() } else { "none".to_owned() };
            let reason = format!("index {found} lies outside of dimension {dim}, which has {shape}");
            return Err(Error::new(ErrorKind::ValueRange, reason));
        }
        Ok(value)
    }
}

/// Parts in front of a ragged level: its own mask is the next.
fn masks_above(form: &NestedForm, level: usize) -> usize {
    level + form.masks[..level].iter().filter(|&&mask| mask).count()
}

/// Memory of the parts of a column, for rows that are written value by value.
struct Written {
    bytes: Vec<Vec<u8>>,
    starts: Vec<Vec<usize>>,
}

impl Written {
    fn new(parts: usize) -> Written {
        Written {
            bytes: vec![Vec::new(); parts],
            starts: vec![Vec::new(); parts],
        }
    }

    fn begin_row(&mut self) {
        for (bytes, starts) in self.bytes.iter().zip(&mut self.starts) {
            starts.push(bytes.len());
        }
    }

    #[inline]
    fn push(&mut self, part: usize, bytes: &[u8]) {
        self.bytes[part].extend_from_slice(bytes);
    }
}

#[cold]
fn lost() -> Error {
    Error::new(ErrorKind::Internal, "a row was picked that isn't in its record batch")
}

#[cold]
fn null() -> Error {
    Error::new(
        ErrorKind::Null,
        "found null, which the feature's spec does not allow; nulls=\"mask\" marks nulls, fill=... replaces them",
    )
}

#[cold]
fn wrong_length(dimension: usize, expected: usize, found: usize) -> Error {
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
