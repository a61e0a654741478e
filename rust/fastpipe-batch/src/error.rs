//! Located errors: what went wrong, and in which file, unit, byte, record and feature.
//!
//! Boxed, so that `Result<(), Error>` stays one word; rendered late, so that the hot path never builds a `String`
//! unless it fails.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The class of an error. Each becomes one Python exception type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The bytes don't follow the file format.
    Malformed,
    /// A documented absolute limit is exceeded.
    Limit,
    /// The schema doesn't parse, or what was asked for doesn't fit it.
    Schema,
    /// Well-formed, but not supported.
    Unsupported,
    /// A length doesn't fit the shape that was asked for.
    Shape,
    /// A value doesn't fit the type that was asked for.
    ValueRange,
    /// A null where none was allowed.
    Null,
    /// A file that isn't there.
    NotFound,
    /// The storage failed.
    Storage,
    /// The system has no more memory.
    OutOfMemory,
    /// Code that isn't fastpipe's, and that a source calls, raised an error of its own: [`Error::cause`].
    Raised,
    /// The pass was closed while the call waited.
    Closed,
    /// A fault of fastpipe itself.
    Internal,
}

impl ErrorKind {
    /// Whether the data itself is at fault: reading the same again fails again, and reading other data may well not.
    pub const fn is_damage(self) -> bool {
        use ErrorKind::{Limit, Malformed, Null, Schema, Shape, Unsupported, ValueRange};
        matches!(
            self,
            Malformed | Limit | Schema | Unsupported | Shape | ValueRange | Null
        )
    }
}

/// Where an error was met. Unknown parts are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// The file, as [`path_text`](crate::path_text) has it.
    pub path: Option<Arc<str>>,
    /// The unit, in its source's words, where a file and a number don't say it.
    pub unit: Option<Arc<str>>,
    /// The unit's number within its file: a block's, where those are counted.
    pub block: Option<u64>,
    /// Byte offset in the file: of the fault itself where that is known, else of its unit.
    pub offset: Option<u64>,
    /// The record's number within its unit.
    pub record: Option<u64>,
    /// Byte position of the fault, and in what: in the words of whoever counted it.
    pub position: Option<(u64, &'static str)>,
    /// The feature, or the path of the field in the schema.
    pub feature: Option<Arc<str>>,
}

/// The lengths that an error of kind [`ErrorKind::Shape`] is about.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// An array's, in a dimension of which the shape has the number. The outermost dimension is 0.
    Dimension {
        /// The dimension.
        dimension: u32,
        /// Its number in the shape.
        expected: u64,
        /// Items up to where the array was given up.
        found: u64,
    },
    /// Those of two arrays of a sparse value, each named by its dimension, or by `None` for the values.
    Sparse {
        /// The first array of the record, and its entries.
        first: (Option<u32>, u64),
        /// The first array that differs, and its entries.
        other: (Option<u32>, u64),
    },
}

/// Bytes of a reason: files may make what is quoted as long as they like.
const MAX_REASON: usize = 1000;

/// Bytes of a feature's name in a message.
const MAX_FEATURE: usize = 300;

/// A text of more than `most` bytes without its middle.
fn shorten(text: &str, most: usize) -> Option<String> {
    (text.len() > most).then(|| {
        let (mut head, mut tail) = (most * 2 / 3, text.len() - most / 3);
        while !text.is_char_boundary(head) {
            head -= 1;
        }
        while !text.is_char_boundary(tail) {
            tail += 1;
        }
        format!("{} … {}", &text[..head], &text[tail..])
    })
}

/// An error with its location.
#[derive(Clone)]
pub struct Error(Box<Inner>);

#[derive(Clone)]
struct Inner {
    kind: ErrorKind,
    reason: String,
    location: Location,
    lengths: Option<Lengths>,
    os_error: Option<i32>,
    unit: Option<u64>,
    over_memory_limit: bool,
    cause: Option<Arc<dyn Any + Send + Sync>>,
}

impl Error {
    /// An error of `kind`; `reason` says what was expected and what was found. What a long one quotes is cut out of its
    /// middle.
    #[cold]
    pub fn new(kind: ErrorKind, reason: impl Into<String>) -> Self {
        let reason = reason.into();
        Error(Box::new(Inner {
            kind,
            reason: shorten(&reason, MAX_REASON).map_or(reason, Into::into),
            location: Location::default(),
            lengths: None,
            os_error: None,
            unit: None,
            over_memory_limit: false,
            cause: None,
        }))
    }

    /// An error of the storage below, from what the operating system said.
    #[cold]
    pub fn io(path: &str, error: &std::io::Error) -> Self {
        let kind = match error.kind() {
            std::io::ErrorKind::NotFound => ErrorKind::NotFound,
            std::io::ErrorKind::UnexpectedEof => ErrorKind::Malformed,
            _ => ErrorKind::Storage,
        };
        let mut e = Error::new(kind, error.to_string());
        e.0.os_error = error.raw_os_error();
        e.at_path(path)
    }

    /// The system refused an allocation of `bytes` bytes for `what`.
    #[cold]
    pub fn out_of_memory(bytes: usize, what: &str) -> Self {
        Error::new(
            ErrorKind::OutOfMemory,
            format!("out of memory: could not allocate {bytes} bytes for {what}"),
        )
    }

    /// More memory is needed than the user's limit allows.
    #[cold]
    pub fn over_memory_limit(reason: impl Into<String>) -> Self {
        let mut e = Error::new(ErrorKind::Limit, reason);
        e.0.over_memory_limit = true;
        e
    }

    /// Whether it was made by [`Error::over_memory_limit`].
    pub fn is_over_memory_limit(&self) -> bool {
        self.0.over_memory_limit
    }

    /// The class.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// What was expected and what was found, without the location.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Where it happened.
    pub fn location(&self) -> &Location {
        &self.0.location
    }

    /// The lengths that don't fit, where they are known.
    pub fn lengths(&self) -> Option<Lengths> {
        self.0.lengths
    }

    /// The operating system's number, for storage errors.
    pub fn os_error(&self) -> Option<i32> {
        self.0.os_error
    }

    /// The unit of the source that it was met in, where it is one unit's.
    pub fn unit(&self) -> Option<u64> {
        self.0.unit
    }

    /// What was raised by code that isn't fastpipe's, for whoever knows its type.
    pub fn cause(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.cause.as_deref()
    }

    /// Keeps what was raised.
    #[must_use]
    pub fn with_cause(mut self, cause: Arc<dyn Any + Send + Sync>) -> Self {
        self.0.cause = Some(cause);
        self
    }

    /// Names the unit in its source's words, unless it is named already.
    #[must_use]
    pub fn in_unit(mut self, name: &str) -> Self {
        self.0.location.unit.get_or_insert_with(|| Arc::from(name));
        self
    }

    /// Says which unit of the source it was met in.
    #[must_use]
    pub fn at_unit(mut self, unit: u64) -> Self {
        self.0.unit = Some(unit);
        self
    }

    /// Names the file, unless it is named already.
    #[must_use]
    pub fn at_path(mut self, path: &str) -> Self {
        self.0.location.path.get_or_insert_with(|| Arc::from(path));
        self
    }

    /// Names the unit by its number within its file, and the file offset of its start, unless they are named already.
    #[must_use]
    pub fn at_block(mut self, block: u64, offset: u64) -> Self {
        self.0.location.block.get_or_insert(block);
        self.0.location.offset.get_or_insert(offset);
        self
    }

    /// Names the byte offset in the file, unless it is named already.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        self.0.location.offset.get_or_insert(offset);
        self
    }

    /// Names the record, unless it is named already.
    #[must_use]
    pub fn at_record(mut self, record: u64) -> Self {
        self.0.location.record.get_or_insert(record);
        self
    }

    /// Names the record, in the place of any that is named.
    #[must_use]
    pub fn with_record(mut self, record: u64) -> Self {
        self.0.location.record = Some(record);
        self
    }

    /// Names no record: its number is none that users know.
    #[must_use]
    pub fn without_record(mut self) -> Self {
        self.0.location.record = None;
        self
    }

    /// Names the byte offset in the file, in the place of any that is named.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.0.location.offset = Some(offset);
        self
    }

    /// Names a message by its number and a byte of it, in the place of a record and of a position in anything else.
    #[must_use]
    pub fn in_message(mut self, number: u64, byte: u64) -> Self {
        let at = &mut self.0.location;
        (at.record, at.offset, at.position) = (Some(number), Some(byte), None);
        self
    }

    /// Names the byte position within something, `"decompressed block"` say, unless it is named already.
    #[must_use]
    pub fn at_position(mut self, position: u64, within: &'static str) -> Self {
        self.0.location.position.get_or_insert((position, within));
        self
    }

    /// Says that the byte offset, if one is named, is one within something, `"decompressed text"` say, and not of the
    /// file.
    #[must_use]
    pub fn with_offset_within(self, within: &'static str) -> Self {
        let mut moved = self;
        match moved.0.location.offset.take() {
            Some(offset) => moved.at_position(offset, within),
            None => moved,
        }
    }

    /// Says which lengths don't fit.
    #[must_use]
    pub fn with_lengths(mut self, lengths: Lengths) -> Self {
        self.0.lengths = Some(lengths);
        self
    }

    /// Names the feature, unless it is named already.
    #[must_use]
    pub fn at_feature(mut self, feature: &str) -> Self {
        self.0.location.feature.get_or_insert_with(|| Arc::from(feature));
        self
    }
}

impl fmt::Display for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let at = &self.0.location;
        if let Some(feature) = &at.feature {
            let short = shorten(feature, MAX_FEATURE);
            write!(f, "feature '{}': ", short.as_deref().unwrap_or(feature))?;
        }
        write!(f, "{}{at}", self.0.reason)
    }
}

/// The parts that are known, but the feature, in parentheses that follow a reason: ` (file a.avro, block 2)`.
impl fmt::Display for Location {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut separator = " (";
        let mut part = |f: &mut fmt::Formatter<'_>, label: &str, value: &dyn fmt::Display| {
            let r = write!(f, "{separator}{label} {value}");
            separator = ", ";
            r
        };
        if let Some(path) = &self.path {
            part(f, "file", &crate::paths::shown_path(path))?;
        }
        if let Some(unit) = &self.unit {
            part(f, "unit", &shorten(unit, MAX_FEATURE).as_deref().unwrap_or(unit))?;
        }
        if let Some(block) = self.block {
            part(f, "block", &block)?;
        }
        if let Some(offset) = self.offset {
            part(f, "byte offset", &offset)?;
        }
        if let Some(record) = self.record {
            part(f, "record", &record)?;
        }
        if let Some((position, within)) = self.position {
            part(f, &format!("byte of the {within}"), &position)?;
        }
        if separator == ", " { f.write_str(")") } else { Ok(()) }
    }
}

impl fmt::Debug for Error {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Error({:?}: {self})", self.0.kind)
    }
}

impl std::error::Error for Error {}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn renders_every_part_once() {
        let e = Error::new(ErrorKind::Shape, "expected 3 items, found 4")
            .at_feature("x")
            .at_record(7)
            .at_position(21, "opened unit")
            .at_block(2, 500)
            .at_path("a.avro")
            .at_path("never.avro");
        assert_eq!(
            e.to_string(),
            "feature 'x': expected 3 items, found 4 (file a.avro, block 2, byte offset 500, record 7, \
             byte of the opened unit 21)"
        );
        let moved = Error::new(ErrorKind::Null, "none").at_offset(9);
        let moved = moved.with_offset_within("text").to_string();
        assert_eq!(moved, "none (byte of the text 9)");
        assert_eq!(Error::new(ErrorKind::Limit, "too much").to_string(), "too much");
        assert_eq!(
            e.location().to_string(),
            e.to_string()["feature 'x': expected 3 items, found 4".len()..]
        );
        assert_eq!(Location::default().to_string(), "");
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
    }

    #[test]
    fn is_short_whatever_it_quotes() {
        for quoted in ["x".repeat(100_000), "ä€😀".repeat(100_000)] {
            for shift in ["", "y", "yy", "yyy"] {
                let e = Error::new(ErrorKind::Schema, format!("found '{shift}{quoted}'; write it again"))
                    .at_feature(&quoted);
                assert!(e.reason().len() < MAX_REASON + 10 && e.to_string().len() < MAX_REASON + MAX_FEATURE + 50);
                assert!(e.reason().starts_with("found '") && e.reason().ends_with("'; write it again"));
                assert_eq!(e.location().feature.as_deref(), Some(&*quoted));
            }
        }
        let whole = "x".repeat(MAX_REASON);
        assert_eq!(Error::new(ErrorKind::Schema, &*whole).reason(), whole);
    }
}
