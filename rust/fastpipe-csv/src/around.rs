//! Finds the row around a byte of a file without scanning the file from the start.
//!
//! Quoted fields may contain newlines, so the bytes around a position don't always show where its row starts. After a
//! newline, there are two possibilities: a row starts, or a quoted field continues. Both are followed through a window
//! around the position. A possibility is refuted if a row's number of fields differs from the number of columns. If
//! both lead to the same row, the choice makes no difference. Otherwise, the window grows.
//!
//! One case can't be decided by any window: text without quotes could be the content of a single quoted field. It is
//! treated as rows if it contains several rows with the right number of fields, and the file has at least two columns.
//! So a file is misread if the text of a field looks like such rows for longer than a window.

mod range;

use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, try_filled};

use crate::dialect::{Dialect, Lines, OnRagged};
use crate::fields::Fields;
use crate::header::Header;
use crate::rows::Next;

/// Bytes before the position in the first and in the largest window.
const FIRST_REACH: u64 = 16 << 10;
const LAST_REACH: u64 = 16 << 20;

/// `EVIDENCE` is the number of unquoted rows with the right number of fields that are accepted as rows. Counting the
/// fields of more than `ENOUGH` rows gives no additional information.
const EVIDENCE: usize = 8;
const ENOUGH: usize = 64;

/// The position of a row in a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowAt {
    /// The offset of its first byte.
    pub offset: u64,
    /// Its length in bytes, including the newline. The newline is counted even if the file ends without it.
    pub len: u64,
}

/// Finds the rows around given bytes of a file.
pub struct Surroundings<'f> {
    file: &'f dyn ReadAt,
    lines: Lines,
    columns: usize,
    first: u64,
    size: u64,
    /// One past the last byte of the rows, including the final newline that the file may lack.
    end: u64,
    window: Vec<u8>,
    /// The file offset of the window's first byte.
    from: u64,
}

/// The result of reading a window in one of the two ways.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// A row has the wrong number of fields, so this reading is wrong.
    Refuted,
    /// The reading may be right.
    Possible {
        /// Number of whole rows whose fields were counted.
        rows: usize,
        /// The location of the byte in the window.
        place: Place,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// In a row, given by its start and its end.
    Row(usize, usize),
    /// Outside of rows: in an empty line or a comment.
    Between,
    /// Unknown because the row is not completely in the window.
    Beyond,
}

impl<'f> Surroundings<'f> {
    /// Prepares to find rows of a file with this header.
    ///
    /// # Errors
    /// [`ErrorKind::Storage`] if the file can't be read.
    pub fn new(file: &'f dyn ReadAt, dialect: &Dialect, header: &Header) -> Result<Surroundings<'f>> {
        let mut surroundings = Surroundings::within(file, dialect, header, header.first..header.size);
        if header.first < header.size {
            surroundings.read(header.size - 1, header.size)?;
            surroundings.end += u64::from(surroundings.window != b"\n");
        }
        Ok(surroundings)
    }

    /// Prepares to find rows of a file whose [`span`](Self::span) is known. Reads nothing.
    pub fn within(file: &'f dyn ReadAt, dialect: &Dialect, header: &Header, span: Range<u64>) -> Surroundings<'f> {
        debug_assert_eq!(
            dialect.on_ragged,
            OnRagged::Error,
            "rows with other numbers of fields refute a reading"
        );
        Surroundings {
            file,
            lines: Lines {
                fields: None,
                ..Lines::new(dialect, 0)
            },
            columns: header.names.len(),
            first: span.start,
            size: header.size,
            end: span.end,
            window: Vec::new(),
            from: 0,
        }
    }

    /// Returns the bytes that contain rows, including a final newline that the file may lack.
    pub fn span(&self) -> Range<u64> {
        self.first..self.end
    }

    /// Returns the minimum size of a row with this many columns: the delimiters between the fields and a newline. A row
    /// of one field has at least one more byte, because an empty line is not a row.
    pub fn least_bytes(columns: usize) -> u64 {
        columns.max(2) as u64
    }

    /// Whether a row may start within the last `least` bytes up to and including byte `at`. Quotes don't matter for
    /// this check: rows start only after newlines.
    pub fn may_start(&mut self, at: u64, least: u64) -> Result<bool> {
        let from = (at + 1).saturating_sub(least);
        if from <= self.first {
            return Ok(true);
        }
        self.read(from - 1, at.min(self.size))?;
        Ok(memchr::memchr(b'\n', &self.window).is_some())
    }

    /// Returns the row that contains a byte of the span, or `None` if the byte is in an empty line or a comment.
    ///
    /// # Errors
    /// [`ErrorKind::Malformed`] if the rows around the byte have the wrong number of fields in both readings.
    /// [`ErrorKind::Limit`] if the row can't be determined.
    pub fn row_at(&mut self, at: u64) -> Result<Option<RowAt>> {
        let mut reach = FIRST_REACH;
        loop {
            match self.place_within(at, reach)? {
                Place::Row(start, end) => {
                    let (offset, end) = (self.from + start as u64, self.from + end as u64);
                    // The last row may lack its newline.
                    let missing = end == self.size && self.end > self.size;
                    let len = end - offset + u64::from(missing);
                    return Ok(Some(RowAt { offset, len }));
                }
                Place::Between => return Ok(None),
                Place::Beyond if reach < LAST_REACH => reach *= 4,
                Place::Beyond => {
                    let reason = format!(
                        "cannot determine the row of this byte from the {LAST_REACH} bytes before it, because quotes can be \
                         read in two ways or the row is longer: use method=\"exact\", or quote=None if no fields are quoted"
                    );
                    return Err(Error::new(ErrorKind::Limit, reason).at_offset(at));
                }
            }
        }
    }

    /// Returns the text of the row that was found last.
    pub fn text(&self, row: RowAt) -> &[u8] {
        let start = row.offset.saturating_sub(self.from) as usize;
        let end = start.saturating_add(row.len as usize).min(self.window.len());
        self.window.get(start..end).unwrap_or_default()
    }

    /// Returns the location of a byte, as far as a window of this reach determines it.
    fn place_within(&mut self, at: u64, reach: u64) -> Result<Place> {
        let from = at.saturating_sub(reach).max(self.first);
        let to = at.saturating_add(reach / 4).min(self.size);
        self.read(from, to)?;
        let begin = if from == self.first {
            0
        } else {
            // Either a row or a line within quotes starts after this newline.
            match memchr::memchr(b'\n', &self.window) {
                Some(newline) => newline + 1,
                None => return Ok(Place::Beyond),
            }
        };
        let place = (at - from) as usize;
        let whole = to == self.size;
        let plain = self.follow(begin, place, whole);
        if from == self.first || self.lines.quote.is_none() {
            return match plain {
                Reading::Refuted => Err(self.ragged(at)),
                Reading::Possible { place, .. } => Ok(place),
            };
        }
        let quoted = match self.lines.end_from_within(&self.window, begin) {
            None if whole => Reading::Refuted,
            Some(end) if whole || self.window[end - 1] == b'\n' => self.follow(end, place, whole),
            _ => Reading::Possible {
                rows: 0,
                place: Place::Beyond,
            },
        };
        use Reading::{Possible, Refuted};
        Ok(match (plain, quoted) {
            (Refuted, Refuted) => return Err(self.ragged(at)),
            (Possible { place, .. }, Refuted) | (Refuted, Possible { place, .. }) => place,
            (Possible { place: one, .. }, Possible { place: other, .. }) if one == other => one,
            // Not for one column: every line of any text has one field.
            (Possible { rows, place }, Possible { rows: 0, .. })
            | (Possible { rows: 0, .. }, Possible { rows, place })
                if rows >= EVIDENCE && self.columns > 1 =>
            {
                place
            }
            _ => Place::Beyond,
        })
    }

    /// Follows the rows through the window, starting with the row at `at`. Counts the fields of rows from a little
    /// before the byte onwards.
    fn follow(&self, mut at: usize, byte: usize, whole: bool) -> Reading {
        let bytes = &self.window;
        let (mut rows, mut place) = (0, Place::Beyond);
        let from = byte - byte / 4;
        loop {
            let (start, end) = match self.lines.next(bytes, at) {
                Next::Row { start, end } => (start, (whole || bytes[end - 1] == b'\n').then_some(end)),
                Next::Open { .. } if whole => return Reading::Refuted,
                Next::Open { start } => (start, None),
                Next::End => (usize::MAX, None),
            };
            if (at..start).contains(&byte) {
                place = Place::Between;
            }
            let Some(end) = end else {
                return Reading::Possible { rows, place };
            };
            if end > from {
                if Fields::count(&self.lines, &bytes[start..end]) != Some(self.columns) {
                    return Reading::Refuted;
                }
                rows += 1;
            }
            // The last row may lack its newline, which counts as part of the row.
            at = end + usize::from(bytes[end - 1] != b'\n');
            if (start..at).contains(&byte) {
                place = Place::Row(start, end);
            }
            if rows >= ENOUGH && place != Place::Beyond {
                return Reading::Possible { rows, place };
            }
        }
    }

    /// Reads a range of the file into the window.
    fn read(&mut self, from: u64, to: u64) -> Result<()> {
        let len = (to - from) as usize;
        if self.window.capacity() < len {
            self.window = try_filled(0, len, "the bytes around a row")?;
        }
        self.window.resize(len, 0);
        self.from = from;
        let found = self.file.read_at(from, &mut self.window)?;
        if found < len {
            let reason = "the file became shorter while rows were drawn: start again when no process writes to it";
            return Err(Error::new(ErrorKind::Storage, reason));
        }
        Ok(())
    }

    #[cold]
    fn ragged(&self, at: u64) -> Error {
        let reason = format!(
            "rows around this byte don't have {} fields, the number of columns, with either reading of quotes: read_csv shows \
             which rows, and method=\"exact\" draws without them",
            self.columns
        );
        Error::new(ErrorKind::Malformed, reason).at_offset(at)
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::MemoryFile;
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::Names;

    fn dialect(quoted: bool, commented: bool) -> Dialect {
        Dialect {
            quote: quoted.then_some(b'"'),
            comment: commented.then_some(b'#'),
            ..Dialect::default()
        }
    }

    /// Returns the row of each byte of the span, found by a scan from the first row.
    fn scanned(bytes: &[u8], dialect: &Dialect, header: &Header) -> Vec<Option<RowAt>> {
        let lines = Lines::new(dialect, header.names.len());
        let mut found = vec![None; bytes.len() + 1 - header.first as usize];
        let mut at = header.first as usize;
        while let Next::Row { start, end } = lines.next(bytes, at) {
            let len = end - start + usize::from(bytes[end - 1] != b'\n');
            let row = RowAt {
                offset: start as u64,
                len: len as u64,
            };
            found[start - header.first as usize..][..len].fill(Some(row));
            at = end;
        }
        found
    }

    fn field() -> impl Strategy<Value = Vec<u8>> {
        prop_oneof![
            proptest::collection::vec(proptest::sample::select(b"abc\"# ".to_vec()), 0..6)
                .prop_map(|text| if text.starts_with(b"\"") { b"x".to_vec() } else { text }),
            proptest::collection::vec(proptest::sample::select(b"ab,\n\r\"#".to_vec()), 0..30).prop_map(|text| {
                let mut quoted = vec![b'"'];
                for byte in text {
                    quoted.push(byte);
                    if byte == b'"' {
                        quoted.push(byte);
                    }
                }
                quoted.push(b'"');
                quoted
            }),
        ]
    }

    fn bytes_of(span: &Range<u64>) -> usize {
        (span.end - span.start) as usize
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// A few rows are repeated many times so that windows begin inside of the file.
        #[test]
        fn rows_are_those_of_a_scan(
            rows in proptest::collection::vec(proptest::collection::vec(field(), 3), 1..40),
            between in proptest::sample::select(vec!["", "\n", "\r\n", "#a,\"b\n"]),
            newline in proptest::sample::select(vec!["\n", "\r\n"]),
            last in any::<bool>(),
            again in 1usize..300,
            draws in proptest::collection::vec(any::<prop::sample::Index>(), 40),
        ) {
            let mut bytes = b"a,b,c\n".to_vec();
            for row in rows.iter().cycle().take(rows.len() * again) {
                let text = row.join(&b',');
                if text.starts_with(b"#") {
                    continue;
                }
                bytes.extend_from_slice(&text);
                bytes.extend_from_slice(newline.as_bytes());
                bytes.extend_from_slice(between.as_bytes());
            }
            if last {
                while bytes.len() > 6 && matches!(bytes.last(), Some(b'\n' | b'\r')) {
                    bytes.pop();
                }
            }
            let dialect = dialect(true, true);
            let memory = MemoryFile(bytes);
            let header = Header::read(&memory, &dialect).unwrap();
            let expected = scanned(&memory.0, &dialect, &header);
            let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
            let span = around.span();
            if span.is_empty() {
                return Ok(());
            }
            let least = Surroundings::least_bytes(3);
            for draw in &draws {
                let at = span.start + draw.index(bytes_of(&span)) as u64;
                let row = expected[(at - span.start) as usize];
                match around.row_at(at) {
                    Ok(found) => prop_assert_eq!(found, row, "byte {} of {}", at, memory.0.len()),
                    // A file of repeated rows may be ambiguous as a whole.
                    Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Limit),
                }
                if let Some(row) = row {
                    let text = &memory.0[row.offset as usize..][..(row.len as usize).min(memory.0.len() - row.offset as usize)];
                    prop_assert!(row.len >= least);
                    if around.row_at(at).is_ok() {
                        prop_assert_eq!(around.text(row), text);
                    }
                    prop_assert!(at - row.offset >= least || around.may_start(at, least).unwrap());
                }
            }
            let mut starts: Vec<RowAt> = expected.iter().flatten().copied().collect();
            starts.dedup();
            for cells in draws.chunks(2) {
                let range = span.start + cells[0].index(bytes_of(&span)) as u64;
                let range = range..range + cells[1].index(5000) as u64;
                let mut found = Vec::new();
                let result = around.rows_in(range.clone(), 1 << 20, |offset, text| {
                    assert_eq!(text, &memory.0[offset as usize..][..text.len()]);
                    let missing = u64::from(text.last() != Some(&b'\n'));
                    found.push(RowAt { offset, len: text.len() as u64 + missing });
                    Ok(())
                });
                match result {
                    Ok(()) => {
                        let there: Vec<_> = starts.iter().filter(|row| range.contains(&row.offset)).copied().collect();
                        prop_assert_eq!(found, there, "{:?}", range);
                    }
                    Err(error) => prop_assert_eq!(error.kind(), ErrorKind::Limit),
                }
            }
        }

        /// For any bytes, the result is a row of a full scan or an error.
        #[test]
        fn any_bytes_have_rows_or_errors(
            bytes in proptest::collection::vec(proptest::sample::select(b"aab,,\n\n\r\"#".to_vec()), 0..200),
            quoted in any::<bool>(),
            commented in any::<bool>(),
        ) {
            let dialect = Dialect { names: Names::Given(vec!["a".into(), "b".into()]), ..dialect(quoted, commented) };
            let memory = MemoryFile(bytes);
            // Files whose rows end with a carriage return only are rejected here.
            let Ok(header) = Header::read(&memory, &dialect) else { return Ok(()) };
            let expected = scanned(&memory.0, &dialect, &header);
            let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
            for at in around.span() {
                if let Ok(found) = around.row_at(at) {
                    prop_assert_eq!(found, expected[at as usize]);
                }
            }
        }
    }

    fn of(bytes: Vec<u8>, columns: usize) -> (MemoryFile<Vec<u8>>, Dialect, Header) {
        let dialect = Dialect {
            names: Names::Given((0..columns).map(|i| i.to_string()).collect()),
            ..Dialect::default()
        };
        let memory = MemoryFile(bytes);
        let header = Header::read(&memory, &dialect).unwrap();
        (memory, dialect, header)
    }

    #[test]
    fn ambiguous_dialects_are_errors() {
        // The same bytes follow each newline, both within quotes and outside of them.
        let (memory, dialect, header) = of(b"1,\"\n1,\"\n".repeat(5 << 20), 2);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        let error = around.row_at(20 << 20).unwrap_err();
        assert_eq!(
            (error.kind(), error.location().offset),
            (ErrorKind::Limit, Some(20 << 20))
        );
        assert!(error.reason().contains("method=\"exact\""));
        let near = around.row_at(1000).unwrap().unwrap();
        assert_eq!((near.offset, near.len), (1000, 8));
    }

    #[test]
    fn a_single_column_needs_quotes_or_the_start_of_the_file() {
        let mut bytes = b"abc\n".repeat(12 << 20);
        let (memory, dialect, header) = of(bytes.clone(), 1);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        assert_eq!(around.row_at(4000).unwrap().unwrap().offset, 4000);
        assert_eq!(around.row_at(24 << 20).unwrap_err().kind(), ErrorKind::Limit);
        let plain = Dialect { quote: None, ..dialect };
        let mut around = Surroundings::new(&memory, &plain, &header).unwrap();
        assert_eq!(around.row_at((30 << 20) + 3).unwrap().unwrap().offset, 30 << 20);
        bytes[20 << 20..][..4].copy_from_slice(b"\"b\"\n");
        let (memory, dialect, header) = of(bytes, 1);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        assert_eq!(around.row_at((21 << 20) + 1).unwrap().unwrap().offset, 21 << 20);
    }

    #[test]
    fn rows_with_a_wrong_number_of_fields_are_errors() {
        let mut bytes = b"1,2\n".repeat(20_000);
        bytes[40_000..][..4].copy_from_slice(b"1.2\n");
        let (memory, dialect, header) = of(bytes, 2);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        assert_eq!(around.row_at(8).unwrap().unwrap().offset, 8);
        assert_eq!(around.row_at(79_999).unwrap().unwrap().offset, 79_996);
        // The quoted reading contains no row at all, so the window grows up to the start of the file.
        assert_eq!(around.row_at(40_100).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn long_rows_are_found() {
        let mut bytes = Vec::new();
        for i in 0..30 {
            bytes.extend(vec![b'x'; 300_000 + i]);
            bytes.extend(b",\"a\nb\"\n");
        }
        let (memory, dialect, header) = of(bytes, 2);
        let expected = scanned(&memory.0, &dialect, &header);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        for at in around.span().step_by(77_777) {
            assert_eq!(around.row_at(at).unwrap(), expected[at as usize], "{at}");
        }
    }
}
