//! Rows of a stream: its bytes come piece by piece, and those of most rows are forgotten once the rows are counted.

use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, try_reserve};
use memchr::{memchr, memrchr};

use crate::dialect::{Dialect, Lines, Names};
use crate::header::Header;
use crate::rows::Next;
use crate::scan::{MOST_ROW_BYTES, STRETCH_BYTES, scan};

/// Bytes that are scanned at once: they stay in a cache of the processor.
const PIECE: usize = 256 << 10;

/// Bytes of which the first row is looked for first.
const HEAD: usize = 64 << 10;

/// Whoever wants some of the rows.
pub trait Keep {
    /// The number of the next row that is wanted, from 0: greater than that of any row that was kept.
    fn next(&self) -> u64;

    /// Takes it: its number, its byte of the stream, and its text, with the newline if it has one.
    ///
    /// # Errors
    /// Ends the stream.
    fn keep(&mut self, number: u64, offset: u64, text: &[u8]) -> Result<()>;
}

/// A stream that is read once.
#[derive(Debug)]
pub struct RowStream {
    name: Arc<str>,
    dialect: Dialect,
    header: Option<Header>,
    lines: Lines,
    /// What isn't passed yet.
    bytes: Vec<u8>,
    /// The byte of the stream that it begins with.
    offset: u64,
    /// Rows that were passed.
    rows: u64,
    /// Bytes that there should be before another look for the end of what it begins with: so that what is long is
    /// looked at a few times, not with each piece.
    patience: usize,
    /// Whether a line ended since that look.
    line_ended: bool,
}

/// The first bytes of a stream as a file.
struct Head<'a>(&'a [u8], &'a str);

impl ReadAt for Head<'_> {
    fn location(&self) -> &str {
        self.1
    }

    fn size(&self) -> Result<u64> {
        Ok(self.0.len() as u64)
    }

    fn read_at(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        let from = usize::try_from(offset)
            .ok()
            .and_then(|at| self.0.get(at..))
            .unwrap_or_default();
        let len = from.len().min(out.len());
        out[..len].copy_from_slice(&from[..len]);
        Ok(len)
    }
}

impl RowStream {
    /// A stream that is called so in errors.
    pub fn new(name: &str, dialect: &Dialect) -> RowStream {
        RowStream {
            name: name.into(),
            dialect: dialect.clone(),
            header: None,
            lines: Lines::new(dialect, 0),
            bytes: Vec::new(),
            offset: 0,
            rows: 0,
            patience: HEAD,
            line_ended: false,
        }
    }

    /// What its first row says, once that is known.
    pub fn header(&self) -> Option<&Header> {
        self.header.as_ref()
    }

    /// Rows that were passed.
    pub fn rows(&self) -> u64 {
        self.rows
    }

    /// Bytes that it holds.
    pub fn held_bytes(&self) -> usize {
        self.bytes.capacity()
    }

    /// Passes over more bytes.
    ///
    /// # Errors
    /// With the stream's name: malformed, if there is no first row, or it is damaged; unsupported, if it is of another
    /// format; a limit, if a row is too long; whatever `keep` returns.
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

    /// Passes over what is left, for no more bytes come.
    ///
    /// # Errors
    /// As [`RowStream::push`]; malformed, if the last row ends within quotes.
    pub fn end(&mut self, keep: &mut dyn Keep) -> Result<()> {
        self.pass(true, keep).map_err(|e| e.at_path(&self.name))
    }

    /// Passes over the rows that have ended.
    fn pass(&mut self, ended: bool, keep: &mut dyn Keep) -> Result<()> {
        self.line_ended = false;
        if self.header.is_none() && !self.read_header(ended)? {
            return self.check_length();
        }
        let whole = match ended {
            true => self.bytes.len(),
            false => memrchr(b'\n', &self.bytes).map_or(0, |newline| newline + 1),
        };
        let found = scan(&self.bytes[..whole], self.offset, &self.lines, STRETCH_BYTES, None);
        for cut in &found.cuts {
            let (mut at, mut number) = (cut.start, self.rows);
            self.rows += u64::from(cut.rows);
            while keep.next() < self.rows {
                let Next::Row { start, end } = self.lines.next(&self.bytes[..whole], at) else {
                    return Err(Error::new(ErrorKind::Internal, "a row that was counted isn't there"));
                };
                if number == keep.next() {
                    keep.keep(number, self.offset + start as u64, &self.bytes[start..end])?;
                }
                (number, at) = (number + 1, end);
            }
        }
        let passed = found.open.unwrap_or(whole);
        if ended && found.open.is_some() {
            let reason = "a row ends within quotes: the stream is cut short, or a quote isn't one; quote=None takes quotes as \
                          they are";
            return Err(Error::new(ErrorKind::Malformed, reason).at_offset(self.offset + passed as u64));
        }
        self.bytes.drain(..passed);
        self.offset += passed as u64;
        self.patience = if found.open.is_some() { self.later() } else { 0 };
        self.check_length()
    }

    /// Reads the first row, if all of it is there.
    fn read_header(&mut self, ended: bool) -> Result<bool> {
        let lines = Lines {
            fields: None,
            ..Lines::new(&self.dialect, 0)
        };
        // A mark in front of the first row changes nothing of where it ends, unless it is quoted: a longer look does no
        // harm.
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
            let reason = format!("the stream is compressed with {how}: give what `{program}` writes");
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        let header = Header::read(&Head(&self.bytes, &self.name), &self.dialect)?;
        self.lines = Lines::new(&self.dialect, header.names.len());
        self.bytes.drain(..header.first as usize);
        self.offset = header.first;
        self.header = Some(header);
        Ok(true)
    }

    /// When it is worth to look again.
    fn later(&self) -> usize {
        (2 * self.bytes.len()).min(MOST_ROW_BYTES as usize)
    }

    fn check_length(&self) -> Result<()> {
        if self.bytes.len() as u64 <= MOST_ROW_BYTES + PIECE as u64 {
            return Ok(());
        }
        let reason = format!(
            "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None takes quotes as they are"
        );
        Err(Error::new(ErrorKind::Limit, reason).at_offset(self.offset))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Keeps every few rows.
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

    type Found = (Vec<(u64, u64, Vec<u8>)>, u64, Option<(ErrorKind, Option<u64>)>);

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
        (keep.kept, stream.rows(), error)
    }

    /// One row after the other, of all bytes at once.
    fn naive(bytes: &[u8], dialect: &Dialect, step: u64) -> Found {
        let header = match Header::read(&Head(bytes, "x"), dialect) {
            Ok(header) => header,
            Err(error) => return (Vec::new(), 0, Some((error.kind(), error.location().offset))),
        };
        let lines = Lines::new(dialect, header.names.len());
        let (mut kept, mut rows, mut at) = (Vec::new(), 0, header.first as usize);
        loop {
            match lines.next(bytes, at) {
                Next::Row { start, end } => {
                    if rows % step == 0 {
                        kept.push((rows, start as u64, bytes[start..end].to_vec()));
                    }
                    (rows, at) = (rows + 1, end);
                }
                Next::Open { start } => return (kept, rows, Some((ErrorKind::Malformed, Some(start as u64)))),
                Next::End => return (kept, rows, None),
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(128))]

        #[test]
        fn rows_are_the_same_however_bytes_come(
            bytes in proptest::collection::vec(proptest::sample::select(b"aaab,,\n\n\r\"#".to_vec()), 0..300),
            // More than is looked at for the first row, and longer rows.
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
    fn long_rows_are_passed_in_little_time() {
        let mut bytes = b"a,b\n1,2\n3,\"".to_vec();
        bytes.extend(b"xx\n".repeat(10 << 20));
        bytes.extend(b"\"\n5,6\n");
        let (kept, rows, error) = passed(&bytes, &Dialect::default(), 1000, 2);
        assert_eq!((kept.len(), rows, error), (2, 3, None));
        assert_eq!(kept[1].2, b"5,6\n");
    }

    #[test]
    fn a_row_without_end_is_an_error_before_memory_is_full() {
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
