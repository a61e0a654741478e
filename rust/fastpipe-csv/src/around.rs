//! The row around a byte of a file whose rows nobody has looked for.
//!
//! Rows may have newlines within quotes, so what stands around a byte doesn't say by itself where its row starts.
//! Behind a newline there are two possibilities: a row starts there, or a quoted field goes on. Both are followed
//! through a window around the byte, and one of them is ruled out by a row that has not as many fields as the file has
//! columns, or makes no difference because both come to the same row. Where neither happens, the window grows.
//!
//! One thing can't be told by any window: a stretch without quotes could be the text of one field. It is taken for rows
//! if there are several in it, all with the file's number of fields, of which there are two at least. So a file is
//! misread if the text of a field looks like such rows for longer than a window.

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, try_filled};

use crate::dialect::{Dialect, Lines, OnRagged};
use crate::fields::Fields;
use crate::header::Header;
use crate::rows::Next;

/// Bytes in front of a byte that are looked at first, and at last.
const FIRST_REACH: u64 = 16 << 10;
const LAST_REACH: u64 = 16 << 20;

/// Rows with the right number of fields that are taken for rows where there are no quotes, and rows of which the fields
/// are counted at most: more of them tell nothing new.
const EVIDENCE: usize = 8;
const ENOUGH: usize = 64;

/// A row of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowAt {
    /// Its first byte.
    pub offset: u64,
    /// Its bytes, with the newline, which is counted even where the file ends without it.
    pub len: u64,
}

/// Finds rows around bytes of a file.
pub struct Surroundings<'f> {
    file: &'f dyn ReadAt,
    lines: Lines,
    columns: usize,
    first: u64,
    size: u64,
    /// The byte behind the last, which is that of a newline that may be missing.
    end: u64,
    window: Vec<u8>,
    /// The byte of the file that the window begins with.
    from: u64,
}

/// What one reading of a window says.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Reading {
    /// A row has another number of fields: this isn't how the file is to be read.
    Refuted,
    /// It may be right.
    Possible {
        /// Whole rows whose fields were counted.
        rows: usize,
        /// What the byte lies in, in the window.
        place: Place,
    },
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Place {
    /// A row: from where to where.
    Row(usize, usize),
    /// No row: an empty line or a comment.
    Between,
    /// The window doesn't have all of it.
    Beyond,
}

impl<'f> Surroundings<'f> {
    /// Of a file with this header.
    ///
    /// # Errors
    /// Of storage, if it can't be read.
    pub fn new(file: &'f dyn ReadAt, dialect: &Dialect, header: &Header) -> Result<Surroundings<'f>> {
        let mut surroundings = Surroundings {
            file,
            lines: Lines {
                fields: None,
                ..Lines::new(dialect, 0)
            },
            columns: header.names.len(),
            first: header.first,
            size: header.size,
            end: header.size,
            window: Vec::new(),
            from: 0,
        };
        debug_assert_eq!(
            dialect.on_ragged,
            OnRagged::Error,
            "rows with other numbers of fields refute a reading"
        );
        if header.first < header.size {
            surroundings.read(header.size - 1, header.size)?;
            surroundings.end += u64::from(surroundings.window != b"\n");
        }
        Ok(surroundings)
    }

    /// The bytes in which rows lie, with that of a newline that the file may lack.
    pub fn span(&self) -> std::ops::Range<u64> {
        self.first..self.end
    }

    /// Bytes that each row of such a file has at least: a delimiter between fields, and a newline; of one field a byte
    /// too, for empty lines are no rows.
    pub fn least_bytes(columns: usize) -> u64 {
        columns.max(2) as u64
    }

    /// Whether a row may start among the `least` bytes that end with this one. That takes no look at quotes: rows start
    /// behind newlines.
    pub fn may_start(&mut self, at: u64, least: u64) -> Result<bool> {
        let from = (at + 1).saturating_sub(least);
        if from <= self.first {
            return Ok(true);
        }
        self.read(from - 1, at.min(self.size))?;
        Ok(memchr::memchr(b'\n', &self.window).is_some())
    }

    /// The row that a byte of the span lies in; `None` if that is an empty line or a comment.
    ///
    /// # Errors
    /// Malformed, if rows around it have other numbers of fields, however they are read; a limit, if the row can't be
    /// told.
    pub fn row_at(&mut self, at: u64) -> Result<Option<RowAt>> {
        let mut reach = FIRST_REACH;
        loop {
            match self.place_within(at, reach)? {
                Place::Row(start, end) => {
                    let (offset, end) = (self.from + start as u64, self.from + end as u64);
                    // That of the last row may be missing.
                    let missing = end == self.size && self.end > self.size;
                    let len = end - offset + u64::from(missing);
                    return Ok(Some(RowAt { offset, len }));
                }
                Place::Between => return Ok(None),
                Place::Beyond if reach < LAST_REACH => reach *= 4,
                Place::Beyond => {
                    let reason = format!(
                        "{LAST_REACH} bytes in front of this one don't tell in which row it lies, for quotes can be read in \
                         two ways: draw with method=\"exact\", or quote=None if there are no quoted fields"
                    );
                    return Err(Error::new(ErrorKind::Limit, reason).at_offset(at));
                }
            }
        }
    }

    /// The text of a row that was found last.
    pub fn text(&self, row: RowAt) -> &[u8] {
        let start = row.offset.saturating_sub(self.from) as usize;
        let end = start.saturating_add(row.len as usize).min(self.window.len());
        self.window.get(start..end).unwrap_or_default()
    }

    /// What a byte lies in, as far as a window of this reach says.
    fn place_within(&mut self, at: u64, reach: u64) -> Result<Place> {
        let from = at.saturating_sub(reach).max(self.first);
        let to = at.saturating_add(reach / 4).min(self.size);
        self.read(from, to)?;
        let begin = if from == self.first {
            0
        } else {
            // A row or a line within quotes starts behind it.
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
            // Not of one column: any text has a field a line.
            (Possible { rows, place }, Possible { rows: 0, .. })
            | (Possible { rows: 0, .. }, Possible { rows, place })
                if rows >= EVIDENCE && self.columns > 1 =>
            {
                place
            }
            _ => Place::Beyond,
        })
    }

    /// Follows rows through the window, the first of which starts at `at`, and counts the fields of those from a little
    /// in front of the byte on.
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
            // Behind the last row is the newline that it may lack.
            at = end + usize::from(bytes[end - 1] != b'\n');
            if (start..at).contains(&byte) {
                place = Place::Row(start, end);
            }
            if rows >= ENOUGH && place != Place::Beyond {
                return Reading::Possible { rows, place };
            }
        }
    }

    /// Reads bytes of the file to the window.
    fn read(&mut self, from: u64, to: u64) -> Result<()> {
        let len = (to - from) as usize;
        if self.window.capacity() < len {
            self.window = try_filled(0, len, "the bytes around a row")?;
        }
        self.window.resize(len, 0);
        self.from = from;
        let found = self.file.read_at(from, &mut self.window)?;
        if found < len {
            let reason = "the file became shorter while rows were drawn: start again, once nobody writes to it";
            return Err(Error::new(ErrorKind::Storage, reason));
        }
        Ok(())
    }

    #[cold]
    fn ragged(&self, at: u64) -> Error {
        let reason = format!(
            "rows around this byte don't have {} fields, as the file has columns, however quotes are read: read_csv says which, \
             and method=\"exact\" draws without them",
            self.columns
        );
        Error::new(ErrorKind::Malformed, reason).at_offset(at)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::dialect::Names;
    use crate::header::tests::Memory;

    fn dialect(quoted: bool, commented: bool) -> Dialect {
        Dialect {
            quote: quoted.then_some(b'"'),
            comment: commented.then_some(b'#'),
            ..Dialect::default()
        }
    }

    /// For each byte of the span the row that it lies in, by a scan from the first one.
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

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        /// Files are made of few rows, again and again, so that windows begin within them.
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
            let memory = Memory(bytes);
            let header = Header::read(&memory, &dialect).unwrap();
            let expected = scanned(&memory.0, &dialect, &header);
            let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
            let span = around.span();
            if span.is_empty() {
                return Ok(());
            }
            let least = Surroundings::least_bytes(3);
            for draw in draws {
                let at = span.start + draw.index((span.end - span.start) as usize) as u64;
                let row = expected[(at - span.start) as usize];
                match around.row_at(at) {
                    Ok(found) => prop_assert_eq!(found, row, "byte {} of {}", at, memory.0.len()),
                    // Rows that are repeated may be read in two ways, all of them.
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
        }

        /// Whatever stands in a file, what is drawn is a row of a scan, or an error.
        #[test]
        fn any_bytes_have_rows_or_errors(
            bytes in proptest::collection::vec(proptest::sample::select(b"aab,,\n\n\r\"#".to_vec()), 0..200),
            quoted in any::<bool>(),
            commented in any::<bool>(),
        ) {
            let dialect = Dialect { names: Names::Given(vec!["a".into(), "b".into()]), ..dialect(quoted, commented) };
            let memory = Memory(bytes);
            // Rows that end with carriage returns alone are refused here.
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

    fn of(bytes: Vec<u8>, columns: usize) -> (Memory, Dialect, Header) {
        let dialect = Dialect {
            names: Names::Given((0..columns).map(|i| i.to_string()).collect()),
            ..Dialect::default()
        };
        let memory = Memory(bytes);
        let header = Header::read(&memory, &dialect).unwrap();
        (memory, dialect, header)
    }

    #[test]
    fn what_can_be_read_in_two_ways_is_an_error() {
        // Behind each newline the same follows, within quotes and outside of them.
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
    fn one_column_takes_quotes_or_the_start_of_the_file() {
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
    fn rows_with_other_numbers_of_fields_are_an_error() {
        let mut bytes = b"1,2\n".repeat(20_000);
        bytes[40_000..][..4].copy_from_slice(b"1.2\n");
        let (memory, dialect, header) = of(bytes, 2);
        let mut around = Surroundings::new(&memory, &dialect, &header).unwrap();
        assert_eq!(around.row_at(8).unwrap().unwrap().offset, 8);
        assert_eq!(around.row_at(79_999).unwrap().unwrap().offset, 79_996);
        // The quoted reading has no row at all, and grows up to the start of the file.
        assert_eq!(around.row_at(40_100).unwrap_err().kind(), ErrorKind::Malformed);
    }

    #[test]
    fn long_rows_are_found_too() {
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
