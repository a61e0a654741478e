//! Writes columns that are nested or have nulls. Values are written one by one to temporary memory and then copied to
//! the batch.

use fastpipe_batch::{
    ColumnarRows, DType, Error, ErrorKind, Form, Leaf, LengthRule, NAN, Nulls, Overflow, PartId, Request, SparseForm,
    TextParts, ValueParts,
};

use crate::binding::Binding;
use crate::gather::{Fault, Gather, Result, denied_null, lost, null, wrong_length};
use crate::types::scale;

/// Maximum number of characters of a key in an error message.
const QUOTED: usize = 80;

impl Gather<'_> {
    /// Writes all rows, value by value.
    pub(crate) fn value_by_value(&self, columnar: &mut ColumnarRows<'_, '_>) -> Result<(), Fault> {
        let parts = self.column.spec.parts();
        let mut written = Written::new(self.column.first_part, parts.len());
        for (at, row) in self.rows.iter().enumerate() {
            written.begin_row();
            let done = self.chunk(*row).and_then(|chunk| match &self.column.spec.form {
                Form::Nested(_) => self.item(0, chunk, row.row, &mut written),
                Form::Sparse(form) => self.sparse(form, chunk, row.row, columnar.first_slot() + at, &mut written),
            });
            done.and_then(|()| written.check())
                .map_err(|error| Fault { at, error })?;
        }
        let copied = (0..parts.len()).try_for_each(|i| {
            let part = self.column.first_part as usize + i;
            match parts[i].per_row() {
                Some(per_row) => {
                    if written.bytes[i].len() != parts[i].size() * per_row * self.rows.len() {
                        return Err(lost());
                    }
                    // If a row of another column failed, this column has fewer rows than the batch.
                    let out = columnar.placed::<u8>(part)?.get_mut(..written.bytes[i].len());
                    out.ok_or_else(lost)?.copy_from_slice(&written.bytes[i]);
                }
                None => {
                    let mut arena = columnar.arena(part)?;
                    let starts = &written.starts[i];
                    // If the first row of another column failed, this column has no rows.
                    let ends = starts.iter().skip(1).copied().chain([written.bytes[i].len()]);
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

    /// Writes the replacement for padding or for a null at `level`.
    fn nothing(&self, level: usize, value: &[u8], out: &mut Written) {
        let absent = self.column.parts.absent(&self.column.spec.form, level);
        if let Some((mask, times)) = absent.mask {
            (0..times).for_each(|_| out.push(mask, &[0]));
        }
        if let Some(lengths) = absent.lengths {
            out.push(lengths, &0i64.to_le_bytes());
        }
        for _ in 0..absent.values {
            match self.column.parts.values {
                ValueParts::Elements(_, part) => out.push(part, value),
                ValueParts::Text { to, .. } => out.push_text(to, value),
            }
        }
    }

    /// Returns an error for a null that the spec doesn't allow, or that can't be marked because the schema says that
    /// the values are never null.
    pub(crate) fn check_null(&self, shown: bool) -> Result<()> {
        match self.column.feature.nulls {
            Nulls::Error => Err(null()),
            Nulls::Mask if !shown => Err(denied_null()),
            Nulls::Mask | Nulls::Fill(_) => Ok(()),
        }
    }

    /// Writes the item at a level: a list with all its items, or a value.
    fn item(&self, level: usize, chunk: &Binding, i: usize, out: &mut Written) -> Result<()> {
        let nulls = match chunk.levels.get(level) {
            Some(at) => at.nulls.as_ref(),
            None => chunk.nulls.as_ref(),
        };
        if nulls.is_some_and(|nulls| nulls.is_null(i)) {
            self.check_null(self.column.spec.form.marks_null(level))?;
            self.nothing(level, &self.column.fill, out);
            return Ok(());
        }
        let parts = &self.column.parts;
        if let Some(mask) = parts.mask_at(level) {
            out.push(mask, &[1]);
        }
        let Some(at) = chunk.levels.get(level) else {
            return self.value(chunk, i, out);
        };
        let (start, len) = at.lists.range(i);
        if let Some(&lengths) = parts.lengths.get(level) {
            out.push(lengths, &(len as i64).to_le_bytes());
        }
        let (taken, missing) = match self.column.length_rule(level) {
            LengthRule::Free => (len, 0),
            LengthRule::Exact(n) if n == len => (len, 0),
            LengthRule::Exact(n) => return Err(wrong_length(level, n, len)),
            LengthRule::Pad(n) => (len.min(n), n.saturating_sub(len)),
        };
        for item in start..start + taken {
            self.item(level + 1, chunk, item, out)?;
        }
        if let Some(pad) = &self.column.pad {
            (0..missing).for_each(|_| self.nothing(level + 1, pad, out));
        }
        Ok(())
    }

    fn value(&self, chunk: &Binding, i: usize, out: &mut Written) -> Result<()> {
        if !chunk.fits(i) {
            return Err(self.unfit(self.column.feature.request.leaf(), chunk, i));
        }
        match self.column.parts.values {
            ValueParts::Elements(dtype, part) => {
                let mut element = [0; 8];
                let element = &mut element[..dtype.size()];
                chunk.values.element(chunk.at(i), element).ok_or_else(lost)?;
                out.push(part, element);
            }
            ValueParts::Text { to, .. } => out.push_text(to, chunk.text(i).ok_or_else(lost)?),
        }
        Ok(())
    }

    #[cold]
    fn unfit(&self, leaf: Leaf, chunk: &Binding, i: usize) -> Error {
        if self
            .column
            .feature
            .lookup
            .as_ref()
            .is_some_and(|lookup| lookup.buckets().is_some())
        {
            return Error::new(ErrorKind::ValueRange, NAN);
        }
        if let (Some(text), Some(_)) = (chunk.coded(i), &self.column.feature.lookup) {
            let text: String = text.chars().take(QUOTED).collect();
            let drop = match self.column.feature.request.rank() {
                0 => "",
                _ => ", on_unknown=\"drop\" leaves them out of lists",
            };
            let reason = format!(
                "expected a key of the vocabulary, found the key {text:?}; on_unknown=\"bucket\" gives such keys an index{drop}"
            );
            return Error::new(ErrorKind::ValueRange, reason);
        }
        if let Some(text) = chunk.coded(i) {
            let column = &self.column.feature.field;
            let reason = format!(
                "'{text}' is not among the values that the source's `dictionaries` list for '{column}', so it has no code; \
                 add it there, or request \"string\""
            );
            return Error::new(ErrorKind::ValueRange, reason);
        }
        let ty = self.column.value_type();
        let pair = if self.column.is_pair() { "a pair of " } else { "" };
        let mut reason = format!("a value of type {ty} doesn't fit {pair}{leaf}");
        if let Some(asked) = self.column.feature.scale {
            let widest = matches!(leaf, Leaf::Fixed(DType::I64 | DType::U64));
            let wider = if widest { "" } else { "\"int64\", or " };
            let smaller = if scale(ty).is_some_and(|own| own < asked) {
                "a smaller scale, or "
            } else {
                ""
            };
            let hint = format!("; request {wider}{smaller}\"float64\" without scale=, which rounds");
            reason = format!("{reason} in units of 10**{}{hint}", -i16::from(asked));
        }
        Error::new(ErrorKind::ValueRange, reason)
    }

    /// Writes the entries of one row of a sparse column.
    fn sparse(&self, form: &SparseForm, chunk: &Binding, i: usize, slot: usize, out: &mut Written) -> Result<()> {
        let level = chunk.levels.first().ok_or_else(lost)?;
        let parts = &self.column.parts;
        let is_null = level.nulls.as_ref().is_some_and(|nulls| nulls.is_null(i));
        if is_null {
            self.check_null(form.mask)?;
        }
        if let Some(mask) = parts.mask_at(0) {
            out.push(mask, &[u8::from(!is_null)]);
        }
        let (start, len) = if is_null { (0, 0) } else { level.lists.range(i) };
        if let Some(&lengths) = parts.lengths.first() {
            out.push(lengths, &(len as i64).to_le_bytes());
        }
        let coo = self.column.has_batch_index();
        let coordinates = parts.coordinates.ok_or_else(lost)?;
        let mut starts = Vec::with_capacity(chunk.indices.len());
        for (dim, index) in chunk.indices.iter().enumerate() {
            let level = index.levels.first().ok_or_else(lost)?;
            let there = !is_null && level.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(i));
            let (first, found) = if there { level.lists.range(i) } else { (0, 0) };
            if found != len {
                let reason = format!("a sparse row has {len} values, but {found} indices in dimension {dim}");
                return Err(Error::new(ErrorKind::Shape, reason));
            }
            starts.push(first);
        }
        for entry in 0..len {
            if coo {
                out.push(coordinates, &(slot as i64).to_le_bytes());
            }
            for ((dim, index), first) in chunk.indices.iter().enumerate().zip(&starts) {
                out.push(
                    coordinates,
                    &self.index_at(form, dim, index, first + entry)?.to_le_bytes(),
                );
            }
            let at = start + entry;
            if chunk.nulls.as_ref().is_some_and(|nulls| nulls.is_null(at)) {
                if !matches!(self.column.feature.nulls, Nulls::Fill(_)) {
                    return Err(null());
                }
                self.nothing(1, &self.column.fill, out);
            } else {
                self.value(chunk, at, out)?;
            }
        }
        Ok(())
    }

    /// Returns one index of an entry.
    fn index_at(&self, form: &SparseForm, dim: usize, index: &Binding, at: usize) -> Result<i64> {
        let known = index.nulls.as_ref().is_none_or(|nulls| nulls.is_valid(at)) && index.fits(at);
        let mut value = [0; 8];
        if known {
            index.values.element(index.at(at), &mut value).ok_or_else(lost)?;
        }
        let value = i64::from_le_bytes(value);
        let checks = matches!(
            &self.column.feature.request,
            Request::Sparse {
                check_indices: true,
                ..
            }
        );
        let inside = value >= 0 && form.shape[dim].is_none_or(|size| (value as u64) < size);
        if !known || (!inside && checks) {
            let shape = form.shape[dim].map_or_else(|| "any size".to_owned(), |size| format!("size {size}"));
            let found = if known { value.to_string() } else { "none".to_owned() };
            let reason = format!("index {found} is out of range for dimension {dim}, which has {shape}");
            return Err(Error::new(ErrorKind::ValueRange, reason));
        }
        Ok(value)
    }
}

/// Temporary memory for the parts of a column whose rows are written value by value.
struct Written {
    /// Index of the first part.
    first: PartId,
    bytes: Vec<Vec<u8>>,
    starts: Vec<Vec<usize>>,
    /// Whether a write failed because memory was exhausted.
    out_of_memory: bool,
}

impl Written {
    fn new(first: PartId, parts: usize) -> Written {
        Written {
            first,
            bytes: vec![Vec::new(); parts],
            starts: vec![Vec::new(); parts],
            out_of_memory: false,
        }
    }

    fn begin_row(&mut self) {
        for (bytes, starts) in self.bytes.iter().zip(&mut self.starts) {
            if starts.try_reserve(1).is_ok() {
                starts.push(bytes.len());
            } else {
                self.out_of_memory = true;
            }
        }
    }

    #[inline]
    fn push(&mut self, part: PartId, bytes: &[u8]) {
        let to = &mut self.bytes[(part - self.first) as usize];
        if to.capacity() - to.len() >= bytes.len() || to.try_reserve(bytes.len()).is_ok() {
            to.extend_from_slice(bytes);
        } else {
            self.out_of_memory = true;
        }
    }

    fn push_text(&mut self, to: TextParts, text: &[u8]) {
        self.push(to.lengths, &(text.len() as i64).to_le_bytes());
        self.push(to.bytes, text);
    }

    /// Returns an error if a write has failed.
    fn check(&self) -> Result<()> {
        if self.out_of_memory {
            Err(Overflow::Memory.into())
        } else {
            Ok(())
        }
    }
}
