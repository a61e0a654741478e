//! A stretch of rows as a [`Unit`].

use std::borrow::Cow;
use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    Buffer, BufferPool, DType, Error, ErrorKind, Key, Lookup, Mark, Overflow, Pick, Result, Sink, Starts, UNKNOWN,
    Unit, try_with_capacity,
};
use half::f16;
use memchr::memchr_iter;

use crate::dialect::begins_number;
use crate::fields::{Ended, Fields, LoneReturn};
use crate::header::lone_return;
use crate::plan::{Null, Program, Target, To};
use crate::rows::{Lines, Next};
use crate::source::Reading;
use crate::values::{Short, boolean, float, integer, short_float, time};

/// Bytes of a field that an error quotes.
const QUOTED: usize = 80;

/// A stretch of rows.
pub(crate) struct Rows {
    pub(crate) reading: Arc<Reading>,
    pub(crate) lines: Lines,
    pub(crate) program: Arc<Program>,
    pub(crate) data: Buffer,
    /// Where it lies in its file.
    pub(crate) offset: u64,
    pub(crate) rows: u32,
    /// Where rows start, if that is known.
    pub(crate) starts: Starts,
}

/// Why a field couldn't be read.
enum Fault {
    /// Of the slot.
    Overflow(Overflow),
    /// It isn't what it should be: why, and what kind of error that is.
    Value(ErrorKind, String),
    LoneReturn(LoneReturn),
}

impl From<Overflow> for Fault {
    fn from(overflow: Overflow) -> Fault {
        Fault::Overflow(overflow)
    }
}

impl From<LoneReturn> for Fault {
    fn from(found: LoneReturn) -> Fault {
        Fault::LoneReturn(found)
    }
}

/// Writes an element to a cell.
macro_rules! put {
    ($out:expr, $target:expr, $cell:expr, $value:expr) => {{
        let cells = $out.cells()?;
        cells.put($cell, $value)?;
        match $target.mask {
            Some(mask) => {
                cells.put(mask, 1u8)?;
                cells.written(2);
            }
            None => cells.written(1),
        }
        Ok(())
    }};
}

impl Rows {
    /// The rows from `at` on, at which a row or something else starts.
    pub(crate) fn next(&self, at: usize) -> Next {
        self.lines.next(&self.data, at)
    }

    fn fields(&self, at: usize) -> Fields<'_> {
        Fields::new(&self.lines, &self.data, at)
    }

    /// Where the next row starts, which is there.
    #[inline(always)]
    fn start_of_next(&self, at: usize, record: u32) -> Result<usize> {
        let start = match self.lines.fields {
            None => self.lines.past_others(&self.data, at),
            Some(_) => match self.next(at) {
                Next::Row { start, .. } => start,
                Next::Open { start } => start,
                Next::End => self.data.len(),
            },
        };
        if start < self.data.len() {
            Ok(start)
        } else {
            Err(self.fewer(record))
        }
    }

    #[cold]
    fn fewer(&self, record: u32) -> Error {
        let reason = format!(
            "the stretch has {record} rows, and had {} when the file was indexed: the file changed",
            self.rows
        );
        Error::new(ErrorKind::Storage, reason)
    }

    /// Parses the row at `start` into a slot. Returns where it ends.
    #[inline]
    fn row(&self, start: usize, pick: Pick, out: &mut Sink<'_>) -> Result<usize> {
        out.begin_row(pick.slot)?;
        let mut fields = self.fields(start);
        let program = &*self.program;
        let last = program.fields.len().wrapping_sub(1);
        for (number, targets) in program.fields.iter().enumerate() {
            let at = fields.at;
            let read = match program.targets.get(targets.clone()).unwrap_or_default() {
                [] => fields.skip().map_err(Fault::from),
                [target] => self.field(&mut fields, target, out),
                several => self.several(&mut fields, several, out),
            };
            let ended = read.map_err(|fault| self.fault(fault, at, number, pick.record))?;
            if (ended == Ended::Row) != (number == last) {
                return Err(self.ragged(start, pick.record));
            }
        }
        out.end_row()?;
        Ok(fields.at)
    }

    /// A field that several features read.
    #[cold]
    fn several(&self, fields: &mut Fields<'_>, targets: &[Target], out: &mut Sink<'_>) -> Result<Ended, Fault> {
        let at = fields.at;
        let mut ended = Ended::Row;
        for target in targets {
            fields.at = at;
            ended = self.field(fields, target, out)?;
        }
        Ok(ended)
    }

    #[inline(always)]
    fn field(&self, fields: &mut Fields<'_>, target: &Target, out: &mut Sink<'_>) -> Result<Ended, Fault> {
        match target.to {
            _ if target.lookup.is_some() => self.unusual(fields, target, out),
            To::Element(DType::F32, cell) => match self.usual_float::<f32>(fields) {
                Some((value, ended)) => put!(out, target, cell, value).map(|()| ended),
                None => self.unusual(fields, target, out),
            },
            To::Element(DType::F64, cell) => match self.usual_float::<f64>(fields) {
                Some((value, ended)) => put!(out, target, cell, value).map(|()| ended),
                None => self.unusual(fields, target, out),
            },
            To::Element(DType::I64, cell) => match self.usual_integer(fields) {
                Some((value, ended)) => put!(out, target, cell, value).map(|()| ended),
                None => self.unusual(fields, target, out),
            },
            _ => self.unusual(fields, target, out),
        }
    }

    /// A float that stands where the field starts, and fills it.
    #[inline(always)]
    fn usual_float<T>(&self, fields: &mut Fields<'_>) -> Option<(T, Ended)>
    where
        T: Short,
    {
        let bytes = fields.bytes.get(fields.at..)?;
        if !begins_number(*bytes.first()?, self.reading.decimal) || self.reading.numeric_nulls {
            return None;
        }
        if let Some((value, n)) = short_float::<T>(bytes, self.reading.decimal)
            && let Some(ended) = fields.ended(fields.at + n)
        {
            return Some((value, ended));
        }
        let (value, n) = float::<T>(bytes, self.reading.decimal)?;
        Some((value, fields.ended(fields.at + n)?))
    }

    #[inline(always)]
    fn usual_integer(&self, fields: &mut Fields<'_>) -> Option<(i64, Ended)> {
        if self.reading.numeric_nulls {
            return None;
        }
        let (value, n) = integer(fields.bytes.get(fields.at..)?)?;
        let value = i64::try_from(value).ok()?;
        Some((value, fields.ended(fields.at + n)?))
    }

    /// A field that is found first, and then looked at.
    #[inline(never)]
    fn unusual(&self, fields: &mut Fields<'_>, target: &Target, out: &mut Sink<'_>) -> Result<Ended, Fault> {
        let (text, ended) = fields.next()?;
        match target.to {
            To::Text { utf8, parts } => {
                // Text that says "NA" says so, unless something else was asked for.
                let null = target.null != Null::Error && self.reading.dialect.is_null(&text);
                let text = match &target.null {
                    Null::Fill(fill) if null => fill,
                    Null::Mask if null => &[][..],
                    _ => &*text,
                };
                if utf8 && simdutf8::basic::from_utf8(text).is_err() {
                    let reason = format!("{} isn't UTF-8: read bytes, or convert the file", quoted(text));
                    return Err(Fault::Value(ErrorKind::Malformed, reason));
                }
                out.writer(parts.lengths as usize).push(text.len() as i64)?;
                out.writer(parts.bytes as usize).extend(text)?;
                if let Some(mask) = target.mask {
                    let cells = out.cells()?;
                    cells.put(mask, u8::from(!null))?;
                    cells.written(1);
                }
            }
            To::Element(dtype, cell) => self.element(&text, dtype, cell, target, out)?,
        }
        Ok(ended)
    }

    fn element(&self, text: &[u8], dtype: DType, cell: u32, target: &Target, out: &mut Sink<'_>) -> Result<(), Fault> {
        if let Some(lookup) = &target.lookup {
            return self.index_of(text, lookup, dtype, cell, target, out);
        }
        let trimmed = text.trim_ascii();
        if self.reading.dialect.is_null(text) || self.reading.dialect.is_null(trimmed) {
            return self.null(text, dtype, cell, target, out);
        }
        let misfit = || {
            let reason = format!("{} is no {}", quoted(text), what(dtype));
            Fault::Value(ErrorKind::ValueRange, reason)
        };
        macro_rules! integer {
            ($t:ty) => {{
                let found = integer(trimmed).filter(|&(_, n)| n == trimmed.len());
                let value = <$t>::try_from(found.ok_or_else(misfit)?.0).map_err(|_| {
                    let reason = format!("{} doesn't fit {dtype}", quoted(text));
                    Fault::Value(ErrorKind::ValueRange, reason)
                })?;
                put!(out, target, cell, value)
            }};
        }
        macro_rules! float {
            ($t:ty) => {{
                let found = float::<$t>(trimmed, self.reading.decimal).filter(|&(_, n)| n == trimmed.len());
                found.ok_or_else(misfit)?.0
            }};
        }
        match dtype {
            DType::Bool => put!(out, target, cell, u8::from(boolean(trimmed).ok_or_else(misfit)?)),
            DType::I8 => integer!(i8),
            DType::I16 => integer!(i16),
            DType::I32 => integer!(i32),
            DType::I64 => integer!(i64),
            DType::U8 => integer!(u8),
            DType::U16 => integer!(u16),
            DType::U32 => integer!(u32),
            DType::U64 => integer!(u64),
            DType::F16 => put!(out, target, cell, f16::from_f64(float!(f64)).to_bits()),
            DType::F32 => put!(out, target, cell, float!(f32)),
            DType::F64 => put!(out, target, cell, float!(f64)),
            DType::Datetime(unit) => put!(out, target, cell, time(trimmed, unit).ok_or_else(misfit)?),
            DType::Timedelta(_) => Err(misfit()),
        }
    }

    /// Text that becomes an index.
    fn index_of(
        &self,
        text: &[u8],
        lookup: &Lookup,
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), Fault> {
        // As with text: "NA" is a key, unless something else was asked for.
        if target.null != Null::Error && self.reading.dialect.is_null(text) {
            return self.null(text, dtype, cell, target, out);
        }
        let found = lookup.find_one(Key { text, term: None });
        if found == UNKNOWN {
            let reason = format!(
                "expected a key of the vocabulary, found the key {}; unknown=\"bucket\" gives such keys an index",
                quoted(text)
            );
            return Err(Fault::Value(ErrorKind::ValueRange, reason));
        }
        let misfit = || Fault::Value(ErrorKind::ValueRange, format!("the index {found} doesn't fit {dtype}"));
        macro_rules! integer {
            ($t:ty) => {
                put!(out, target, cell, <$t>::try_from(found).map_err(|_| misfit())?)
            };
        }
        match dtype {
            DType::I8 => integer!(i8),
            DType::I16 => integer!(i16),
            DType::I32 => integer!(i32),
            DType::I64 => integer!(i64),
            DType::U8 => integer!(u8),
            DType::U16 => integer!(u16),
            DType::U32 => integer!(u32),
            DType::U64 => integer!(u64),
            _ => Err(misfit()),
        }
    }

    /// A field that stands for no value.
    fn null(&self, text: &[u8], dtype: DType, cell: u32, target: &Target, out: &mut Sink<'_>) -> Result<(), Fault> {
        let zeros = [0; 8];
        let (bytes, valid) = match &target.null {
            Null::Error => {
                let what = if text.is_empty() {
                    "the field is empty".into()
                } else {
                    format!("{} stands for no value", quoted(text))
                };
                let reason = format!("{what}: give nulls=\"mask\", or a fill value");
                return Err(Fault::Value(ErrorKind::Null, reason));
            }
            Null::Mask => (&zeros[..dtype.size()], 0u8),
            Null::Fill(fill) => (&fill[..], 1),
        };
        let cells = out.cells()?;
        match *bytes {
            [a] => cells.put(cell, a)?,
            [a, b] => cells.put(cell, u16::from_le_bytes([a, b]))?,
            [a, b, c, d] => cells.put(cell, u32::from_le_bytes([a, b, c, d]))?,
            [a, b, c, d, e, f, g, h] => cells.put(cell, u64::from_le_bytes([a, b, c, d, e, f, g, h]))?,
            _ => return Err(Overflow::Row.into()),
        }
        if let Some(mask) = target.mask {
            cells.put(mask, valid)?;
        }
        cells.written(1 + usize::from(target.mask.is_some()));
        Ok(())
    }

    /// The error for a field that starts at `at`.
    #[cold]
    fn fault(&self, fault: Fault, at: usize, number: usize, record: u32) -> Error {
        let error = match fault {
            Fault::Overflow(overflow) => overflow.into(),
            Fault::Value(kind, reason) => Error::new(kind, reason).at_offset(self.offset + at as u64),
            Fault::LoneReturn(LoneReturn(at)) => lone_return(LoneReturn(self.offset as usize + at)),
        };
        error.at_record(record.into()).at_feature(&self.program.names[number])
    }

    /// The error for a row with more or fewer fields than the file has columns, or with a lone return in one.
    #[cold]
    fn ragged(&self, start: usize, record: u32) -> Error {
        let mut fields = self.fields(start);
        let mut count = 0u64;
        let error = loop {
            count += 1;
            match fields.skip() {
                Ok(Ended::Row) => {
                    let reason = format!(
                        "the row has {count} fields, and the file {} columns: on_ragged=\"skip\" passes over such rows",
                        self.program.fields.len()
                    );
                    break Error::new(ErrorKind::Malformed, reason).at_offset(self.offset + start as u64);
                }
                Ok(Ended::Field) => {}
                Err(LoneReturn(at)) => break lone_return(LoneReturn(self.offset as usize + at)),
            }
        };
        error.at_record(record.into())
    }

    /// The text of each field of the first rows, until there are no more, or a row is damaged.
    pub(crate) fn texts(&self, rows: u32, mut each: impl FnMut(usize, Cow<'_, [u8]>)) {
        let mut at = 0;
        for _ in 0..rows.min(self.rows) {
            let Next::Row { start, end } = self.next(at) else {
                return;
            };
            let mut fields = self.fields(start);
            for number in 0.. {
                let Ok((text, ended)) = fields.next() else { return };
                each(number, text);
                if ended == Ended::Row {
                    break;
                }
            }
            at = end;
        }
    }

    /// Parses rows whose starts are known.
    pub(crate) fn pick(&self, record: u32, slot: u32, out: &mut Sink<'_>) -> Result<()> {
        let start = self
            .starts
            .get(record as usize)
            .map_or(self.data.len(), |&start| start as usize);
        if start >= self.data.len() {
            return Err(self.fewer(record));
        }
        self.row(start, Pick { record, slot }, out).map(drop)
    }
}

/// The slots of the picks, if each is behind the one before.
fn consecutive(picks: &[Pick]) -> Option<Range<u32>> {
    let first = picks.first()?.slot;
    let end = first.checked_add(u32::try_from(picks.len()).ok()?)?;
    let ascend = picks.iter().zip(first..).all(|(pick, slot)| pick.slot == slot);
    ascend.then_some(first..end)
}

fn quoted(text: &[u8]) -> String {
    let more = if text.len() > QUOTED { " …" } else { "" };
    format!("{:?}{more}", String::from_utf8_lossy(&text[..text.len().min(QUOTED)]))
}

fn what(dtype: DType) -> String {
    match dtype {
        DType::Datetime(_) => format!("date or time that {dtype} has (2024-02-29, 2024-02-29T12:30:00.5Z)"),
        DType::Bool => "bool (true, false, 1, 0)".to_owned(),
        _ => dtype.to_string(),
    }
}

impl Unit for Rows {
    fn rows(&self) -> u32 {
        self.rows
    }

    fn held_bytes(&self) -> usize {
        self.data.capacity() + 4 * self.starts.len()
    }

    fn bytes(&self) -> usize {
        self.data.len()
    }

    fn place(&self, from: Mark, picks: &[Pick], out: &mut Sink<'_>) -> Result<Mark> {
        out.choose_cells(&self.reading.layout.cells)?;
        if let Some(slots) = consecutive(picks) {
            out.claim(slots)?;
        }
        let mut mark = from;
        for &pick in picks {
            if mark.record < pick.record {
                mark = self.advance(mark, pick.record)?;
            }
            let start = self.start_of_next(mark.byte as usize, pick.record)?;
            let end = self.row(start, pick, out)?;
            mark = Mark {
                record: pick.record + 1,
                byte: end as u64,
            };
        }
        if mark.record == self.rows && self.next(mark.byte as usize) != Next::End {
            return Err(self.fewer(self.rows + 1));
        }
        Ok(mark)
    }

    fn advance(&self, from: Mark, record: u32) -> Result<Mark> {
        let mut mark = from;
        while mark.record < record {
            match self.next(mark.byte as usize) {
                Next::Row { end, .. } => {
                    mark = Mark {
                        record: mark.record + 1,
                        byte: end as u64,
                    }
                }
                Next::Open { .. } | Next::End => return Err(self.fewer(mark.record)),
            }
        }
        Ok(mark)
    }

    fn index(&mut self, known: Option<Starts>) -> Result<Starts> {
        let fits = |starts: &Starts| {
            starts.len() == self.rows as usize + 1 && starts.last().is_some_and(|&end| end as usize == self.data.len())
        };
        if let Some(known) = known.filter(fits) {
            self.starts = known;
            return Ok(self.starts.clone());
        }
        let mut starts = try_with_capacity(self.rows as usize + 1, "where the rows of a stretch start")?;
        let mut at = 0;
        if self.lines.are_rows(&self.data) {
            // All newlines are found in one go.
            for end in memchr_iter(b'\n', &self.data) {
                // Not of an empty line or a comment.
                if starts.len() < self.rows as usize && self.lines.past_others(&self.data[..=end], at) == at {
                    starts.push(at as u32);
                }
                at = end + 1;
            }
        }
        loop {
            match self.next(at) {
                Next::Row { start, end } if starts.len() < self.rows as usize => {
                    // A stretch has less than 2^32 bytes.
                    starts.push(start as u32);
                    at = end;
                }
                Next::End if starts.len() == self.rows as usize => break,
                _ => return Err(self.fewer(starts.len() as u32)),
            }
        }
        starts.push(self.data.len() as u32);
        self.starts = Arc::new(starts);
        Ok(self.starts.clone())
    }

    fn recycle(&mut self, pool: &BufferPool) {
        pool.put(std::mem::take(&mut self.data));
    }
}
