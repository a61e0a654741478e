//! Finds the rows of a stream whose bytes arrive in pieces. The bytes of most rows are discarded after the rows are
//! counted.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, MemoryFile, Result, try_reserve};
use memchr::{memchr, memrchr};

use crate::dialect::{Dialect, Lines, Names};
use crate::header::Header;
use crate::rows::Next;
use crate::scan::{CHUNK_BYTES, MOST_ROW_BYTES, scan};

/// Number of bytes that are scanned at once, so that they stay in the processor's cache.
const PIECE: usize = 256 << 10;

/// Number of bytes in which the first row is searched for first.
const HEAD: usize = 64 << 10;

/// Selects and keeps some of the rows.
pub trait Keep {
    /// Returns the index of the next row to keep, counted from 0. It must be greater than the index of every row kept
    /// so far.
    fn next(&self) -> u64;

    /// Keeps a row, given by its index, its offset in the stream, and its text including the newline if it has one.
    ///
    /// # Errors
    /// An error ends the stream.
    fn keep(&mut self, number: u64, offset: u64, text: &[u8]) -> Result<()>;
}

/// A stream that is read once.
#[derive(Debug)]
pub struct RowStream {
    name: Arc<str>,
    dialect: Dialect,
    header: Option<Header>,
    lines: Lines,
    /// The bytes that were not processed yet.
    bytes: Vec<u8>,
    /// The offset of these bytes in the stream.
    offset: u64,
    /// Number of rows processed so far.
    rows: u64,
    /// Number of ragged rows skipped so far.
    skipped: u64,
    /// Minimum number of bytes before the end of the current row is searched for again. This limits the number of
    /// searches for long rows.
    patience: usize,
    /// Whether a newline has arrived since the last search.
    line_ended: bool,
}

impl RowStream {
    /// Creates a stream. `name` is used in errors.
    pub fn new(name: &str, dialect: &Dialect) -> RowStream {
        RowStream {
            name: name.into(),
            dialect: dialect.clone(),
            header: None,
            lines: Lines::new(dialect, 0),
            bytes: Vec::new(),
            offset: 0,
            rows: 0,
            skipped: 0,
            patience: HEAD,
            line_ended: false,
        }
    }

    /// Returns the header of the stream, if it is already known.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// Returns the number of rows processed so far.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Returns the number of ragged rows skipped so far.
    pub fn skipped(&self) -> u64 {
        self.skipped
    }

    /// Returns the memory of the stream in bytes.
    pub fn held_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// Processes more bytes.
    ///
    /// # Errors
    /// Errors contain the name of the stream. [`ErrorKind::Malformed`] if there is no first row or it is damaged.
    /// [`ErrorKind::Unsupported`] if the stream has another format. [`ErrorKind::Limit`] if a row is too long. Also
    /// returns errors of `keep`.
    pub fn push(&mut self, bytes: &[u8], keep: &mut dyn Keep) -> Result<()> {
        for piece in bytes.chunks(PIECE) {
            let before = self.bytes.len();
            let pushed = try_reserve(&mut self.bytes, piece.len(), "a piece of a stream").and_then(|()| {
                self.bytes.extend_from_slice(piece);
                self.line_ended |= memchr(b'\n', &self.bytes[before..]).is_some();
                match self.line_ended && self.bytes.len() >= self.patience {
                    true => self.pass(false, keep),
                    false => self.check_length(),
                }
            });
            pushed.map_err(|e| e.at_path(&self.name))?;
        }
        Ok(())
    }

    /// Processes the remaining bytes at the end of the stream.
    ///
    /// # Errors
    /// Like [`RowStream::push`]. [`ErrorKind::Malformed`] if the last row ends within quotes.
    pub fn end(&mut self, keep: &mut dyn Keep) -> Result<()> {
        self.pass(true, keep).map_err(|e| e.at_path(&self.name))
    }

    /// Processes all complete rows.
    fn pass(&mut self, ended: bool, keep: &mut dyn Keep) -> Result<()> {
        self.line_ended = false;
        if self.header.is_none() && !self.read_header(ended)? {
            return self.check_length();
        }
        let whole = match ended {
            true => self.bytes.len(),
            false => memrchr(b'\n', &self.bytes).map_or(0, |newline| newline + 1),
        };
        let found = scan(&self.bytes[..whole], self.offset, &self.lines, CHUNK_BYTES, None);
        for cut in &found.cuts {
            let (mut at, mut number) = (cut.start, self.rows);
            self.rows += u64::from(cut.rows);
            self.skipped += u64::from(cut.skipped);
            while keep.next() < self.rows {
                let Next::Row { start, end } = self.lines.next(&self.bytes[..whole], at) else {
                    return Err(Error::new(ErrorKind::Internal, "a row that was counted does not exist"));
                };
                if number == keep.next() {
                    keep.keep(number, self.offset + start as u64, &self.bytes[start..end])?;
                }
                (number, at) = (number + 1, end);
            }
        }
        let passed = found.open.unwrap_or(whole);
        if ended && found.open.is_some() {
            let reason = "a row ends within quotes: the stream is cut short, or has a stray quote. quote=None reads quotes as \
                          ordinary characters";
            return Err(Error::new(ErrorKind::Malformed, reason).at_offset(self.offset + passed as u64));
        }
        self.bytes.drain(..passed);
        self.offset += passed as u64;
        self.patience = if found.open.is_some() { self.later() } else { 0 };
        self.check_length()
    }

    /// Reads the first row, if it is complete.
    fn read_header(&mut self, ended: bool) -> Result<bool> {
        let lines = Lines {
            fields: None,
            ..Lines::new(&self.dialect, 0)
        };
        // A byte order mark before the first row doesn't affect where the row ends, unless the row begins with a quote.
        // Skipping it here is always safe.
        let mark = if self.bytes.starts_with(b"\xef\xbb\xbf") { 3 } else { 0 };
        let is_whole = match (&self.dialect.names, lines.next(&self.bytes, mark)) {
            (Names::Given(_), _) => true,
            (_, Next::Row { end, .. }) => end < self.bytes.len(),
            _ => false,
        };
        if !ended && !is_whole {
            self.patience = self.later();
            return Ok(false);
        }
        let known = [
            (&b"\x1f\x8b"[..], "gzip", "gunzip -c"),
            (b"\x28\xb5\x2f\xfd", "zstandard", "zstd -dc"),
        ];
        if let Some((_, how, program)) = known.iter().find(|(magic, ..)| self.bytes.starts_with(magic)) {
            let reason = format!("the stream is compressed with {how}: pass the output of `{program}`");
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        let header = Header::read(&MemoryFile(&self.bytes), &self.dialect)?;
        self.lines = Lines::new(&self.dialect, header.names.len());
        self.bytes.drain(..header.first as usize);
        self.offset = header.first;
        self.header = Some(header);
        Ok(true)
    }

    /// Returns the number of bytes at which the next search is worthwhile.
    fn later(&self) -> usize {
        (2 * self.bytes.len()).min(MOST_ROW_BYTES as usize)
    }

    fn check_length(&self) -> Result<()> {
        if self.bytes.len() as u64 <= MOST_ROW_BYTES + PIECE as u64 {
            return Ok(());
        }
        let reason = format!(
            "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None reads quotes as ordinary characters"
        );
        Err(Error::new(ErrorKind::Limit, reason).at_offset(self.offset))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Keeps every `step`-th row.
    struct Every {
        step: u64,
        next: u64,
        kept: Vec<(u64, u64, Vec<u8>)>,
    }

    impl Keep for Every {
        fn next(&self) -> u64 {
            self.next
        }

        fn keep(&mut self, number: u64, offset: u64, text: &[u8]) -> Result<()> {
            assert_eq!(number, self.next);
            self.next += self.step;
            self.kept.push((number, offset, text.to_vec()));
            Ok(())
        }
    }

    /// The kept rows, the numbers of rows and of skipped rows, and an error.
    type Found = (Vec<(u64, u64, Vec<u8>)>, (u64, u64), Option<(ErrorKind, Option<u64>)>);

    fn passed(bytes: &[u8], dialect: &Dialect, piece: usize, step: u64) -> Found {
        let mut keep = Every {
            step,
            next: 0,
            kept: Vec::new(),
        };
        let mut stream = RowStream::new("x", dialect);
        let mut pass = || {
            for piece in bytes.chunks(piece) {
                stream.push(piece, &mut keep)?;
            }
            stream.end(&mut keep)
        };
        let error = pass().err().map(|e| (e.kind(), e.location().offset));
        (keep.kept, (stream.rows(), stream.skipped()), error)
    }

    /// A reference implementation that processes all bytes at once, row by row.
    fn naive(bytes: &[u8], dialect: &Dialect, step: u64) -> Found {
        let header = match Header::read(&MemoryFile(bytes), dialect) {
            Ok(header) => header,
            Err(error) => return (Vec::new(), (0, 0), Some((error.kind(), error.location().offset))),
        };
        let lines = Lines::new(dialect, header.names.len());
        let every = Lines {
            fields: None,
            ..lines.clone()
        };
        let (mut kept, mut rows, mut skipped, mut at) = (Vec::new(), 0, 0, header.first as usize);
        loop {
            match every.next(bytes, at) {
                Next::Row { start, end } if !lines.is_row(&bytes[start..end]) => (skipped, at) = (skipped + 1, end),
                Next::Row { start, end } => {
                    if rows % step == 0 {
                        kept.push((rows, start as u64, bytes[start..end].to_vec()));
                    }
                    (rows, at) = (rows + 1, end);
                }
                Next::Open { start } => {
                    return (kept, (rows, skipped), Some((ErrorKind::Malformed, Some(start as u64))));
                }
                Next::End => return (kept, (rows, skipped), None),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn rows_are_the_same_however_bytes_come(
            bytes in proptest::collection::vec(proptest::sample::select(b"aaab,,\n\n\r\"#".to_vec()), 0..300),
            // With 400 repetitions, there are more bytes than the search for the first row covers, and longer rows.
            again in proptest::sample::select(vec![1usize, 1, 400]),
            piece in proptest::sample::select(vec![1usize, 7, 1000, 100_000, 1_000_000]),
            commented in any::<bool>(),
            skip in any::<bool>(),
            names in proptest::sample::select(vec![Names::FirstRow, Names::Numbered, Names::Given(vec!["a".into(), "b".into()])]),
            step in 1u64..5,
        ) {
            let dialect = Dialect {
                comment: commented.then_some(b'#'),
                on_ragged: if skip { crate::OnRagged::Skip } else { crate::OnRagged::Error },
                names,
                ..Dialect::default()
            };
            let bytes = bytes.repeat(again);
            prop_assert_eq!(passed(&bytes, &dialect, piece, step), naive(&bytes, &dialect, step));
        }
    }

    #[test]
    fn long_rows_are_skipped_quickly() {
        let mut bytes = b"a,b\n1,2\n3,\"".to_vec();
        bytes.extend(b"xx\n".repeat(10 << 20));
        bytes.extend(b"\"\n5,6\n");
        let (kept, rows, error) = passed(&bytes, &Dialect::default(), 1000, 2);
        assert_eq!((kept.len(), rows, error), (2, (3, 0), None));
        assert_eq!(kept[1].2, b"5,6\n");
    }

    #[test]
    fn an_endless_row_is_an_error_before_memory_is_full() {
        let mut stream = RowStream::new("x", &Dialect::default());
        let mut none = Every {
            step: 1,
            next: u64::MAX,
            kept: Vec::new(),
        };
        stream.push(b"a\n\"", &mut none).unwrap();
        let piece = b"xxxxxxx\n".repeat(1 << 17);
        let error = (0..300).find_map(|_| stream.push(&piece, &mut none).err()).unwrap();
        assert_eq!((error.kind(), error.location().offset), (ErrorKind::Limit, Some(2)));
        assert!(stream.held_bytes() < 1 << 30);
    }
}
