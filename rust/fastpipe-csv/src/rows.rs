//! Finds the start and the end of rows.
//!
//! A field that begins with a quote is quoted: delimiters and newlines belong to it up to the next quote that isn't
//! doubled. A quote anywhere else is an ordinary character. Python's `csv` module and other parsers use the same rules.

use memchr::{memchr, memchr2};

use crate::dialect::Lines;
use crate::fields::{Fields, closed};

/// The next row at a position, if there is one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Next {
    /// A row, including its newline.
    Row {
        /// The position of its first byte.
        start: usize,
        /// One past its last byte.
        end: usize,
    },
    /// A row that ends within quotes.
    Open {
        /// The position of its first byte.
        start: usize,
    },
    /// The end of the bytes, without another row.
    End,
}

impl Lines {
    /// Whether every line is a row, except empty lines and comments.
    pub(crate) fn are_rows(&self, bytes: &[u8]) -> bool {
        self.fields.is_none() && self.quote.is_none_or(|quote| memchr(quote, bytes).is_none())
    }

    /// Returns the first byte from `at` on that is not part of an empty line or a comment.
    #[inline(always)]
    pub(crate) fn past_others(&self, bytes: &[u8], mut at: usize) -> usize {
        loop {
            match bytes.get(at) {
                Some(b'\n') => at += 1,
                Some(b'\r') if bytes.get(at + 1) == Some(&b'\n') => at += 2,
                Some(_) if self.comment.is_some() && bytes.get(at).copied() == self.comment => at = newline(bytes, at),
                _ => return at,
            }
        }
    }

    /// Returns the next row from `at` on, which must be the start of a line.
    #[inline]
    pub(crate) fn next(&self, bytes: &[u8], mut at: usize) -> Next {
        loop {
            let start = self.past_others(bytes, at);
            if start >= bytes.len() {
                return Next::End;
            }
            let Some(end) = self.end(bytes, start) else {
                return Next::Open { start };
            };
            match self.is_row(&bytes[start..end]) {
                true => return Next::Row { start, end },
                false => at = end,
            }
        }
    }

    /// Whether a candidate row has the right number of fields. Always true unless ragged rows are skipped.
    #[inline]
    pub(crate) fn is_row(&self, row: &[u8]) -> bool {
        self.fields
            .is_none_or(|fields| Fields::count(self, row) == Some(fields))
    }

    /// Returns the end of the row that starts at `start`, after its newline. Returns `None` if the row ends within
    /// quotes.
    #[inline]
    pub(crate) fn end(&self, bytes: &[u8], start: usize) -> Option<usize> {
        match self.quote {
            None => Some(newline(bytes, start)),
            Some(quote) => self.end_of_quoted(bytes, start, start, quote),
        }
    }

    /// Returns the end of the row that contains `at`, which must be outside of quotes. `start` is the start of the row,
    /// where a quote opens a field without a preceding delimiter.
    #[inline(always)]
    fn end_of_quoted(&self, bytes: &[u8], start: usize, mut at: usize, quote: u8) -> Option<usize> {
        loop {
            let Some(found) = memchr2(quote, b'\n', &bytes[at..]) else {
                return Some(bytes.len());
            };
            let found = at + found;
            if bytes[found] == b'\n' {
                return Some(found + 1);
            }
            at = found + 1;
            if found == start || bytes[found - 1] == self.delimiter {
                at = closed(bytes, at, quote)?;
            }
        }
    }

    /// Returns the end of the row that contains `at`, assuming that `at` is within quotes. Returns `None` if the row
    /// ends within quotes. After a newline, it is unknown whether a row starts or continues. This function assumes the
    /// latter, [`Lines::next`] the former.
    pub(crate) fn end_from_within(&self, bytes: &[u8], at: usize) -> Option<usize> {
        let quote = self.quote?;
        let at = closed(bytes, at, quote)?;
        self.end_of_quoted(bytes, usize::MAX, at, quote)
    }
}

/// Returns the position after the next newline, or the end of the bytes.
#[inline]
pub(crate) fn newline(bytes: &[u8], at: usize) -> usize {
    memchr(b'\n', &bytes[at..]).map_or(bytes.len(), |found| at + found + 1)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::{Dialect, OnRagged};

    fn rows(lines: &Lines, bytes: &[u8]) -> Vec<String> {
        let (mut rows, mut at) = (Vec::new(), 0);
        loop {
            match lines.next(bytes, at) {
                Next::Row { start, end } => {
                    rows.push(String::from_utf8_lossy(&bytes[start..end]).into_owned());
                    at = end;
                }
                Next::Open { start } => {
                    rows.push(format!("open at {start}"));
                    return rows;
                }
                Next::End => return rows,
            }
        }
    }

    #[test]
    fn rows_end_at_unquoted_newlines() {
        let dialect = Dialect {
            comment: Some(b'#'),
            ..Dialect::default()
        };
        let lines = Lines::new(&dialect, 2);
        let bytes = b"a,b\r\n\n\r\n#no,\"\n\"x\ny\",\"\"\"\n\"\nz\"\"\n5\" pipe,\"a\"b\"\nlast,1";
        let expected = [
            "a,b\r\n",
            "\"x\ny\",\"\"\"\n\"\n",
            "z\"\"\n",
            "5\" pipe,\"a\"b\"\n",
            "last,1",
        ];
        assert_eq!(rows(&lines, bytes), expected);
        assert_eq!(rows(&lines, b"a\n\"b\nc"), ["a\n", "open at 2"]);
        let plain = Lines::new(
            &Dialect {
                quote: None,
                ..Dialect::default()
            },
            2,
        );
        assert_eq!(rows(&plain, b"\"a\nb\",\n"), ["\"a\n", "b\",\n"]);
    }

    #[test]
    fn skipped_ragged_rows_are_not_counted() {
        let dialect = Dialect {
            on_ragged: OnRagged::Skip,
            ..Dialect::default()
        };
        let lines = Lines::new(&dialect, 2);
        let bytes = b"1,2\n3\n4,5,6\n\"7,8\"\n,\n\"9\",\"\n\"";
        assert_eq!(rows(&lines, bytes), ["1,2\n", ",\n", "\"9\",\"\n\""]);
    }
}
