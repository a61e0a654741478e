//! Infers the types of columns from a sample of rows.

use std::any::Any;
use std::collections::HashMap;
use std::sync::Arc;

use fastpipe_batch::{DType, Error, ErrorKind, Feature, Leaf, Nulls, Request, Result, Scalar, TimeUnit, Unit};

use crate::dialect::Dialect;
use crate::header::Header;
use crate::nulls::FirstNulls;
use crate::unit::Rows;
use crate::values::{boolean, float, integer, unit_of};

/// The types that are still possible for the values of a column, given the values seen so far.
#[derive(Clone, Copy, Debug)]
struct Seen {
    values: u64,
    nulls: u64,
    signed: bool,
    unsigned: bool,
    float: bool,
    /// Whether all numbers are written without decimal places and exponents.
    whole: bool,
    boolean: bool,
    /// The finest unit of the times seen so far.
    time: Option<TimeUnit>,
    all_times: bool,
}

impl Seen {
    const NOTHING: Seen = Seen {
        values: 0,
        nulls: 0,
        signed: true,
        unsigned: true,
        float: true,
        whole: true,
        boolean: true,
        time: None,
        all_times: true,
    };

    fn see(&mut self, text: &[u8], dialect: &Dialect) {
        let trimmed = text.trim_ascii();
        if dialect.stands_for_null(text) {
            self.nulls += 1;
            return;
        }
        self.values += 1;
        let digits = trimmed
            .strip_prefix(b"-")
            .or(trimmed.strip_prefix(b"+"))
            .unwrap_or(trimmed);
        // Leading zeros are significant in postal codes, phone numbers and similar values, so they aren't read as
        // numbers.
        let padded = matches!(digits, [b'0', b'0'..=b'9', ..]);
        if self.signed || self.unsigned {
            let whole = integer(trimmed)
                .filter(|&(_, n)| n == trimmed.len() && !padded)
                .map(|(value, _)| value);
            self.signed &= whole.is_some_and(|value| i64::try_from(value).is_ok());
            self.unsigned &= whole.is_some_and(|value| u64::try_from(value).is_ok());
        }
        if self.float {
            let whole = digits.iter().all(u8::is_ascii_digit);
            let found = float::<f64>(trimmed, dialect.decimal).filter(|&(_, n)| n == trimmed.len() && !padded);
            self.float = found.is_some_and(|(value, _)| !whole || keeps(value, digits));
            self.whole &= whole;
        }
        self.boolean &= trimmed.len() > 1 && boolean(trimmed).is_some();
        if self.all_times {
            match (unit_of(trimmed), self.time) {
                (None, _) => self.all_times = false,
                (Some(found), Some(before)) => self.time = Some(finer(found, before)),
                (found, None) => self.time = found,
            }
        }
    }

    /// Returns the type of all values and the handling of nulls. Types that can represent a null (as NaN or NaT) always
    /// read nulls as that value.
    fn leaf(&self) -> (Leaf, Nulls) {
        let mask = if self.nulls > 0 { Nulls::Mask } else { Nulls::Error };
        let fixed = |dtype| (Leaf::Fixed(dtype), mask.clone());
        let float = (Leaf::Fixed(DType::F64), Nulls::Fill(Some(Scalar::Float(f64::NAN))));
        match self {
            // Text is never null unless the user requests it.
            Seen {
                values: 0, nulls: 0, ..
            } => (Leaf::Bytes { utf8: true }, Nulls::Error),
            Seen { values: 0, .. } => float,
            Seen { boolean: true, .. } => fixed(DType::Bool),
            Seen { signed: true, .. } => fixed(DType::I64),
            Seen { unsigned: true, .. } => fixed(DType::U64),
            // Integers that don't fit 64 bits would be rounded.
            Seen {
                float: true,
                whole: false,
                ..
            } => float,
            Seen {
                all_times: true,
                time: Some(unit),
                ..
            } => (Leaf::Fixed(DType::Datetime(*unit)), Nulls::Fill(None)),
            _ => (Leaf::Bytes { utf8: true }, Nulls::Error),
        }
    }
}

/// Whether a float keeps all digits of the integer from which it was parsed.
fn keeps(value: f64, digits: &[u8]) -> bool {
    // A double has 53 bits, enough for any 15 digits.
    digits.len() <= 15 || value.abs().to_string().as_bytes() == digits
}

fn finer(a: TimeUnit, b: TimeUnit) -> TimeUnit {
    let rank = |unit| match unit {
        TimeUnit::Days => 0,
        TimeUnit::Seconds => 1,
        TimeUnit::Milliseconds => 2,
        TimeUnit::Microseconds => 3,
        TimeUnit::Nanoseconds => 4,
    };
    if rank(a) > rank(b) { a } else { b }
}

/// The inferred types of columns, based on the rows observed so far.
pub struct Evidence<'d> {
    dialect: &'d Dialect,
    columns: Vec<Arc<str>>,
    numbers: HashMap<Arc<str>, usize>,
    seen: Vec<Seen>,
}

/// Starts to infer the types of all columns of a file, or of the given ones.
///
/// # Errors
/// [`ErrorKind::Schema`] if a requested column doesn't exist or if two columns have the same name.
pub fn inferring<'d>(dialect: &'d Dialect, header: &Header, wanted: Option<&[String]>) -> Result<Evidence<'d>> {
    if let Some(name) = header
        .twice()
        .filter(|name| wanted.is_none_or(|wanted| wanted.contains(&name.to_string())))
    {
        let reason = format!("two columns are called {name:?}: pass all names with header=[...]");
        return Err(Error::new(ErrorKind::Schema, reason));
    }
    let columns: Vec<Arc<str>> = match wanted {
        Some(wanted) => wanted.iter().map(|name| name.as_str().into()).collect(),
        None => header.names.clone(),
    };
    Ok(Evidence {
        dialect,
        numbers: columns.iter().cloned().zip(0..).collect(),
        seen: vec![Seen::NOTHING; columns.len()],
        columns,
    })
}

impl Evidence<'_> {
    /// Observes the first rows of a unit.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if the unit belongs to another source.
    pub fn observe(&mut self, unit: &dyn Unit, rows: u32) -> Result<()> {
        let Some(unit) = (unit as &dyn Any).downcast_ref::<Rows>() else {
            return Err(Error::new(ErrorKind::Internal, "a unit of another source was observed"));
        };
        let names = unit.program.names.iter();
        let numbers: Vec<Option<usize>> = names.map(|name| self.numbers.get(name).copied()).collect();
        unit.texts(rows, |field, text| {
            if let Some(&Some(number)) = numbers.get(field) {
                self.seen[number].see(&text, self.dialect);
            }
        });
        Ok(())
    }

    /// Adds the nulls that were found by a search of a whole file.
    pub fn add_nulls(&mut self, header: &Header, nulls: &FirstNulls) {
        for (name, _) in header.names.iter().zip(nulls).filter(|(_, first)| first.is_some()) {
            if let Some(&number) = self.numbers.get(name) {
                self.seen[number].nulls += 1;
            }
        }
    }

    /// Returns the inferred features.
    pub fn features(&self) -> Vec<Feature> {
        let feature = |(name, seen): (&Arc<str>, &Seen)| {
            let (leaf, nulls) = seen.leaf();
            Feature {
                name: name.to_string(),
                field: name.to_string(),
                request: Request::Dense {
                    shape: Vec::new(),
                    leaf,
                    pad: None,
                },
                nulls,
                counts: false,
                encoded: false,
                scale: None,
                lookup: None,
            }
        };
        self.columns.iter().zip(&self.seen).map(feature).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn leaf(texts: &[&str]) -> (String, Nulls) {
        let dialect = Dialect {
            null_values: vec![Vec::new(), b"NA".to_vec()],
            ..Dialect::default()
        };
        let mut seen = Seen::NOTHING;
        texts.iter().for_each(|text| seen.see(text.as_bytes(), &dialect));
        let (leaf, nulls) = seen.leaf();
        (leaf.to_string(), nulls)
    }

    #[test]
    fn the_narrowest_type_that_fits_all_values_is_inferred() {
        let cases: [(&[&str], &str); 22] = [
            (&["1", " -2"], "int64"),
            (&["1", "18446744073709551615"], "uint64"),
            (&["-1", "18446744073709551615"], "string"),
            (&["1", "18446744073709551616"], "string"),
            (&["100000000000000000000"], "string"),
            (&["1.5", "9007199254740992"], "float64"),
            (&["1.5", "-123456789012345680000"], "float64"),
            (&["1.5", "9007199254740993"], "string"),
            (&["1", "01234"], "string"),
            (&["-00"], "string"),
            (&["1.5", "+01.5"], "string"),
            (&["0", "0.5", "-0"], "float64"),
            (&["1", "2.5"], "float64"),
            (&["1e3", "inf"], "float64"),
            (&["true", "False"], "bool"),
            (&["0", "1"], "int64"),
            (&["2024-01-01"], "datetime64[D]"),
            (&["2024-01-01", "2024-01-01 10:00:00"], "datetime64[us]"),
            (&["2024-01-01 10:00:00.123456789"], "datetime64[ns]"),
            (&["1", "x"], "string"),
            (&["", ""], "float64"),
            (&[], "string"),
        ];
        for (texts, expected) in cases {
            assert_eq!(leaf(texts).0, expected, "{texts:?}");
        }
    }

    #[test]
    fn nulls_are_masked_if_the_type_has_no_null() {
        assert_eq!(leaf(&["1"]).1, Nulls::Error);
        assert_eq!(leaf(&["1", "NA"]).1, Nulls::Mask);
        assert_eq!(leaf(&["2024-01-01", ""]).1, Nulls::Fill(None));
        assert_eq!(leaf(&["2024-01-01"]).1, Nulls::Fill(None));
        assert!(matches!(leaf(&["1.5"]).1, Nulls::Fill(Some(Scalar::Float(fill))) if fill.is_nan()));
        assert_eq!(leaf(&["a", ""]).1, Nulls::Error);
    }
}
