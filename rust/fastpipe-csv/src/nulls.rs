//! Finds the columns that contain nulls. Integers and bools have no null value, so the dtype of such a column depends
//! on whether any row has a null. A sample of rows isn't enough to decide this.
//!
//! The search runs on the same bytes as the scan for rows. It checks each byte after a delimiter or a newline for a
//! possible start of a null, many bytes at once. It parses the fields of a row only if a null is possible.

use memchr::memrchr;

use crate::dialect::{Dialect, Lines};
use crate::fields::{Ended, Fields};
use crate::rows::newline;

/// For each column, the file offset of the first row with a null in that column. `None` if no row has one.
pub type FirstNulls = Vec<Option<u64>>;

/// Number of bytes that are checked at once.
const AT_ONCE: usize = 240;

/// Searches rows for nulls.
#[derive(Clone, Debug)]
pub struct NullSearch {
    dialect: Dialect,
    lines: Lines,
    /// The bytes with which an unquoted null can begin.
    firsts: Vec<u8>,
    /// The same set, indexed by byte.
    begins_null: [bool; 256],
    /// Whether the set contains a byte with which a number can begin.
    numeric: bool,
    found: FirstNulls,
    /// Number of columns in which no null was found yet.
    left: usize,
}

impl NullSearch {
    /// Starts a search. `found` contains the results for the preceding rows, for all columns or for none.
    pub fn new(dialect: &Dialect, columns: usize, mut found: FirstNulls) -> NullSearch {
        found.resize(columns, None);
        let mut firsts: Vec<u8> = (0..=u8::MAX).filter(u8::is_ascii_whitespace).collect();
        // An empty field ends where it begins.
        if dialect.null_values.iter().any(Vec::is_empty) {
            firsts.extend([dialect.delimiter, b'\n', b'\r']);
        }
        firsts.extend(dialect.null_values.iter().filter_map(|word| word.first()));
        firsts.sort_unstable();
        firsts.dedup();
        NullSearch {
            dialect: dialect.clone(),
            lines: Lines::new(dialect, columns),
            numeric: firsts
                .iter()
                .any(|&first| is_of_number(first) && first != dialect.delimiter),
            begins_null: std::array::from_fn(|byte| firsts.contains(&(byte as u8))),
            firsts,
            left: found.iter().filter(|first| first.is_none()).count(),
            found,
        }
    }

    /// Returns the settings that determine where rows are.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// Returns the result.
    pub fn found(&self) -> &FirstNulls {
        &self.found
    }

    /// Adds the result of a search in the following rows.
    pub fn add(&mut self, behind: &NullSearch) {
        for (first, &other) in self.found.iter_mut().zip(&behind.found) {
            *first = first.or(other);
        }
        self.left = self.found.iter().filter(|first| first.is_none()).count();
    }

    /// Searches lines that are all rows without quotes. `offset` is the offset of the bytes in the file.
    pub(crate) fn see_lines(&mut self, bytes: &[u8], offset: u64) {
        // All bytes before `at` were searched. `at` is in column `column` of the row that begins at `row`.
        let (mut row, mut at, mut column) = (0, 0, 0);
        let mut candidates = [0; AT_ONCE];
        for block in (0..bytes.len()).step_by(AT_ONCE) {
            if self.left == 0 || !self.find_candidates(bytes, block, &mut candidates) {
                continue;
            }
            let eights = candidates.as_chunks::<8>().0.iter().enumerate();
            // Most groups have no candidates.
            let some = eights.filter(|(_, eight)| **eight != [0; 8]);
            for candidate in some.flat_map(|(i, _)| block + 8 * i..block + 8 * i + 8) {
                if candidates[candidate - block] == 0 || candidate < at || !self.may_be_null(&bytes[candidate..]) {
                    continue;
                }
                for &byte in &bytes[at..candidate] {
                    at += 1;
                    column += usize::from(byte == self.lines.delimiter);
                    if byte == b'\n' {
                        (row, column) = (at, 0);
                    }
                }
                if self.is_open(column) {
                    at = newline(bytes, candidate);
                    self.see_row(&bytes[row..at], offset + row as u64);
                    (row, column) = (at, 0);
                }
            }
        }
        // The last line of a file may lack a newline. An empty field at its end has no byte that could be a candidate.
        if bytes.last() == Some(&self.lines.delimiter) {
            let row = memrchr(b'\n', bytes).map_or(0, |before| before + 1);
            self.see_row(&bytes[row..], offset + row as u64);
        }
    }

    /// Searches the fields of a row, up to the first damaged one. `start` is the offset of the row in the file.
    pub(crate) fn see_row(&mut self, row: &[u8], start: u64) {
        if self.left == 0 {
            return;
        }
        let mut fields = Fields::new(&self.lines, row, 0);
        for number in 0..self.found.len() {
            let ended = if self.is_open(number) && self.may_be_null(&row[fields.at..]) {
                fields.next().map(|(text, ended)| {
                    if self.dialect.stands_for_null(&text) {
                        self.found[number] = Some(start);
                        self.left -= 1;
                    }
                    ended
                })
            } else {
                fields.skip()
            };
            if ended != Ok(Ended::Field) {
                return;
            }
        }
    }

    /// Whether no null was found in a column so far.
    #[inline(always)]
    fn is_open(&self, column: usize) -> bool {
        matches!(self.found.get(column), Some(None))
    }

    fn ends_field(&self, byte: u8) -> bool {
        byte == self.lines.delimiter || byte == b'\n'
    }

    /// Marks the bytes of a block that begin a field and with which a null may begin. Returns whether there may be any.
    fn find_candidates(&self, bytes: &[u8], block: usize, candidates: &mut [u8; AT_ONCE]) -> bool {
        let before = block
            .checked_sub(1)
            .and_then(|before| bytes[before..].first_chunk::<AT_ONCE>());
        let (Some(before), Some(these)) = (before, bytes[block..].first_chunk::<AT_ONCE>()) else {
            // The block is at one of the ends of the bytes.
            for (i, candidate) in candidates.iter_mut().enumerate() {
                let begins = (block + i)
                    .checked_sub(1)
                    .is_none_or(|before| bytes.get(before).is_some_and(|&b| self.ends_field(b)));
                let may_be = bytes
                    .get(block + i)
                    .is_some_and(|&byte| self.begins_null[usize::from(byte)]);
                *candidate = u8::from(begins && may_be);
            }
            return true;
        };
        let delimiter = self.lines.delimiter;
        let mut begins = [0; AT_ONCE];
        let mut others = 0;
        for ((begin, &before), &this) in begins.iter_mut().zip(before).zip(these) {
            *begin = u8::from((before == delimiter) | (before == b'\n'));
            others |= *begin & u8::from(!is_of_number(this) | (this == delimiter));
        }
        if others == 0 && !self.numeric {
            return false;
        }
        *candidates = [0; AT_ONCE];
        for &first in &self.firsts {
            for ((candidate, &begin), &this) in candidates.iter_mut().zip(&begins).zip(these) {
                *candidate |= begin & u8::from(this == first);
            }
        }
        true
    }

    /// Whether a field that begins here may be null. If this returns false, the field is not null.
    fn may_be_null(&self, field: &[u8]) -> bool {
        match field {
            [] => true,
            [first, rest @ ..] if Some(*first) == self.lines.quote => match rest.first() {
                None => true,
                Some(&inner) => Some(inner) == self.lines.quote || self.begins_null[usize::from(inner)],
            },
            [first, ..] if !self.begins_null[usize::from(*first)] => false,
            [first, ..] if first.is_ascii_whitespace() || *first == self.lines.delimiter => true,
            _ => self.dialect.null_values.iter().any(|word| {
                // Most texts differ in the first byte.
                if field.first() != word.first() {
                    return false;
                }
                field.strip_prefix(&**word).is_some_and(|behind| {
                    behind
                        .first()
                        .is_none_or(|&byte| self.ends_field(byte) || byte.is_ascii_whitespace())
                })
            }),
        }
    }
}

/// Whether most numbers begin with a byte like this one. The range also contains the slash.
#[inline(always)]
fn is_of_number(byte: u8) -> bool {
    byte.wrapping_sub(b'-') <= b'9' - b'-'
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::OnRagged;
    use crate::rows::Next;
    use crate::scan::scan;

    /// A reference implementation that checks every field of every row.
    fn naive(bytes: &[u8], dialect: &Dialect, columns: usize) -> FirstNulls {
        let lines = Lines::new(dialect, columns);
        let (mut found, mut at) = (vec![None; columns], 0);
        while let Next::Row { start, end } = lines.next(bytes, at) {
            let mut fields = Fields::new(&lines, &bytes[start..end], 0);
            for number in 0.. {
                let Ok((text, ended)) = fields.next() else { break };
                let trimmed = text.trim_ascii();
                let null = dialect.null_values.iter().any(|word| *word == *text || word == trimmed);
                if let Some(first @ None) = found.get_mut(number).filter(|_| null) {
                    *first = Some(start as u64);
                }
                if ended == Ended::Row {
                    break;
                }
            }
            at = end;
        }
        found
    }

    fn dialects() -> impl Strategy<Value = Dialect> {
        let words: [&[&str]; 8] = [
            &[""],
            &["", "NA"],
            &["NA", "nan"],
            &["-9", ""],
            &[" x", "a,b"],
            &["\"", "/"],
            &["9"],
            &[],
        ];
        let flags = (any::<bool>(), any::<bool>(), any::<bool>());
        (
            flags,
            proptest::sample::select(words.to_vec()),
            proptest::sample::select(b",; /".to_vec()),
        )
            .prop_map(|((quoted, commented, skip), words, delimiter)| Dialect {
                quote: quoted.then_some(b'"'),
                comment: commented.then_some(b'#'),
                on_ragged: if skip { OnRagged::Skip } else { OnRagged::Error },
                null_values: words.iter().map(|word| word.as_bytes().to_vec()).collect(),
                delimiter,
                ..Dialect::default()
            })
    }

    fn check(bytes: &[u8], dialect: &Dialect, goal: usize, cut: usize) {
        let columns = 3;
        let lines = Lines::new(dialect, columns);
        let new = || NullSearch::new(dialect, columns, Vec::new());
        let mut all = new();
        scan(bytes, 0, &lines, goal, Some(&mut all));
        assert_eq!(
            *all.found(),
            naive(bytes, dialect, columns),
            "{:?}",
            String::from_utf8_lossy(bytes)
        );
        // The results for pieces that begin and end at row boundaries can be combined.
        let (mut front, mut back) = (new(), new());
        let rows = scan(bytes, 0, &lines, cut.max(1), None).cuts;
        let middle = rows.get(1).map_or(bytes.len(), |second| second.start);
        scan(&bytes[..middle], 0, &lines, goal, Some(&mut front));
        scan(&bytes[middle..], middle as u64, &lines, goal, Some(&mut back));
        front.add(&back);
        assert_eq!(front.found(), all.found());
        // A search that continues from the result for the front gives the same result.
        let mut front = new();
        scan(&bytes[..middle], 0, &lines, goal, Some(&mut front));
        let mut on = NullSearch::new(dialect, columns, front.found().clone());
        scan(&bytes[middle..], middle as u64, &lines, goal, Some(&mut on));
        assert_eq!(on.found(), all.found());
    }

    proptest! {
        #[test]
        fn nulls_are_those_that_are_found_field_by_field(
            bytes in proptest::collection::vec(proptest::sample::select(b"NAnax99--,,,;; /\n\n\r\"# ".to_vec()), 0..600),
            dialect in dialects(),
            goal in 1usize..700,
            cut in 1usize..700,
        ) {
            check(&bytes, &dialect, goal, cut);
        }

        /// Long lines with few nulls, so that most blocks of bytes contain no null or one at the edge.
        #[test]
        fn a_null_is_found_wherever_it_stands(
            fields in proptest::collection::vec(
                prop_oneof![40 => "[1-9]{1,9}", 10 => "[a-z]{1,30}", 1 => "", 1 => " ?NA ?", 1 => "\"\"", 1 => "\"[,\nN]\""],
                0..400,
            ),
            columns in 1usize..5,
            newline in proptest::sample::select(vec!["\n", "\r\n"]),
            dialect in dialects(),
            goal in 1usize..3000,
            cut in 1usize..3000,
        ) {
            let rows: Vec<String> = fields.chunks(columns).map(|row| row.join(",")).collect();
            check(rows.join(newline).as_bytes(), &dialect, goal, cut);
        }
    }
}
