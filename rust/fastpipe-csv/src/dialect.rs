//! The syntax of a file.

use fastpipe_batch::{Error, ErrorKind, Result};

/// The source of the column names.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// The first row of the file.
    FirstRow,
    /// Generated names `f0`, `f1`, ... The first row contains data.
    Numbered,
    /// Names from the user. The first row contains data.
    Given(Vec<String>),
}

/// How to handle rows with more or fewer fields than columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRagged {
    /// Such a row is an error.
    Error,
    /// Such rows are skipped as if they didn't exist.
    Skip,
}

/// The syntax of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// The character between fields.
    pub delimiter: u8,
    /// The character around fields that contain delimiters, newlines or quotes. Quotes inside are doubled. `None`
    /// disables quoting.
    pub quote: Option<u8>,
    /// The character at the start of comment lines.
    pub comment: Option<u8>,
    /// The decimal mark.
    pub decimal: u8,
    /// The source of the column names.
    pub names: Names,
    /// The texts that represent nulls.
    pub null_values: Vec<Vec<u8>>,
    /// How to handle ragged rows.
    pub on_ragged: OnRagged,
    /// Whether to reject values that a float can't keep: integers that it would round, and finite numbers that would be
    /// infinite.
    pub lossless: bool,
}

impl Default for Dialect {
    fn default() -> Self {
        Dialect {
            delimiter: b',',
            quote: Some(b'"'),
            comment: None,
            decimal: b'.',
            names: Names::FirstRow,
            null_values: Vec::new(),
            on_ragged: OnRagged::Error,
            lossless: false,
        }
    }
}

impl Dialect {
    /// Checks that the special characters are valid and distinct.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if they aren't.
    pub fn check(&self) -> Result<()> {
        let bytes = [Some(self.delimiter), self.quote, self.comment, Some(self.decimal)];
        let names = ["delimiter", "quote", "comment", "decimal"];
        let refuse = |reason: String| Err(Error::new(ErrorKind::Schema, reason));
        for (i, (&byte, name)) in bytes.iter().zip(names).enumerate() {
            let Some(byte) = byte else { continue };
            if !byte.is_ascii() || matches!(byte, b'\n' | b'\r' | 0) {
                return refuse(format!("{name} must be one ASCII character that doesn't end a line"));
            }
            if let Some(other) = bytes[..i].iter().position(|&b| b == Some(byte)) {
                let shown = char::from(byte);
                return refuse(format!("{} and {name} are both {shown:?}", names[other]));
            }
        }
        if self.decimal.is_ascii_alphanumeric() || self.delimiter.is_ascii_alphanumeric() {
            return refuse("delimiter and decimal must not be letters or digits".to_owned());
        }
        Ok(())
    }

    /// Returns an encoding of the settings that determine the positions of rows, which rows are skipped, and which
    /// fields are null.
    pub fn tag(&self) -> Vec<u8> {
        let option = |byte: Option<u8>| [u8::from(byte.is_some()), byte.unwrap_or(0)];
        let mut tag = b"csv1".to_vec();
        tag.push(self.delimiter);
        tag.extend(option(self.quote));
        tag.extend(option(self.comment));
        tag.push(u8::from(self.names == Names::FirstRow));
        match (&self.on_ragged, &self.names) {
            (OnRagged::Error, _) => tag.push(0),
            (OnRagged::Skip, Names::Given(names)) => tag.extend((1 + names.len() as u64).to_le_bytes()),
            (OnRagged::Skip, _) => tag.push(1),
        }
        for word in &self.null_values {
            tag.extend((word.len() as u64).to_le_bytes());
            tag.extend(word);
        }
        tag
    }

    /// Whether a field represents a null, with or without the surrounding whitespace.
    pub(crate) fn stands_for_null(&self, field: &[u8]) -> bool {
        self.is_null(field) || self.is_null(field.trim_ascii())
    }

    /// Whether a text is one of the texts that represent nulls.
    pub(crate) fn is_null(&self, field: &[u8]) -> bool {
        self.null_values.iter().any(|word| word == field)
    }

    /// Whether a null could be parsed as a number.
    pub(crate) fn has_numeric_nulls(&self) -> bool {
        let begins = |word: &Vec<u8>| word.first().is_some_and(|&b| begins_number(b, self.decimal));
        self.null_values.iter().any(begins)
    }
}

/// The settings that determine where rows are.
#[derive(Clone, Debug)]
pub struct Lines {
    pub(crate) delimiter: u8,
    pub(crate) quote: Option<u8>,
    pub(crate) comment: Option<u8>,
    /// The number of fields per row if rows with another number are skipped.
    pub(crate) fields: Option<usize>,
}

impl Lines {
    /// Returns the settings for files with this many columns.
    pub fn new(dialect: &Dialect, columns: usize) -> Lines {
        Lines {
            delimiter: dialect.delimiter,
            quote: dialect.quote,
            comment: dialect.comment,
            fields: (dialect.on_ragged == OnRagged::Skip).then_some(columns),
        }
    }
}

/// Whether a number can begin with this byte, except for words such as `inf`.
#[inline(always)]
pub(crate) fn begins_number(byte: u8, decimal: u8) -> bool {
    byte.is_ascii_digit() || byte == b'-' || byte == b'+' || byte == decimal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_dialect_must_differ() {
        let sound = Dialect::default();
        assert!(sound.check().is_ok());
        let wrong = [
            Dialect {
                delimiter: b'"',
                ..sound.clone()
            },
            Dialect {
                delimiter: b'\n',
                ..sound.clone()
            },
            Dialect {
                delimiter: 0xe4,
                ..sound.clone()
            },
            Dialect {
                delimiter: b'1',
                ..sound.clone()
            },
            Dialect {
                decimal: b',',
                ..sound.clone()
            },
            Dialect {
                comment: Some(b'"'),
                ..sound.clone()
            },
            Dialect {
                quote: Some(b'\r'),
                ..sound.clone()
            },
        ];
        for dialect in wrong {
            assert_eq!(dialect.check().unwrap_err().kind(), ErrorKind::Schema, "{dialect:?}");
        }
        let semicolons = Dialect {
            delimiter: b';',
            decimal: b',',
            ..sound.clone()
        };
        assert!(semicolons.check().is_ok());
        assert!(Dialect { quote: None, ..sound }.check().is_ok());
    }

    #[test]
    fn tags_distinguish_dialects_with_different_rows() {
        let sound = Dialect::default();
        let others = [
            sound.clone(),
            Dialect {
                delimiter: b';',
                ..sound.clone()
            },
            Dialect {
                quote: None,
                ..sound.clone()
            },
            Dialect {
                quote: Some(b'\''),
                ..sound.clone()
            },
            Dialect {
                comment: Some(b'#'),
                ..sound.clone()
            },
            Dialect {
                names: Names::Numbered,
                ..sound.clone()
            },
            Dialect {
                on_ragged: OnRagged::Skip,
                ..sound.clone()
            },
            Dialect {
                on_ragged: OnRagged::Skip,
                names: Names::Given(vec!["a".into()]),
                ..sound.clone()
            },
        ];
        let null = Dialect {
            null_values: vec![b"NA".to_vec()],
            ..sound.clone()
        };
        let others = others.into_iter().chain([null]).collect::<Vec<_>>();
        let tags: std::collections::HashSet<_> = others.iter().map(Dialect::tag).collect();
        assert_eq!(tags.len(), others.len());
        let alike = Dialect {
            decimal: b'_',
            ..sound.clone()
        };
        assert_eq!(alike.tag(), sound.tag());
    }
}
