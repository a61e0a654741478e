//! Logical types (Avro 1.12 specification, "Logical Types"), which define the meaning of values of another type.

use std::fmt;

use fastpipe_batch::{DType, TimeUnit};

use super::Type;
use super::json::{Json, Key, Object};

/// A logical type.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[allow(missing_docs)] // The variants are those of the specification.
pub enum Logical {
    Date,
    /// Time since midnight, in this unit.
    Time(TimeUnit),
    /// Time since the epoch in UTC, in this unit.
    Timestamp(TimeUnit),
    /// Time since the epoch in an unspecified time zone, in this unit.
    LocalTimestamp(TimeUnit),
    Decimal {
        precision: u32,
        scale: u32,
    },
    BigDecimal,
    Uuid,
    /// Months, days and milliseconds.
    Duration,
}

impl Logical {
    const NAMES: [(&'static str, Logical); 12] = {
        use TimeUnit::{Microseconds, Milliseconds, Nanoseconds};
        [
            ("date", Logical::Date),
            ("time-millis", Logical::Time(Milliseconds)),
            ("time-micros", Logical::Time(Microseconds)),
            ("timestamp-millis", Logical::Timestamp(Milliseconds)),
            ("timestamp-micros", Logical::Timestamp(Microseconds)),
            ("timestamp-nanos", Logical::Timestamp(Nanoseconds)),
            ("local-timestamp-millis", Logical::LocalTimestamp(Milliseconds)),
            ("local-timestamp-micros", Logical::LocalTimestamp(Microseconds)),
            ("local-timestamp-nanos", Logical::LocalTimestamp(Nanoseconds)),
            ("big-decimal", Logical::BigDecimal),
            ("uuid", Logical::Uuid),
            ("duration", Logical::Duration),
        ]
    };

    /// Returns the logical type that a schema's object declares for a type. A logical type is ignored if it is unknown
    /// or doesn't fit the type.
    pub(crate) fn of(object: &Object, ty: &Type) -> Option<Logical> {
        let name = object.text(Key::LogicalType)?;
        if name == "decimal" {
            return decimal(object, ty);
        }
        let (_, logical) = *Logical::NAMES.iter().find(|(of, _)| *of == name)?;
        let fits = match logical {
            Logical::Date | Logical::Time(TimeUnit::Milliseconds) => *ty == Type::Int,
            Logical::Time(_) | Logical::Timestamp(_) | Logical::LocalTimestamp(_) => *ty == Type::Long,
            Logical::BigDecimal => *ty == Type::Bytes,
            Logical::Uuid => matches!(ty, Type::String | Type::Bytes | Type::Fixed(16)),
            Logical::Duration => *ty == Type::Fixed(12),
            Logical::Decimal { .. } => false,
        };
        fits.then_some(logical)
    }

    /// Returns the dtype of dates and times, whose values are stored as NumPy stores them.
    pub fn time(self) -> Option<DType> {
        match self {
            Logical::Date => Some(DType::Datetime(TimeUnit::Days)),
            Logical::Time(unit) => Some(DType::Timedelta(unit)),
            Logical::Timestamp(unit) | Logical::LocalTimestamp(unit) => Some(DType::Datetime(unit)),
            _ => None,
        }
    }
}

/// Returns a decimal type if its scale is at most its precision, and its type is bytes or a fixed that can store this
/// number of digits.
fn decimal(object: &Object, ty: &Type) -> Option<Logical> {
    let &Json::Number(precision) = object.get(Key::Precision)? else {
        return None;
    };
    let scale = match object.get(Key::Scale) {
        None => 0,
        Some(&Json::Number(scale)) => scale,
        Some(_) => return None,
    };
    let most = match ty {
        Type::Bytes => u64::from(u32::MAX),
        // floor(log10(2^(8n - 1) - 1)), where log10(2) is approximated by 0.30103. This is exact for up to thousands of
        // digits.
        Type::Fixed(n) => (*n as u64).saturating_mul(8).saturating_sub(1).saturating_mul(30103) / 100_000,
        _ => return None,
    };
    if precision == 0 || precision > most || scale > precision {
        return None;
    }
    Some(Logical::Decimal {
        precision: u32::try_from(precision).ok()?,
        scale: u32::try_from(scale).ok()?,
    })
}

impl fmt::Display for Logical {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Logical::Decimal { precision, scale } => write!(f, "decimal({precision}, {scale})"),
            other => {
                let found = Logical::NAMES.iter().find(|(_, logical)| logical == other);
                f.write_str(found.map_or("", |(name, _)| name))
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use crate::schema::Schema;

    fn described(json: &str) -> String {
        let schema = Schema::parse(json).unwrap();
        schema.describe(schema.root())
    }

    #[test]
    fn valid_logical_types_are_recognized() {
        for (json, expected) in [
            (r#"{"type": "int", "logicalType": "date"}"#, "int (date)"),
            (r#"{"type": "long", "logicalType": "date"}"#, "long"),
            (r#"{"type": "int", "logicalType": "time-millis"}"#, "int (time-millis)"),
            (r#"{"type": "int", "logicalType": "time-micros"}"#, "int"),
            (
                r#"{"type": "long", "logicalType": "local-timestamp-nanos"}"#,
                "long (local-timestamp-nanos)",
            ),
            (r#"{"type": "long", "logicalType": "kept-by-someone"}"#, "long"),
            (
                r#"{"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 2}"#,
                "bytes (decimal(4, 2))",
            ),
            (
                r#"{"type": "bytes", "logicalType": "decimal", "precision": 4}"#,
                "bytes (decimal(4, 0))",
            ),
            (
                r#"{"type": "bytes", "logicalType": "decimal", "precision": 4, "scale": 5}"#,
                "bytes",
            ),
            (
                r#"{"type": "bytes", "logicalType": "decimal", "precision": 0}"#,
                "bytes",
            ),
            (
                r#"{"type": "string", "logicalType": "decimal", "precision": 4}"#,
                "string",
            ),
            (r#"{"type": "string", "logicalType": "uuid"}"#, "string (uuid)"),
        ] {
            assert_eq!(described(json), expected, "{json}");
        }
    }

    #[test]
    fn decimals_fit_their_fixed_type() {
        // The maximum number of digits of n bytes, computed with the specification's formula.
        for (n, most) in [(1, 2), (2, 4), (4, 9), (8, 18), (12, 28), (16, 38)] {
            let json = |precision: u32| {
                format!(
                    r#"{{"type": "fixed", "name": "F", "size": {n}, "logicalType": "decimal", "precision": {precision}}}"#
                )
            };
            assert_eq!(described(&json(most)), format!("fixed({n}) (decimal({most}, 0))"));
            assert_eq!(described(&json(most + 1)), format!("fixed({n})"));
        }
    }
}
