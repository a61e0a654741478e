//! Scans bytes for rows.
//!
//! A file is cut at the first line after each multiple of [`CHUNK_BYTES`], unless that line is within quotes. So the
//! cuts, and with them the order of rows, depend only on the bytes of the file. They don't depend on the number of
//! scanning threads, on where each thread begins, or on whether the scan continues from the index of a shorter version
//! of the file.
//!
//! A scan that begins in the middle of a file must guess that a newline ends a row. When the scan of the preceding
//! bytes is complete, the true start of the row is known. If the guess was wrong, the bytes are scanned again. So
//! several threads can scan one file.

use crate::dialect::Lines;
use crate::nulls::NullSearch;
use crate::rows::newline;

/// Approximate size of the rows of a unit in bytes. Including the row that fills it and some slack, a unit fits a
/// buffer of 64 KiB.
pub const CHUNK_BYTES: usize = 56 << 10;

/// Maximum size of a row in bytes. A longer row is treated as a quote that was never closed.
pub const MOST_ROW_BYTES: u64 = 256 << 20;

/// Rows that begin at a position.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Cut {
    /// The position in the scanned bytes.
    pub start: usize,
    /// The number of rows.
    pub rows: u32,
    /// The number of ragged rows that are skipped.
    pub skipped: u32,
}

/// The result of a scan.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Scanned {
    /// The chunks. Each ends where the next begins. Some contain only empty lines and comments, and no rows.
    pub cuts: Vec<Cut>,
    /// The start of a row that ends within quotes, if there is one. It isn't counted.
    pub open: Option<usize>,
}

/// Finds the rows of bytes that consist of whole lines. Cuts them at the first line after each multiple of `goal` bytes
/// of the file. `offset` is the position of the bytes in the file. If `nulls` is given, also searches the rows for
/// nulls.
pub fn scan(bytes: &[u8], offset: u64, lines: &Lines, goal: usize, mut nulls: Option<&mut NullSearch>) -> Scanned {
    let mut found = Scanned::default();
    let mut at = 0;
    let goal = goal.max(1);
    while at < bytes.len() {
        let start = at;
        let behind = (offset + at as u64) % goal as u64;
        let end = newline(bytes, (at + goal - behind as usize).min(bytes.len()) - 1);
        let (mut rows, mut skipped) = (0, 0);
        match plain_rows(&bytes[start..end], lines) {
            Some(count) => {
                (rows, at) = (count, end);
                if let Some(nulls) = &mut nulls {
                    nulls.see_lines(&bytes[start..end], offset + start as u64);
                }
            }
            None => {
                while at < end {
                    let row = lines.past_others(&bytes[..end], at);
                    if row >= end {
                        at = end;
                        break;
                    }
                    let Some(behind) = lines.end(bytes, row) else {
                        found.open = Some(row);
                        break;
                    };
                    at = behind;
                    if lines.is_row(&bytes[row..behind]) {
                        rows += 1;
                        if let Some(nulls) = &mut nulls {
                            nulls.see_row(&bytes[row..behind], offset + row as u64);
                        }
                    } else {
                        skipped += 1;
                    }
                }
            }
        }
        found.cuts.push(Cut { start, rows, skipped });
        if found.open.is_some() {
            break;
        }
    }
    found
}

/// Returns the number of rows of whole lines if each line is a row, or `None` if they must be checked one by one.
fn plain_rows(bytes: &[u8], lines: &Lines) -> Option<u32> {
    let first = *bytes.first()?;
    if lines.fields.is_some() || matches!(first, b'\n' | b'\r') || Some(first) == lines.comment {
        return None;
    }
    // A newline is a neutral placeholder for a missing quote or comment character.
    let quote = lines.quote.unwrap_or(b'\n');
    let comment = lines.comment.unwrap_or(b'\n');
    let (mut newlines, mut others) = (0u32, 0u32);
    // Sums of this many flags fit into a byte, which allows vectorized additions.
    const AT_ONCE: usize = 240;
    let pairs = bytes.windows(AT_ONCE + 1).step_by(AT_ONCE);
    let done = pairs.len() * AT_ONCE;
    for window in pairs {
        let (mut ends, mut odd) = (0u8, 0u8);
        for (&byte, &next) in window[..AT_ONCE].iter().zip(&window[1..]) {
            let end = byte == b'\n';
            ends += u8::from(end);
            let other = end & ((next == b'\n') | (next == b'\r') | (next == comment));
            odd += u8::from(other | ((byte == quote) & (quote != b'\n')));
        }
        newlines += u32::from(ends);
        others += u32::from(odd);
    }
    let tail = &bytes[done..];
    for (i, &byte) in tail.iter().enumerate() {
        let end = byte == b'\n';
        newlines += u32::from(end);
        let other = end
            && tail
                .get(i + 1)
                .is_some_and(|&next| matches!(next, b'\n' | b'\r') || next == comment);
        others += u32::from(other || (byte == quote && quote != b'\n'));
    }
    // The last line of a file may lack a newline.
    (others == 0).then(|| newlines + u32::from(bytes.last() != Some(&b'\n')))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::{Dialect, OnRagged};
    use crate::rows::Next;

    /// Returns the number of rows, the number of skipped rows, and the start of a row that ends within quotes.
    fn naive(bytes: &[u8], lines: &Lines) -> (u32, u32, Option<usize>) {
        let every = Lines {
            fields: None,
            ..lines.clone()
        };
        let (mut rows, mut skipped, mut at) = (0, 0, 0);
        loop {
            match every.next(bytes, at) {
                Next::Row { start, end } => {
                    let counted = lines.is_row(&bytes[start..end]);
                    rows += u32::from(counted);
                    skipped += u32::from(!counted);
                    at = end;
                }
                Next::Open { start } => return (rows, skipped, Some(start)),
                Next::End => return (rows, skipped, None),
            }
        }
    }

    fn dialects() -> impl Strategy<Value = Dialect> {
        (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(quoted, commented, skip)| Dialect {
            quote: quoted.then_some(b'"'),
            comment: commented.then_some(b'#'),
            on_ragged: if skip { OnRagged::Skip } else { OnRagged::Error },
            ..Dialect::default()
        })
    }

    proptest! {
        #[test]
        fn rows_are_those_that_are_found_one_by_one(
            bytes in proptest::collection::vec(proptest::sample::select(b"aaab,,\n\n\r\"#".to_vec()), 0..600),
            dialect in dialects(),
            goal in 1usize..700,
            offset in 0u64..2000,
        ) {
            let lines = Lines::new(&dialect, 2);
            let found = scan(&bytes, offset, &lines, goal, None);
            let (rows, skipped, open) = naive(&bytes, &lines);
            prop_assert_eq!(found.cuts.iter().map(|cut| cut.rows).sum::<u32>(), rows);
            prop_assert_eq!(found.cuts.iter().map(|cut| cut.skipped).sum::<u32>(), skipped);
            prop_assert_eq!(found.open, open);
            // Each cut is the start of this many rows.
            let ends = found.cuts.iter().skip(1).map(|cut| cut.start).chain([open.unwrap_or(bytes.len())]);
            for (cut, end) in found.cuts.iter().zip(ends) {
                prop_assert_eq!(naive(&bytes[cut.start..end], &lines), (cut.rows, cut.skipped, None));
            }
        }

        #[test]
        fn plain_lines_are_counted(
            lengths in proptest::collection::vec(1usize..400, 1..20),
            last in any::<bool>(),
        ) {
            let mut bytes: Vec<u8> = Vec::new();
            for length in &lengths {
                bytes.extend(vec![b'x'; *length]);
                bytes.push(b'\n');
            }
            if last {
                bytes.pop();
            }
            let lines = Lines::new(&Dialect::default(), 1);
            prop_assert_eq!(plain_rows(&bytes, &lines), Some(lengths.len() as u32));
            prop_assert_eq!(naive(&bytes, &lines), (lengths.len() as u32, 0, None));
        }
    }
}
