//! Writes the values of fields to their slots.
//!
//! A number is parsed from the start of its field before the end of the field is known. Only if the number doesn't fill
//! the field, the end of the field is searched for and the whole field is parsed.

use fastpipe_batch::{DType, ErrorKind, Key, Lookup, Overflow, Sink, TimeUnit, UNKNOWN};
use half::f16;

use crate::dialect::begins_number;
use crate::field_error::FieldError;
use crate::fields::{Ended, Fields};
use crate::plan::{Null, Target, To};
use crate::unit::Rows;
use crate::values::{Short, boolean, float, in_unit, integer, is_kept, short_float, short_integer, short_time, time};

/// Maximum number of bytes of a field in an error message.
const QUOTED: usize = 80;

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
    /// Parses a field that several features read.
    #[cold]
    pub(crate) fn several(
        &self,
        fields: &mut Fields<'_>,
        targets: &[Target],
        out: &mut Sink<'_>,
    ) -> Result<Ended, FieldError> {
        let at = fields.at;
        let mut ended = Ended::Row;
        for target in targets {
            fields.at = at;
            ended = self.field(fields, target, out)?;
        }
        Ok(ended)
    }

    #[inline(always)]
    pub(crate) fn field(
        &self,
        fields: &mut Fields<'_>,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<Ended, FieldError> {
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
            To::Element(DType::Datetime(unit), cell) => match self.usual_time(fields, unit) {
                Some((value, ended)) => put!(out, target, cell, value).map(|()| ended),
                None => self.unusual(fields, target, out),
            },
            To::Text { parts, .. } if target.mask.is_none() && matches!(target.null, Null::Error) => {
                match fields.short_text() {
                    Some((text, n, ended)) => {
                        out.writer(parts.lengths as usize).push(n as i64)?;
                        out.writer(parts.bytes as usize).extend_loosely(text, n)?;
                        Ok(ended)
                    }
                    None => self.unusual(fields, target, out),
                }
            }
            _ => self.unusual(fields, target, out),
        }
    }

    /// Parses a float that fills the whole field.
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
        if self.reading.lossless && value.is_large() {
            return None;
        }
        Some((value, fields.ended(fields.at + n)?))
    }

    #[inline(always)]
    fn usual_integer(&self, fields: &mut Fields<'_>) -> Option<(i64, Ended)> {
        if self.reading.numeric_nulls {
            return None;
        }
        let bytes = fields.bytes.get(fields.at..)?;
        if let Some((value, n)) = short_integer(bytes)
            && let Some(ended) = fields.ended(fields.at + n)
        {
            return Some((value, ended));
        }
        let (value, n) = integer(bytes)?;
        let value = i64::try_from(value).ok()?;
        Some((value, fields.ended(fields.at + n)?))
    }

    #[inline(always)]
    fn usual_time(&self, fields: &mut Fields<'_>, unit: TimeUnit) -> Option<(i64, Ended)> {
        if self.reading.numeric_nulls {
            return None;
        }
        let (seconds, n) = short_time(fields.bytes.get(fields.at..)?)?;
        let value = in_unit(seconds, 0, unit)?;
        Some((value, fields.ended(fields.at + n)?))
    }

    /// Finds the end of the field first and then parses it.
    #[inline(never)]
    fn unusual(&self, fields: &mut Fields<'_>, target: &Target, out: &mut Sink<'_>) -> Result<Ended, FieldError> {
        let (text, ended) = fields.next()?;
        match target.to {
            To::Text { utf8, parts } => {
                // Text such as "NA" is kept as text, unless the user requested nulls.
                let null = target.null != Null::Error && self.reading.dialect.is_null(&text);
                let text = match &target.null {
                    Null::Fill(fill) if null => fill,
                    Null::Mask if null => &[][..],
                    _ => &*text,
                };
                if utf8 && simdutf8::basic::from_utf8(text).is_err() {
                    let reason = format!(
                        "{} isn't UTF-8: read the column as bytes, or convert the file",
                        quoted(text)
                    );
                    return Err(FieldError::Value(ErrorKind::Malformed, reason));
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

    fn element(
        &self,
        text: &[u8],
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), FieldError> {
        if let Some(lookup) = &target.lookup {
            return match lookup.buckets() {
                Some(buckets) => self.bucket_of(text, buckets, dtype, cell, target, out),
                None => self.index_of(text, lookup, dtype, cell, target, out),
            };
        }
        let trimmed = text.trim_ascii();
        if self.reading.dialect.stands_for_null(text) {
            return self.null(text, dtype, cell, target, out);
        }
        let misfit = || {
            let reason = format!(
                "cannot parse {} as {}: {}",
                quoted(text),
                what(dtype),
                self.as_text(target)
            );
            FieldError::Value(ErrorKind::ValueRange, reason)
        };
        macro_rules! integer {
            ($t:ty) => {{
                let found = integer(trimmed).filter(|&(_, n)| n == trimmed.len());
                let value = <$t>::try_from(found.ok_or_else(misfit)?.0).map_err(|_| {
                    let reason = format!("{} doesn't fit {dtype}: {}", quoted(text), self.as_text(target));
                    FieldError::Value(ErrorKind::ValueRange, reason)
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
        let kept = |value: f64| {
            if self.reading.lossless && !is_kept(trimmed, value) {
                return Err(FieldError::Value(
                    ErrorKind::ValueRange,
                    rounded(trimmed, dtype, self.reading.decimal),
                ));
            }
            Ok(())
        };
        macro_rules! kept {
            ($value:expr) => {{
                let value = $value;
                kept(value.into())?;
                value
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
            DType::F16 => put!(out, target, cell, kept!(f16::from_f64(float!(f64))).to_bits()),
            DType::F32 => put!(out, target, cell, kept!(float!(f32))),
            DType::F64 => put!(out, target, cell, kept!(float!(f64))),
            DType::Datetime(unit) => put!(out, target, cell, time(trimmed, unit).ok_or_else(misfit)?),
            DType::Timedelta(_) => Err(misfit()),
        }
    }

    /// Converts text to an index.
    fn index_of(
        &self,
        text: &[u8],
        lookup: &Lookup,
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), FieldError> {
        // As for text, "NA" is a key unless the user requested nulls.
        if target.null != Null::Error && self.reading.dialect.is_null(text) {
            return self.null(text, dtype, cell, target, out);
        }
        let found = lookup.find_one(Key { text, term: None });
        if found == UNKNOWN {
            let reason = format!(
                "expected a key of the vocabulary, found the key {}; on_unknown=\"bucket\" gives such keys an index",
                quoted(text)
            );
            return Err(FieldError::Value(ErrorKind::ValueRange, reason));
        }
        self.index(found, dtype, cell, target, out)
    }

    /// Writes an index.
    pub(crate) fn index(
        &self,
        found: i64,
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), FieldError> {
        let misfit = || FieldError::Value(ErrorKind::ValueRange, format!("the index {found} doesn't fit {dtype}"));
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

    /// Returns a hint for reading fields that don't have the feature's type.
    #[cold]
    fn as_text(&self, target: &Target) -> String {
        format!("{} reads it as text", self.spec_instead(target, "\"string\""))
    }

    /// Returns the code that gives a feature another spec.
    #[cold]
    fn spec_instead(&self, target: &Target, spec: &str) -> String {
        let layout = &self.reading.layout;
        let (name, field) = (&*layout.specs[target.column].name, &*layout.fields[target.column]);
        let field = if field == name {
            String::new()
        } else {
            format!(", field={field:?}")
        };
        format!("features={{**reader.features, {name:?}: fastpipe.DenseSpec((), {spec}{field})}}")
    }

    /// Handles a null field as the spec requires: returns an error, masks it or fills it.
    pub(crate) fn null(
        &self,
        text: &[u8],
        dtype: DType,
        cell: u32,
        target: &Target,
        out: &mut Sink<'_>,
    ) -> Result<(), FieldError> {
        let zeros = [0; 8];
        let (bytes, valid) = match &target.null {
            Null::Error => {
                let what = if text.is_empty() {
                    "the field is empty".into()
                } else {
                    format!("{} represents a null", quoted(text))
                };
                let masked = match &target.lookup {
                    Some(_) => "on_null=\"mask\" in its spec".into(),
                    None => self.spec_instead(target, &format!("\"{dtype}\", on_null=\"mask\"")),
                };
                let reason = format!("{what}: {masked} masks nulls, and fill= instead of on_null= replaces them");
                return Err(FieldError::Value(ErrorKind::Null, reason));
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
}

pub(crate) fn quoted(text: &[u8]) -> String {
    let more = if text.len() > QUOTED { " …" } else { "" };
    format!("{:?}{more}", String::from_utf8_lossy(&text[..text.len().min(QUOTED)]))
}

/// Returns the error for a number that a float can't keep, with a type that can.
#[cold]
fn rounded(number: &[u8], dtype: DType, decimal: u8) -> String {
    let double = float::<f64>(number, decimal).is_some_and(|(value, _)| is_kept(number, value));
    let whole = integer(number)
        .filter(|&(_, n)| n == number.len())
        .map(|(value, _)| value);
    let remedy = if double {
        "pass dtype=\"float64\""
    } else if whole.is_some_and(|value| i64::try_from(value).is_ok()) {
        "pass dtype=\"int64\""
    } else if whole.is_some_and(|value| u64::try_from(value).is_ok()) {
        "pass dtype=\"uint64\""
    } else {
        "leave the column out with columns=, or draw it as text with read_csv and sample"
    };
    format!(
        "{} is not exact as {dtype} and would be rounded: {remedy}",
        quoted(number)
    )
}

fn what(dtype: DType) -> String {
    match dtype {
        DType::Datetime(_) => format!("a date or time of type {dtype} (2024-02-29, 2024-02-29T12:30:00.5Z)"),
        DType::Bool => "bool (true, false, 1, 0)".to_owned(),
        _ => dtype.to_string(),
    }
}
