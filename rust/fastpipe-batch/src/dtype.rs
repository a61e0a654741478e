//! Element types of columns.

use std::fmt;

/// The unit of dates, times and durations.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The names say it all.
pub enum TimeUnit {
    Days,
    Seconds,
    Milliseconds,
    Microseconds,
    Nanoseconds,
}

/// The type of one element of a column. The names follow NumPy.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[allow(missing_docs)] // The variants correspond to NumPy's dtypes.
pub enum DType {
    Bool,
    I8,
    I16,
    I32,
    I64,
    U8,
    U16,
    U32,
    U64,
    F16,
    F32,
    F64,
    Datetime(TimeUnit),
    Timedelta(TimeUnit),
}

impl DType {
    /// All element types.
    pub const ALL: [DType; 22] = {
        use TimeUnit::{Days, Microseconds, Milliseconds, Nanoseconds, Seconds};
        [
            DType::Bool,
            DType::I8,
            DType::I16,
            DType::I32,
            DType::I64,
            DType::U8,
            DType::U16,
            DType::U32,
            DType::U64,
            DType::F16,
            DType::F32,
            DType::F64,
            DType::Datetime(Days),
            DType::Datetime(Seconds),
            DType::Datetime(Milliseconds),
            DType::Datetime(Microseconds),
            DType::Datetime(Nanoseconds),
            DType::Timedelta(Days),
            DType::Timedelta(Seconds),
            DType::Timedelta(Milliseconds),
            DType::Timedelta(Microseconds),
            DType::Timedelta(Nanoseconds),
        ]
    };

    /// Returns the size of one element in bytes.
    pub const fn size(self) -> usize {
        match self {
            DType::Bool | DType::I8 | DType::U8 => 1,
            DType::I16 | DType::U16 | DType::F16 => 2,
            DType::I32 | DType::U32 | DType::F32 => 4,
            DType::I64 | DType::U64 | DType::F64 | DType::Datetime(_) | DType::Timedelta(_) => 8,
        }
    }

    /// Returns NumPy's name of this type.
    pub const fn name(self) -> &'static str {
        use TimeUnit::{Days, Microseconds, Milliseconds, Nanoseconds, Seconds};
        match self {
            DType::Bool => "bool",
            DType::I8 => "int8",
            DType::I16 => "int16",
            DType::I32 => "int32",
            DType::I64 => "int64",
            DType::U8 => "uint8",
            DType::U16 => "uint16",
            DType::U32 => "uint32",
            DType::U64 => "uint64",
            DType::F16 => "float16",
            DType::F32 => "float32",
            DType::F64 => "float64",
            DType::Datetime(Days) => "datetime64[D]",
            DType::Datetime(Seconds) => "datetime64[s]",
            DType::Datetime(Milliseconds) => "datetime64[ms]",
            DType::Datetime(Microseconds) => "datetime64[us]",
            DType::Datetime(Nanoseconds) => "datetime64[ns]",
            DType::Timedelta(Days) => "timedelta64[D]",
            DType::Timedelta(Seconds) => "timedelta64[s]",
            DType::Timedelta(Milliseconds) => "timedelta64[ms]",
            DType::Timedelta(Microseconds) => "timedelta64[us]",
            DType::Timedelta(Nanoseconds) => "timedelta64[ns]",
        }
    }

    /// Returns the type that NumPy calls `name`.
    pub fn from_name(name: &str) -> Option<DType> {
        DType::ALL.into_iter().find(|d| d.name() == name)
    }

    /// Whether this is a signed or unsigned integer type.
    pub const fn is_integer(self) -> bool {
        !matches!(self, DType::Bool) && !self.is_float() && !self.is_time()
    }

    /// Whether this is a floating-point type.
    pub const fn is_float(self) -> bool {
        matches!(self, DType::F16 | DType::F32 | DType::F64)
    }

    /// Whether this is a date, a time or a duration. For these types, the smallest integer means "not a time" (NaT).
    pub const fn is_time(self) -> bool {
        matches!(self, DType::Datetime(_) | DType::Timedelta(_))
    }
}

impl fmt::Display for DType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// The type of the innermost values of a column.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Leaf {
    /// Elements of a fixed size.
    Fixed(DType),
    /// Byte strings of any length. If `utf8` is set, they are known to be text.
    Bytes {
        /// Whether the bytes are checked to be UTF-8.
        utf8: bool,
    },
}

impl fmt::Display for Leaf {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Leaf::Fixed(d) => d.fmt(f),
            Leaf::Bytes { utf8: true } => f.write_str("string"),
            Leaf::Bytes { utf8: false } => f.write_str("bytes"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_round_trip() {
        for d in DType::ALL {
            assert_eq!(DType::from_name(d.name()), Some(d));
            assert!(d.size().is_power_of_two() && d.size() <= 8);
        }
        assert_eq!(DType::from_name("complex64"), None);
    }
}
