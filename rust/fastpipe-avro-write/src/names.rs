//! Names (Avro 1.12 specification, "Names"), which are also valid in Java and C#.

use fastpipe_batch::{Error, ErrorKind, Result};

/// Whether a text begins with an ASCII letter or `_` and contains only ASCII letters, digits and `_`.
pub(crate) fn is_name(text: &str) -> bool {
    let mut bytes = text.bytes();
    bytes.next().is_some_and(|b| b.is_ascii_alphabetic() || b == b'_')
        && bytes.all(|b| b.is_ascii_alphanumeric() || b == b'_')
}

/// Whether a text consists of names separated by dots.
pub(crate) fn is_full_name(text: &str) -> bool {
    text.split('.').all(is_name)
}

/// Returns a valid Avro name that is similar to a text.
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

/// Checks that the name of a column or field is valid in Avro. `path` is its location.
pub(crate) fn check_field(name: &str, path: &str) -> Result<()> {
    if is_name(name) {
        return Ok(());
    }
    let reason = format!(
        "{name:?} is not a valid Avro name: names begin with a-z, A-Z or _, and contain only these and digits; rename \
         it, for example to {:?}",
        name_like(name)
    );
    Err(Error::new(ErrorKind::Schema, reason).at_feature(path))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn names_match_the_specification() {
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
