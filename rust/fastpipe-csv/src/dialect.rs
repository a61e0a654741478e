//! How a file is written.

use fastpipe_batch::{Error, ErrorKind, Result};

/// Where the names of columns come from.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Names {
    /// The first row.
    FirstRow,
    /// Nowhere: columns are called `f0`, `f1`, ... and the first row is one of data.
    Numbered,
    /// The user; the first row is one of data.
    Given(Vec<String>),
}

/// What becomes of rows with more or fewer fields than there are columns.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum OnRagged {
    /// They are an error.
    Error,
    /// They are passed over, as if they weren't there.
    Skip,
}

/// How a file is written.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Dialect {
    /// What stands between fields.
    pub delimiter: u8,
    /// What stands around fields with delimiters, newlines or quotes in them, which are doubled; `None` for nothing.
    pub quote: Option<u8>,
    /// What lines begin with that aren't rows.
    pub comment: Option<u8>,
    /// What stands in front of the decimals of a number.
    pub decimal: u8,
    /// Where the names of columns come from.
    pub names: Names,
    /// What fields say that stand for no value.
    pub null_values: Vec<Vec<u8>>,
    /// What becomes of ragged rows.
    pub on_ragged: OnRagged,
    /// Whether floats refuse integers that they would round, and finite numbers that would be infinite.
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
    /// Checks that its bytes can be told apart.
    ///
    /// # Errors
    /// [`ErrorKind::Schema`] if they can't.
    pub fn check(&self) -> Result<()> {
        let bytes = [Some(self.delimiter), self.quote, self.comment, Some(self.decimal)];
        let names = ["delimiter", "quote", "comment", "decimal"];
        let refuse = |reason: String| Err(Error::new(ErrorKind::Schema, reason));
        for (i, (&byte, name)) in bytes.iter().zip(names).enumerate() {
            let Some(byte) = byte else { continue };
            if !byte.is_ascii() || matches!(byte, b'\n' | b'\r' | 0) {
                return refuse(format!("{name} is one ASCII character, and no end of a line"));
            }
            if let Some(other) = bytes[..i].iter().position(|&b| b == Some(byte)) {
                let shown = char::from(byte);
                return refuse(format!("{} and {name} are both {shown:?}", names[other]));
            }
        }
        if self.decimal.is_ascii_alphanumeric() || self.delimiter.is_ascii_alphanumeric() {
            return refuse("delimiter and decimal are no letters or digits".to_owned());
        }
        Ok(())
    }

    /// What decides where rows start, which they are, and which of their fields are nulls.
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

    /// Whether a field stands for no value, with the blanks around it or without.
    pub(crate) fn stands_for_null(&self, field: &[u8]) -> bool {
        self.is_null(field) || self.is_null(field.trim_ascii())
    }

    /// Whether a text is one of those that stand for no value.
    pub(crate) fn is_null(&self, field: &[u8]) -> bool {
        self.null_values.iter().any(|word| word == field)
    }

    /// Whether something that stands for no value could be taken for a number.
    pub(crate) fn has_numeric_nulls(&self) -> bool {
        let begins = |word: &Vec<u8>| word.first().is_some_and(|&b| begins_number(b, self.decimal));
        self.null_values.iter().any(begins)
    }
}

/// What decides where rows are.
#[derive(Clone, Debug)]
pub struct Lines {
    pub(crate) delimiter: u8,
    pub(crate) quote: Option<u8>,
    pub(crate) comment: Option<u8>,
    /// Fields that rows have, if those with others are passed over.
    pub(crate) fields: Option<usize>,
}

impl Lines {
    /// Of files with this many columns.
    pub fn new(dialect: &Dialect, columns: usize) -> Lines {
        Lines {
            delimiter: dialect.delimiter,
            quote: dialect.quote,
            comment: dialect.comment,
            fields: (dialect.on_ragged == OnRagged::Skip).then_some(columns),
        }
    }
}

/// Whether a number that is no word begins with this byte.
#[inline(always)]
pub(crate) fn begins_number(byte: u8, decimal: u8) -> bool {
    byte.is_ascii_digit() || byte == b'-' || byte == b'+' || byte == decimal
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_of_a_dialect_differ() {
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
    fn tags_tell_dialects_apart_that_have_other_rows() {
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
