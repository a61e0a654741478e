//! Errors with a location: the reason, and the file, unit, byte, record and feature.
//!
//! An error is boxed so that `Result<(), Error>` is one word. Its text is rendered late, so the hot path builds no
//! `String` unless an error occurs.

use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The class of an error. Each class is raised as one Python exception type.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ErrorKind {
    /// The bytes don't follow the file format.
    Malformed,
    /// A documented absolute limit is exceeded.
    Limit,
    /// The schema can't be parsed, or the request doesn't fit it.
    Schema,
    /// The data is well-formed, but fastpipe doesn't support it.
    Unsupported,
    /// A length doesn't fit the requested shape.
    Shape,
    /// A value doesn't fit the requested type.
    ValueRange,
    /// A null where nulls aren't allowed.
    Null,
    /// A file doesn't exist.
    NotFound,
    /// The storage failed.
    Storage,
    /// The system has no more memory.
    OutOfMemory,
    /// Code outside of fastpipe that a source calls raised its own error: see [`Error::cause`].
    Raised,
    /// The pass was closed during a blocking call.
    Closed,
    /// A bug in fastpipe. Its text begins with "internal error:" and asks for a report; the reason contains neither.
    Internal,
}

impl ErrorKind {
    /// Whether the data itself is at fault. Reading the same data again would fail again; other data may be readable.
    pub const fn is_damage(self) -> bool {
        use ErrorKind::{Limit, Malformed, Null, Schema, Shape, Unsupported, ValueRange};
        matches!(
            self,
            Malformed | Limit | Schema | Unsupported | Shape | ValueRange | Null
        )
    }
}

/// The location of an error. Unknown fields are `None`.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Location {
    /// The file, in the format of [`path_text`](crate::path_text).
    pub path: Option<Arc<str>>,
    /// The unit, in terms of its source, if a file and a block index don't identify it.
    pub unit: Option<Arc<str>>,
    /// Index of the unit in its file. For formats that count blocks, this is the block index.
    pub block: Option<u64>,
    /// Byte offset in the file: of the fault if it is known, otherwise of its unit.
    pub offset: Option<u64>,
    /// Index of the record in its unit.
    pub record: Option<u64>,
    /// Byte position of the fault, and a description of the buffer in which it was counted.
    pub position: Option<(u64, &'static str)>,
    /// The feature, or the path of the field in the schema.
    pub feature: Option<Arc<str>>,
}

/// The lengths that caused an error of kind [`ErrorKind::Shape`].
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Lengths {
    /// The length of an array differs from the shape. The outermost dimension is 0.
    Dimension {
        /// The index of the dimension.
        dimension: u32,
        /// Its size in the shape.
        expected: u64,
        /// Number of items that were read before the array was rejected.
        found: u64,
    },
    /// Two arrays of a sparse value have different lengths. An array of indices is given by its dimension, the values
    /// by `None`.
    Sparse {
        /// The first array of the record and its number of entries.
        first: (Option<u32>, u64),
        /// The first array whose length differs and its number of entries.
        other: (Option<u32>, u64),
    },
}

/// Maximum length of a reason in bytes. Text quoted from a file can be arbitrarily long.
const MAX_REASON: usize = 1000;

/// Maximum length of a feature's name in a message, in bytes.
const MAX_FEATURE: usize = 300;

/// Returns the text without its middle if it has more than `most` bytes, otherwise `None`.
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
    /// Creates an error of `kind`. `reason` says what was expected and what was found. The middle of a long reason is
    /// removed.
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

    /// Creates an error from an I/O error of the operating system.
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

    /// Creates an error for a failed allocation of `bytes` bytes for `what`.
    #[cold]
    pub fn out_of_memory(bytes: usize, what: &str) -> Self {
        Error::new(
            ErrorKind::OutOfMemory,
            format!("out of memory: could not allocate {bytes} bytes for {what}"),
        )
    }

    /// Creates an error for a request that needs more memory than the user's limit allows.
    #[cold]
    pub fn over_memory_limit(reason: impl Into<String>) -> Self {
        let mut e = Error::new(ErrorKind::Limit, reason);
        e.0.over_memory_limit = true;
        e
    }

    /// Whether the error was created by [`Error::over_memory_limit`].
    pub fn is_over_memory_limit(&self) -> bool {
        self.0.over_memory_limit
    }

    /// Returns the class of the error.
    pub fn kind(&self) -> ErrorKind {
        self.0.kind
    }

    /// Returns what was expected and what was found, without the location.
    pub fn reason(&self) -> &str {
        &self.0.reason
    }

    /// Returns the location of the error.
    pub fn location(&self) -> &Location {
        &self.0.location
    }

    /// Returns the lengths that don't fit, if known.
    pub fn lengths(&self) -> Option<Lengths> {
        self.0.lengths
    }

    /// Returns the operating system's error code for storage errors.
    pub fn os_error(&self) -> Option<i32> {
        self.0.os_error
    }

    /// Returns the index of the unit in the source, if the error belongs to a single unit.
    pub fn unit(&self) -> Option<u64> {
        self.0.unit
    }

    /// Returns the error that was raised by code outside of fastpipe. The caller must know its type.
    pub fn cause(&self) -> Option<&(dyn Any + Send + Sync)> {
        self.0.cause.as_deref()
    }

    /// Adds the error that caused this one.
    #[must_use]
    pub fn with_cause(mut self, cause: Arc<dyn Any + Send + Sync>) -> Self {
        self.0.cause = Some(cause);
        self
    }

    /// Sets the unit in terms of its source, unless it is already set.
    #[must_use]
    pub fn in_unit(mut self, name: &str) -> Self {
        self.0.location.unit.get_or_insert_with(|| Arc::from(name));
        self
    }

    /// Sets the index of the unit in the source.
    #[must_use]
    pub fn at_unit(mut self, unit: u64) -> Self {
        self.0.unit = Some(unit);
        self
    }

    /// Sets the file, unless it is already set.
    #[must_use]
    pub fn at_path(mut self, path: &str) -> Self {
        self.0.location.path.get_or_insert_with(|| Arc::from(path));
        self
    }

    /// Sets the unit's index in its file and its file offset, unless they are already set.
    #[must_use]
    pub fn at_block(mut self, block: u64, offset: u64) -> Self {
        self.0.location.block.get_or_insert(block);
        self.0.location.offset.get_or_insert(offset);
        self
    }

    /// Sets the byte offset in the file, unless it is already set.
    #[must_use]
    pub fn at_offset(mut self, offset: u64) -> Self {
        self.0.location.offset.get_or_insert(offset);
        self
    }

    /// Sets the record, unless it is already set.
    #[must_use]
    pub fn at_record(mut self, record: u64) -> Self {
        self.0.location.record.get_or_insert(record);
        self
    }

    /// Sets the record, replacing the previous one.
    #[must_use]
    pub fn with_record(mut self, record: u64) -> Self {
        self.0.location.record = Some(record);
        self
    }

    /// Removes the record: its index would mean nothing to users.
    #[must_use]
    pub fn without_record(mut self) -> Self {
        self.0.location.record = None;
        self
    }

    /// Sets the byte offset in the file, replacing the previous one.
    #[must_use]
    pub fn with_offset(mut self, offset: u64) -> Self {
        self.0.location.offset = Some(offset);
        self
    }

    /// Sets the index of a message and a byte offset in it, replacing the record. Removes the position.
    #[must_use]
    pub fn in_message(mut self, number: u64, byte: u64) -> Self {
        let at = &mut self.0.location;
        (at.record, at.offset, at.position) = (Some(number), Some(byte), None);
        self
    }

    /// Sets the byte position in a buffer, such as `"decompressed block"`, unless it is already set.
    #[must_use]
    pub fn at_position(mut self, position: u64, within: &'static str) -> Self {
        self.0.location.position.get_or_insert((position, within));
        self
    }

    /// Declares that the byte offset, if there is one, is a position in a buffer such as `"decompressed text"`, and not
    /// in the file.
    #[must_use]
    pub fn with_offset_within(self, within: &'static str) -> Self {
        let mut moved = self;
        match moved.0.location.offset.take() {
            Some(offset) => moved.at_position(offset, within),
            None => moved,
        }
    }

    /// Sets the lengths that don't fit.
    #[must_use]
    pub fn with_lengths(mut self, lengths: Lengths) -> Self {
        self.0.lengths = Some(lengths);
        self
    }

    /// Sets the feature, unless it is already set.
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
        match self.0.kind {
            ErrorKind::Internal => write!(f, "internal error: {}; please report it{at}", self.0.reason),
            _ => write!(f, "{}{at}", self.0.reason),
        }
    }
}

/// Shows the known fields except the feature, in parentheses after a reason: ` (file a.avro, block 2)`.
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
        let bug = Error::new(ErrorKind::Internal, "no task wrote a row")
            .at_path("a.avro")
            .at_feature("x");
        assert_eq!(
            bug.to_string(),
            "feature 'x': internal error: no task wrote a row; please report it (file a.avro)"
        );
        assert_eq!(size_of::<Result<(), Error>>(), size_of::<usize>());
    }

    #[test]
    fn messages_stay_short_with_long_quotes() {
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
