//! Joins the results of scans to the chunks of a file.

use std::collections::VecDeque;

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::file::CsvChunk;
use crate::scan::{CHUNK_BYTES, MOST_ROW_BYTES};

/// Minimum size in bytes of a chunk without rows. Smaller ones are merged into the previous chunk.
const EMPTY_BYTES: u64 = 1 << 20;

/// Maximum size of a chunk in bytes. A chunk ends with the row that fills it.
pub(crate) const MOST_BYTES: u64 = MOST_ROW_BYTES + EMPTY_BYTES + 2 * CHUNK_BYTES as u64;

/// Rows that begin at a byte of the file, up to the next cut.
#[derive(Clone, Copy, Debug)]
struct Cut {
    offset: u64,
    rows: u32,
    skipped: u32,
}

/// Joins the results of scanning consecutive pieces of a file to its chunks. The chunks don't depend on the division
/// into pieces.
#[derive(Debug)]
pub struct Joining {
    goal: u64,
    empty: u64,
    /// Rows found after the last multiple of `goal`. The next piece may add rows to it.
    cut: Option<Cut>,
    /// The previous chunk. The rows in `cut` may still be merged into it.
    pending: Option<Cut>,
    found: VecDeque<CsvChunk>,
}

impl Default for Joining {
    fn default() -> Self {
        Joining::new(CHUNK_BYTES as u64, EMPTY_BYTES)
    }
}

impl Joining {
    /// Creates chunks of about `goal` bytes. Chunks without rows have at least `empty` bytes.
    pub fn new(goal: u64, empty: u64) -> Joining {
        Joining {
            goal: goal.max(1),
            empty,
            cut: None,
            pending: None,
            found: VecDeque::new(),
        }
    }

    /// Adds the result of a scan: `rows` rows and `skipped` ragged rows that begin at byte `offset` of the file.
    /// `offset` is either the first byte of the rows or the end of the previous rows.
    ///
    /// # Errors
    /// [`ErrorKind::Limit`] if a row is too long.
    pub fn push(&mut self, offset: u64, rows: u32, skipped: u32) -> Result<()> {
        match &mut self.cut {
            Some(cut) if cut.offset / self.goal == offset / self.goal => {
                cut.rows += rows;
                cut.skipped += skipped;
            }
            _ => {
                self.begin()?;
                self.cut = Some(Cut { offset, rows, skipped });
            }
        }
        Ok(())
    }

    /// Returns the next complete chunk.
    pub fn pop(&mut self) -> Option<CsvChunk> {
        self.found.pop_front()
    }

    /// Ends the last chunk at the end of the file.
    ///
    /// # Errors
    /// Like [`Joining::push`].
    pub fn end(&mut self, size: u64) -> Result<()> {
        self.begin()?;
        match self.pending.take() {
            Some(last) if size > last.offset => self.finish(last, size),
            _ => Ok(()),
        }
    }

    /// Begins a chunk with the latest rows, or merges them into the previous chunk.
    fn begin(&mut self) -> Result<()> {
        let Some(cut) = self.cut.take() else { return Ok(()) };
        match &mut self.pending {
            Some(pending) if (cut.rows == 0 || pending.rows == 0) && cut.offset - pending.offset < self.empty => {
                pending.rows += cut.rows;
                pending.skipped += cut.skipped;
                Ok(())
            }
            pending => match pending.replace(cut) {
                Some(whole) => self.finish(whole, cut.offset),
                None => Ok(()),
            },
        }
    }

    fn finish(&mut self, whole: Cut, end: u64) -> Result<()> {
        let Cut { offset, rows, skipped } = whole;
        let len = end - offset;
        if len > MOST_BYTES {
            return Err(too_long(offset));
        }
        let len = len as u32;
        self.found.push_back(CsvChunk {
            offset,
            len,
            rows,
            skipped,
        });
        Ok(())
    }
}

#[cold]
fn too_long(offset: u64) -> Error {
    let reason = format!(
        "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None reads quotes as ordinary characters"
    );
    Error::new(ErrorKind::Limit, reason).at_offset(offset)
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::MemoryFile;
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::{Dialect, Names, OnRagged};
    use crate::header::Header;
    use crate::index::{decode_front, encode_index};
    use crate::nulls::NullSearch;
    use crate::scan::scan;

    /// Returns the chunks of a text from byte `from` on, at which a row or other text between rows starts. The text is
    /// scanned in pieces. Each piece ends at one of the given bytes, extended to the end of its line or row. Returns
    /// `None` if a row ends within quotes.
    fn chunks(
        text: &[u8],
        from: u64,
        nulls: &mut NullSearch,
        goal: u64,
        empty: u64,
        ends: &[usize],
    ) -> Option<Vec<CsvChunk>> {
        let lines = nulls.lines().clone();
        let mut joining = Joining::new(goal, empty);
        let mut at = from as usize;
        for &end in ends.iter().chain([&text.len()]) {
            let mut end = end;
            while at < end {
                let line = crate::rows::newline(text, end - 1);
                let found = scan(&text[at..line], at as u64, &lines, goal as usize, Some(nulls));
                if found.open.is_some_and(|_| found.cuts.iter().all(|cut| cut.rows == 0)) {
                    if line == text.len() {
                        return None;
                    }
                    end = line + 1;
                    continue;
                }
                for cut in &found.cuts {
                    joining.push((at + cut.start) as u64, cut.rows, cut.skipped).unwrap();
                }
                at = found.open.map_or(line, |open| at + open);
            }
        }
        joining.end(text.len() as u64).unwrap();
        Some(std::iter::from_fn(|| joining.pop()).collect())
    }

    fn texts() -> impl Strategy<Value = Vec<u8>> {
        let piece = proptest::sample::select(vec![
            &b"a"[..],
            b"bcd",
            b",",
            b",",
            b"\n",
            b"\n",
            b"\n",
            b"\r\n",
            b"\r",
            b"\"",
            b"\"",
            b"\"\"",
            b"#",
            b"\"\n\",\"",
        ]);
        proptest::collection::vec(piece, 0..250).prop_map(|pieces| pieces.concat())
    }

    fn dialects() -> impl Strategy<Value = Dialect> {
        (any::<bool>(), any::<bool>(), any::<bool>()).prop_map(|(quoted, commented, skip)| Dialect {
            quote: quoted.then_some(b'"'),
            comment: commented.then_some(b'#'),
            on_ragged: if skip { OnRagged::Skip } else { OnRagged::Error },
            names: Names::Given(vec!["a".into(), "b".into()]),
            null_values: vec![Vec::new(), b"a".to_vec()],
            ..Dialect::default()
        })
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]

        #[test]
        fn chunks_depend_on_the_bytes_alone(
            text in texts(),
            dialect in dialects(),
            mut ends in proptest::collection::vec(1usize..500, 0..12),
            goal in 1u64..80,
            empty in 1u64..200,
        ) {
            let mut nulls = NullSearch::new(&dialect, 2, Vec::new());
            ends.retain(|&end| end <= text.len());
            let mut again = nulls.clone();
            let whole = chunks(&text, 0, &mut nulls, goal, empty, &[]);
            prop_assert_eq!(&chunks(&text, 0, &mut again, goal, empty, &ends), &whole);
            prop_assert_eq!(again.found(), nulls.found());
            let Some(whole) = whole else { return Ok(()) };
            let mut end = 0;
            for chunk in &whole {
                prop_assert_eq!(chunk.offset, end);
                end += u64::from(chunk.len);
                prop_assert!(chunk.rows > 0 || chunk.offset == 0 || u64::from(chunk.len) >= empty || end == text.len() as u64);
            }
            prop_assert_eq!(end, text.len() as u64);
            // A scan that begins with any chunk finds the same later chunks.
            for (number, chunk) in whole.iter().enumerate() {
                let behind = chunks(&text, chunk.offset, &mut nulls, goal, empty, &ends);
                prop_assert_eq!(behind.as_deref(), Some(&whole[number..]));
            }
        }

        #[test]
        fn the_index_of_the_front_extended_is_that_of_all(
            text in texts(),
            dialect in dialects(),
            cut in 0usize..700,
            mut ends in proptest::collection::vec(1usize..500, 0..4),
            goal in 1u64..80,
            empty in 1u64..200,
        ) {
            let mut nulls = NullSearch::new(&dialect, 2, Vec::new());
            let mut before = nulls.clone();
            let cut = cut.min(text.len());
            let Some(whole) = chunks(&text, 0, &mut nulls, goal, empty, &[]) else { return Ok(()) };
            let Some(old) = chunks(&text[..cut], 0, &mut before, goal, empty, &[]) else { return Ok(()) };
            let file = MemoryFile(&text);
            let old_nulls = before.found().clone();
            let (Ok(before), Ok(header)) = (Header::read(&MemoryFile(&text[..cut]), &dialect), Header::read(&file, &dialect))
            else { return Ok(()) };
            let index = encode_index(&before, &old, Some(&old_nulls));
            let front = decode_front(&index, &header, &file).unwrap();
            prop_assert_eq!(front.is_some(), old.len() > 2 && cut < text.len());
            let (mut all, known) = front.unwrap_or_default();
            let mut on = NullSearch::new(&dialect, 2, known.unwrap_or_default());
            let from = all.last().map_or(0, |last| last.offset + u64::from(last.len));
            ends.retain(|&end| end <= text.len());
            all.extend(chunks(&text, from, &mut on, goal, empty, &ends).unwrap());
            prop_assert_eq!(encode_index(&header, &all, Some(on.found())), encode_index(&header, &whole, Some(nulls.found())));
            // If the front was rewritten, the index isn't extended.
            let mut other = text.clone();
            for at in [0, cut.saturating_sub(1)] {
                if let Some(byte) = other.get_mut(at) {
                    *byte ^= 1;
                    let found = decode_front(&index, &header, &MemoryFile(&other)).unwrap();
                    prop_assert_eq!(found, None);
                    other.clone_from(&text);
                }
            }
        }
    }
}
