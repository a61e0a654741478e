//! Names (Avro 1.12 specification, "Names"): what Java and C# take, too.

use fastpipe_batch::{Error, ErrorKind, Result};

/// Whether it begins with a letter of ASCII or `_`, and goes on with these and digits.
pub(crate) fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Whether it is names with dots between them.
pub(crate) fn is_full_name(text: &str) -> bool {
    text.split('.').all(is_name)
}

/// A name that is like this one, and one of Avro's.
pub(crate) fn name_like(text: &str) -> String {
    let mut name: String = text
        .chars()
        .map(|c| if c.is_ascii_alphanumeric() { c } else { '_' })
        .collect();
    if name.is_empty() || name.starts_with(|c: char| c.is_ascii_digit()) {
        name.insert(0, '_');
    }
    name
}

/// Refuses the name of a column or of a field that Avro doesn't have. `path` is where it is.
pub(crate) fn check_field(name: &str, path: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let reason = format!(
        "{name:?} is no name of Avro's: these begin with a letter of a-z, A-Z or _, and have only these and digits; rename \
         it, for example to {:?}",
        name_like(name)
    );
    Err(Error::new(ErrorKind::Schema, reason).at_feature(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_are_those_of_the_specification() {
        for good in ["a", "_", "A9", "_0", "snake_case"] {
            assert!(is_name(good), "{good}");
        }
        for bad in ["", "9a", "a-b", "a b", "é", "a.b", "a\0"] {
            assert!(!is_name(bad), "{bad}");
            assert!(is_name(&name_like(bad)), "{bad}");
            assert!(check_field(bad, bad).is_err());
        }
        assert!(is_full_name("org.apache.X") && !is_full_name("org..X") && !is_full_name(""));
    }
}
