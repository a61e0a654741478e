//! Which columns have fields that stand for no value. Integers and truth values have no value of their own for that,
//! so their dtype depends on whether there is one anywhere: a look at some rows can't tell.
//!
//! The search runs beside the scan for rows, over the same bytes. It asks of each byte behind a delimiter or a newline
//! whether a null may begin there, many at once, and looks at the fields of a row only where one may.

use memchr::memrchr;

use crate::dialect::{Dialect, Lines};
use crate::fields::{Ended, Fields};
use crate::rows::newline;

/// Of each column the byte of the file at which the first row starts that has a null there; `None` if no row has one.
pub type FirstNulls = Vec<Option<u64>>;

/// Bytes that are asked about at once.
const AT_ONCE: usize = 240;

/// Searches rows for nulls.
#[derive(Clone, Debug)]
pub struct NullSearch {
    dialect: Dialect,
    lines: Lines,
    /// The bytes that a null without quotes can begin with.
    firsts: Vec<u8>,
    /// The same by byte.
    begins_null: [bool; 256],
    /// Whether one of these is a byte that a number has.
    numeric: bool,
    found: FirstNulls,
    /// Columns in which none was found yet.
    left: usize,
}

impl NullSearch {
    /// Starts with what was found in front of the rows that it will see, which is of all columns or of none.
    pub fn new(dialect: &Dialect, columns: usize, mut found: FirstNulls) -> NullSearch {
        found.resize(columns, None);
        let mut firsts: Vec<u8> = (0..=u8::MAX).filter(u8::is_ascii_whitespace).collect();
        // A field without any byte ends where it begins.
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

    /// What decides where rows are.
    pub fn lines(&self) -> &Lines {
        &self.lines
    }

    /// What was found.
    pub fn found(&self) -> &FirstNulls {
        &self.found
    }

    /// Takes what a search found in rows behind those that this one saw.
    pub fn add(&mut self, behind: &NullSearch) {
        for (first, &other) in self.found.iter_mut().zip(&behind.found) {
            *first = first.or(other);
        }
        self.left = self.found.iter().filter(|first| first.is_none()).count();
    }

    /// Looks at lines of which each is a row without quotes. `offset` is that of the bytes in the file.
    pub(crate) fn see_lines(&mut self, bytes: &[u8], offset: u64) {
        // Up to `at` lie rows that were looked at, and this column of the row that begins there.
        let (mut row, mut at, mut column) = (0, 0, 0);
        let mut candidates = [0; AT_ONCE];
        for block in (0..bytes.len()).step_by(AT_ONCE) {
            if self.left == 0 || !self.find_candidates(bytes, block, &mut candidates) {
                continue;
            }
            let eights = candidates.as_chunks::<8>().0.iter().enumerate();
            // Most have none.
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
        // The last line of a file may have no newline: an empty field at its end has no byte to begin with.
        if bytes.last() == Some(&self.lines.delimiter) {
            let row = memrchr(b'\n', bytes).map_or(0, |before| before + 1);
            self.see_row(&bytes[row..], offset + row as u64);
        }
    }

    /// Looks at the fields of a row, which starts at this byte of the file, up to one that is damaged.
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

    /// Whether a column has had no null so far.
    #[inline(always)]
    fn is_open(&self, column: usize) -> bool {
        matches!(self.found.get(column), Some(None))
    }

    fn ends_field(&self, byte: u8) -> bool {
        byte == self.lines.delimiter || byte == b'\n'
    }

    /// Marks the bytes of a block that a field begins with, and that a null may begin with. Whether there may be any.
    fn find_candidates(&self, bytes: &[u8], block: usize, candidates: &mut [u8; AT_ONCE]) -> bool {
        let before = block
            .checked_sub(1)
            .and_then(|before| bytes[before..].first_chunk::<AT_ONCE>());
        let (Some(before), Some(these)) = (before, bytes[block..].first_chunk::<AT_ONCE>()) else {
            // At either end of the bytes.
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

    /// Whether a field that begins here may be a null: if it isn't, it is none.
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
                // Most texts differ in a byte.
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

/// Whether a byte is one that most numbers begin with; a slash as well, as it lies between the others.
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

    /// Field by field, row by row.
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
        // Pieces that begin and end with a row find the same.
        let (mut front, mut back) = (new(), new());
        let rows = scan(bytes, 0, &lines, cut.max(1), None).cuts;
        let middle = rows.get(1).map_or(bytes.len(), |second| second.start);
        scan(&bytes[..middle], 0, &lines, goal, Some(&mut front));
        scan(&bytes[middle..], middle as u64, &lines, goal, Some(&mut back));
        front.add(&back);
        assert_eq!(front.found(), all.found());
        // One that goes on from what lies in front finds the same as well.
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

        /// Long lines of few nulls, so that blocks of bytes have none, or one at their ends.
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
