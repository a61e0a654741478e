//! Iterates over the fields of a row.

use std::borrow::Cow;

use memchr::{memchr, memchr3};

use crate::dialect::Lines;

/// The end of a field: a delimiter or the end of the row.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Ended {
    /// A delimiter, so another field follows.
    Field,
    /// The end of the row.
    Row,
}

/// The position of a carriage return outside of quotes that is not followed by a newline.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct LoneReturn(pub(crate) usize);

/// A cursor over the fields of a row.
#[derive(Debug)]
pub(crate) struct Fields<'a> {
    delimiter: u8,
    quote: Option<u8>,
    pub(crate) bytes: &'a [u8],
    pub(crate) at: usize,
}

impl<'a> Fields<'a> {
    /// Starts at a byte that begins a field.
    pub(crate) fn new(lines: &Lines, bytes: &'a [u8], at: usize) -> Fields<'a> {
        Fields {
            delimiter: lines.delimiter,
            quote: lines.quote,
            bytes,
            at,
        }
    }

    /// Returns the number of fields of a row, or `None` if one of them contains a lone carriage return.
    pub(crate) fn count(lines: &Lines, row: &[u8]) -> Option<usize> {
        let mut fields = Fields::new(lines, row, 0);
        let mut count = 0;
        loop {
            count += 1;
            if fields.skip().ok()? == Ended::Row {
                return Some(count);
            }
        }
    }

    /// Advances past a field that ends at `end` and returns what ends it. Returns `None` if a field can't end there.
    #[inline(always)]
    pub(crate) fn ended(&mut self, end: usize) -> Option<Ended> {
        let (ended, behind) = match self.bytes.get(end) {
            Some(&byte) if byte == self.delimiter => (Ended::Field, end + 1),
            Some(b'\n') => (Ended::Row, end + 1),
            Some(b'\r') if self.bytes.get(end + 1) == Some(&b'\n') => (Ended::Row, end + 2),
            None => (Ended::Row, end),
            Some(_) => return None,
        };
        self.at = behind;
        Some(ended)
    }

    /// Returns the end of an unquoted field that contains `at`, and whether all bytes before it are ASCII. Returns
    /// `None` unless the field ends within a few bytes. Most fields are so short that calling a search function would
    /// take longer than this loop.
    #[inline(always)]
    fn short_end(&self, at: usize) -> Option<(usize, bool)> {
        const HIGH: u64 = 0x8080_8080_8080_8080;
        // Sets the high bit of each byte that equals `byte`. Bytes after a match may be set as well.
        let equal = |word: u64, byte: u8| {
            let zeros = word ^ (u64::from(byte) * 0x0101_0101_0101_0101);
            zeros.wrapping_sub(0x0101_0101_0101_0101) & !zeros
        };
        let mut others = 0;
        for (i, &bytes) in self.bytes.get(at..)?.as_chunks::<8>().0.iter().take(4).enumerate() {
            let word = u64::from_le_bytes(bytes);
            let ends = (equal(word, self.delimiter) | equal(word, b'\n') | equal(word, b'\r')) & HIGH;
            if ends != 0 {
                let before = (ends & ends.wrapping_neg()) - 1;
                others |= word & before & HIGH;
                return Some((at + 8 * i + ends.trailing_zeros() as usize / 8, others == 0));
            }
            others |= word & HIGH;
        }
        None
    }

    /// Advances past a field that is short, ASCII and unquoted. Returns the bytes from its start, its length, and what
    /// ends it. Returns `None` for other fields.
    #[inline(always)]
    pub(crate) fn short_text(&mut self) -> Option<(&'a [u8], usize, Ended)> {
        let start = self.at;
        if self.is_quoted() {
            return None;
        }
        let (end, _) = self.short_end(start).filter(|&(_, ascii)| ascii)?;
        let ended = self.ended(end)?;
        Some((&self.bytes[start..], end - start, ended))
    }

    /// Returns the end of an unquoted field that contains `at`.
    #[inline]
    fn plain_end(&self, at: usize) -> usize {
        if let Some((end, _)) = self.short_end(at) {
            return end;
        }
        memchr3(self.delimiter, b'\n', b'\r', &self.bytes[at..]).map_or(self.bytes.len(), |found| at + found)
    }

    /// Whether the next field is quoted.
    #[inline(always)]
    fn is_quoted(&self) -> bool {
        self.quote.is_some() && self.bytes.get(self.at).copied() == self.quote
    }

    /// Advances past a field.
    #[inline]
    pub(crate) fn skip(&mut self) -> Result<Ended, LoneReturn> {
        let mut from = self.at;
        if let (true, Some(quote)) = (self.is_quoted(), self.quote) {
            from = closed(self.bytes, self.at + 1, quote).unwrap_or(self.bytes.len());
        }
        let end = self.plain_end(from);
        self.ended(end).ok_or(LoneReturn(end))
    }

    /// Advances past a field and returns its content, without the surrounding quotes and with doubled quotes replaced.
    /// Text after the closing quote belongs to the field.
    #[inline]
    pub(crate) fn next(&mut self) -> Result<(Cow<'a, [u8]>, Ended), LoneReturn> {
        let start = self.at;
        if let (true, Some(quote)) = (self.is_quoted(), self.quote) {
            return self.quoted(start, quote);
        }
        let end = self.plain_end(start);
        let ended = self.ended(end).ok_or(LoneReturn(end))?;
        Ok((Cow::Borrowed(&self.bytes[start..end]), ended))
    }

    fn quoted(&mut self, start: usize, quote: u8) -> Result<(Cow<'a, [u8]>, Ended), LoneReturn> {
        let bytes = self.bytes;
        // Rows never end within quotes, so a closing quote exists.
        let behind = closed(bytes, start + 1, quote).unwrap_or(bytes.len());
        let inner = &bytes[start + 1..behind.saturating_sub(1).max(start + 1)];
        let end = self.plain_end(behind);
        let ended = self.ended(end).ok_or(LoneReturn(end))?;
        if end == behind && memchr(quote, inner).is_none() {
            return Ok((Cow::Borrowed(inner), ended));
        }
        let mut text = Vec::with_capacity(end - start);
        let mut left = inner;
        while let Some(at) = memchr(quote, left) {
            text.extend_from_slice(&left[..=at]);
            left = left.get(at + 2..).unwrap_or_default();
        }
        text.extend_from_slice(left);
        text.extend_from_slice(&bytes[behind..end]);
        Ok((Cow::Owned(text), ended))
    }
}

/// Returns the position after the next closing quote from `at` on. Doubled quotes are skipped.
#[inline]
pub(crate) fn closed(bytes: &[u8], mut at: usize, quote: u8) -> Option<usize> {
    loop {
        let found = at + memchr(quote, bytes.get(at..)?)?;
        if bytes.get(found + 1) != Some(&quote) {
            return Some(found + 1);
        }
        at = found + 2;
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::dialect::Dialect;

    fn fields(row: &[u8]) -> Result<Vec<String>, LoneReturn> {
        let lines = Lines::new(&Dialect::default(), 0);
        let (mut all, mut skipped) = (Fields::new(&lines, row, 0), Fields::new(&lines, row, 0));
        let mut found = Vec::new();
        loop {
            let (text, ended) = all.next()?;
            assert_eq!(skipped.skip(), Ok(ended));
            assert_eq!(skipped.at, all.at);
            found.push(String::from_utf8_lossy(&text).into_owned());
            if ended == Ended::Row {
                assert_eq!(Fields::count(&lines, row), Some(found.len()));
                return Ok(found);
            }
        }
    }

    proptest::proptest! {
        #[test]
        fn short_texts_are_those_of_any_length(bytes in "[ab,\n\ré\"]{0,50}") {
            let lines = Lines::new(&Dialect::default(), 0);
            let (mut short, mut any) = (Fields::new(&lines, bytes.as_bytes(), 0), Fields::new(&lines, bytes.as_bytes(), 0));
            let naive = bytes.find([',', '\n', '\r']).unwrap_or(bytes.len());
            proptest::prop_assert_eq!(any.plain_end(0), naive);
            if let Some((text, n, ended)) = short.short_text() {
                proptest::prop_assert_eq!((text[..n].into(), ended), any.next().unwrap());
                proptest::prop_assert_eq!(short.at, any.at);
                proptest::prop_assert!(text[..n].is_ascii());
            }
        }
    }

    #[test]
    fn fields_are_parsed() {
        assert_eq!(fields(b"a,,b c\n").unwrap(), ["a", "", "b c"]);
        assert_eq!(
            fields(b"\"a,\r\n\"\"b\"\"\",\"\",\"\"\"\"\r\n").unwrap(),
            ["a,\r\n\"b\"", "", "\""]
        );
        assert_eq!(fields(b"a\"b\"c,5\"").unwrap(), ["a\"b\"c", "5\""]);
        assert_eq!(fields(b"\"a\"b\"c\",\"x\" ").unwrap(), ["ab\"c\"", "x "]);
        assert_eq!(fields(b"").unwrap(), [""]);
        assert_eq!(fields(b"a,").unwrap(), ["a", ""]);
        assert_eq!(fields(b"ab\rc\n"), Err(LoneReturn(2)));
        assert_eq!(fields(b"a,\"b\"\r"), Err(LoneReturn(5)));
    }
}
