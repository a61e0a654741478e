//! Reads the header of a file: everything that is known before its rows are found.

use std::collections::HashSet;
use std::sync::Arc;

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, digest_of_ends};

use crate::dialect::{Dialect, Lines, Names};
use crate::fields::{Ended, Fields, LoneReturn};
use crate::rows::Next;

/// Maximum size of the first row in bytes.
const MOST_HEADER_BYTES: u64 = 64 << 20;

/// Number of bytes that are read to recognize other formats. The first row is searched for in as many bytes, and then
/// in more.
const START_BYTES: u64 = 64 << 10;

/// The byte order mark of UTF-8.
const MARK: &[u8] = b"\xef\xbb\xbf";

/// First bytes of formats that can't be read as CSV, each with the error message.
const OTHERS: [(&[u8], &str); 10] = [
    // This also starts with the mark of UTF-16, so it must come first.
    (
        b"\xff\xfe\0\0",
        "the file is UTF-32, but only UTF-8 is supported: convert it with `iconv -f UTF-32 -t UTF-8`",
    ),
    (
        b"\0\0\xfe\xff",
        "the file is UTF-32, but only UTF-8 is supported: convert it with `iconv -f UTF-32 -t UTF-8`",
    ),
    (
        b"\xff\xfe",
        "the file is UTF-16, but only UTF-8 is supported: convert it with `iconv -f UTF-16 -t UTF-8`",
    ),
    (
        b"\xfe\xff",
        "the file is UTF-16, but only UTF-8 is supported: convert it with `iconv -f UTF-16 -t UTF-8`",
    ),
    (
        b"\x1f\x8b",
        "the file is compressed more than once (the inner layer is gzip): decompress it once with `gunzip` or `zstd -d`",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "the file is compressed more than once (the inner layer is zstandard): decompress it once with `gunzip` or `zstd -d`",
    ),
    (
        b"\xfd7zXZ\0",
        "the file is compressed with xz, but only gzip and zstandard are supported: convert it with `xzcat FILE | zstd`",
    ),
    (
        b"PK\x03\x04",
        "the file is a zip archive, but only gzip and zstandard are supported: extract it with `unzip`",
    ),
    (b"Obj\x01", "the file is an Avro file: use `read_avro`"),
    (b"PAR1", "the file is a Parquet file: use `read_parquet`"),
];

/// The first bytes of a bzip2 file. There is one digit between the two parts.
const BZIP2: (&[u8], &[u8]) = (b"BZh", b"1AY&SY");

/// Returns the error message for text whose first bytes show that it can't be read as CSV.
fn other(start: &[u8]) -> Option<&'static str> {
    let is_bzip2 = start.starts_with(BZIP2.0) && start.get(4..).is_some_and(|rest| rest.starts_with(BZIP2.1));
    if is_bzip2 {
        return Some(
            "the file is compressed with bzip2, but only gzip and zstandard are supported: convert it with `bzcat FILE | zstd`",
        );
    }
    OTHERS
        .iter()
        .find(|(magic, _)| start.starts_with(magic))
        .map(|(_, reason)| *reason)
        .or_else(|| unmarked(start))
}

/// Detects UTF-16 or UTF-32 without a byte order mark by its zero bytes. Most characters of a CSV file are ASCII
/// characters, which contain zero bytes in these encodings.
fn unmarked(start: &[u8]) -> Option<&'static str> {
    let start = &start[..start.len().min(4096) / 4 * 4];
    let mut zeros = [0; 4];
    for characters in start.chunks_exact(4) {
        for (count, &byte) in zeros.iter_mut().zip(characters) {
            *count += usize::from(byte == 0);
        }
    }
    let all = start.len() / 4;
    let often = |i: usize| all > 0 && zeros[i] > all / 4;
    let seldom = |i: usize| zeros[i] <= all / 16;
    if often(1) && often(3) && seldom(0) && seldom(2) {
        return Some("the file is UTF-16, but only UTF-8 is supported: convert it with `iconv -f UTF-16LE -t UTF-8`");
    }
    if often(0) && often(2) && seldom(1) && seldom(3) {
        return Some("the file is UTF-16, but only UTF-8 is supported: convert it with `iconv -f UTF-16BE -t UTF-8`");
    }
    if zeros[2..] == [all; 2] && often(1) && seldom(0) {
        return Some("the file is UTF-32, but only UTF-8 is supported: convert it with `iconv -f UTF-32LE -t UTF-8`");
    }
    if zeros[..2] == [all; 2] && often(2) && seldom(3) {
        return Some("the file is UTF-32, but only UTF-8 is supported: convert it with `iconv -f UTF-32BE -t UTF-8`");
    }
    None
}

/// Detects a file without newlines whose rows end with carriage returns.
fn returns_only(start: &[u8], lines: &Lines) -> Option<LoneReturn> {
    if memchr::memchr(b'\n', start).is_some() {
        return None;
    }
    let mut fields = Fields::new(lines, start, 0);
    loop {
        match fields.skip() {
            Ok(Ended::Field) => {}
            Ok(Ended::Row) => return None,
            // The byte may be the last one that was read, so a newline may follow.
            Err(found) => return (found.0 + 1 < start.len()).then_some(found),
        }
    }
}

/// The header of a file: everything that is known before its rows are found.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The names of the columns.
    pub names: Vec<Arc<str>>,
    /// Offset of the first row of data. For a compressed file, this is an offset in the decompressed text.
    pub first: u64,
    /// Size of the file in bytes, as stored.
    pub size: u64,
    /// Digest of the first and the last bytes of the file, as stored.
    pub digest: u64,
}

impl Header {
    /// Reads the header of a file.
    ///
    /// # Errors
    /// Errors don't contain the path of the file. [`ErrorKind::Malformed`] if there is no first row or it is damaged.
    /// [`ErrorKind::Unsupported`] if the file has another format.
    pub fn read(file: &dyn ReadAt, dialect: &Dialect) -> Result<Header> {
        let size = file.size()?;
        Self::of(file, size, (file, size), dialect)
    }

    /// Reads the header of a compressed file.
    ///
    /// # Errors
    /// Like [`Header::read`], with offsets in the decompressed text. Also returns errors of the decompression.
    pub fn read_compressed(file: &dyn ReadAt, text: &dyn ReadAt, dialect: &Dialect) -> Result<Header> {
        Self::of(file, file.size()?, (text, u64::MAX), dialect)
    }

    /// Reads the header, given a file with its size, and its text with the maximum size of the text.
    fn of(file: &dyn ReadAt, size: u64, text: (&dyn ReadAt, u64), dialect: &Dialect) -> Result<Header> {
        let start = text.0.read_up_to(0, START_BYTES.min(text.1) as usize)?;
        if let Some(reason) = other(&start) {
            return Err(Error::new(ErrorKind::Unsupported, reason));
        }
        if let Some(found) = returns_only(&start, &Lines::new(dialect, 0)) {
            return Err(lone_return(found));
        }
        let start = if start.starts_with(MARK) { MARK.len() } else { 0 };
        let digest = digest_of_ends(file, size)?;
        let (names, first) = Self::names(text, dialect, start)?;
        Ok(Header {
            names,
            first,
            size,
            digest,
        })
    }

    /// Returns the names of the columns and the offset of the first row of data.
    fn names((file, most): (&dyn ReadAt, u64), dialect: &Dialect, start: usize) -> Result<(Vec<Arc<str>>, u64)> {
        if let Names::Given(names) = &dialect.names {
            return Ok((names.iter().map(|name| name.as_str().into()).collect(), start as u64));
        }
        // The first row may have any number of fields.
        let lines = Lines {
            fields: None,
            ..Lines::new(dialect, 0)
        };
        let mut len = START_BYTES;
        let (bytes, row) = loop {
            // This allocates more than a few megabytes only if the first row is that long.
            let bytes = file.read_up_to(0, len.min(most) as usize)?;
            let found = bytes.len() as u64;
            let all = found < len || found == most;
            match lines.next(&bytes, start) {
                Next::Row { start, end } if all || end < bytes.len() => break (bytes, start..end),
                Next::End if all && found > 0 && dialect.names == Names::Numbered => return Ok((Vec::new(), found)),
                Next::End if all => return Err(malformed("found no rows, not even a header with column names")),
                Next::Open { start } if all => {
                    return Err(malformed("the first row ends within quotes").at_offset(start as u64));
                }
                _ if len > MOST_HEADER_BYTES => {
                    let reason =
                        format!("the first row has more than {MOST_HEADER_BYTES} bytes: is a quote never closed?");
                    return Err(Error::new(ErrorKind::Limit, reason));
                }
                _ => len *= 4,
            }
        };
        let mut fields = Fields::new(&lines, &bytes[..row.end], row.start);
        let mut names: Vec<Arc<str>> = Vec::new();
        loop {
            let at = fields.at;
            let (text, ended) = fields.next().map_err(lone_return)?;
            let name = std::str::from_utf8(&text).map_err(|_| {
                malformed("a column's name isn't UTF-8: convert the file with `iconv -t UTF-8`").at_offset(at as u64)
            });
            match dialect.names {
                Names::Numbered => names.push(format!("f{}", names.len()).into()),
                _ => names.push(name?.into()),
            }
            if ended == Ended::Row {
                break;
            }
        }
        let first = if dialect.names == Names::Numbered {
            start
        } else {
            row.end
        };
        Ok((names, first as u64))
    }

    /// Returns the first name that is used by two columns.
    pub(crate) fn twice(&self) -> Option<&Arc<str>> {
        let mut seen: HashSet<&str> = HashSet::new();
        self.names.iter().find(|&name| !seen.insert(name))
    }
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

/// Returns the error for a carriage return without a newline, at a byte of the file.
#[cold]
pub(crate) fn lone_return(LoneReturn(at): LoneReturn) -> Error {
    let reason = "a carriage return does not end a row: rows end with a newline, optionally after a carriage return, \
                  and fields that contain a carriage return must be quoted. If all rows end with a carriage return only, \
                  convert the file with `tr '\\r' '\\n'`";
    malformed(reason).at_offset(at as u64)
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::MemoryFile;

    use super::*;

    fn header(bytes: &[u8], names: Names) -> Result<Header> {
        let dialect = Dialect {
            names,
            comment: Some(b'#'),
            ..Dialect::default()
        };
        Header::read(&MemoryFile(bytes), &dialect)
    }

    fn names(header: &Header) -> Vec<&str> {
        header.names.iter().map(|name| &**name).collect()
    }

    #[test]
    fn names_come_from_the_first_row() {
        let found = header(b"\xef\xbb\xbf# c\n\na,\"b\n\",\r\n1,2,3\n", Names::FirstRow).unwrap();
        assert_eq!((names(&found), found.first), (vec!["a", "b\n", ""], 17));
        let found = header(b"\xef\xbb\xbf1,2\n", Names::Numbered).unwrap();
        assert_eq!((names(&found), found.first), (vec!["f0", "f1"], 3));
        let found = header(b"1,2\n", Names::Given(vec!["x".into()])).unwrap();
        assert_eq!((names(&found), found.first), (vec!["x"], 0));
        let found = header(b"a,a", Names::FirstRow).unwrap();
        assert_eq!((found.twice().map(|n| &**n), found.first), (Some("a"), 3));
        let long = format!("{},b\n", "x".repeat(500_000));
        assert_eq!(header(long.as_bytes(), Names::FirstRow).unwrap().first, 500_003);
    }

    #[test]
    fn headers_distinguish_contents_by_their_ends() {
        let of = |bytes: &[u8]| header(bytes, Names::FirstRow).unwrap().digest;
        let mut bytes = vec![b'x'; 300_000];
        let before = of(&bytes);
        bytes[299_999] = b'y';
        assert_ne!(of(&bytes), before);
        bytes[299_999] = b'x';
        assert_eq!(of(&bytes), before);
        bytes[1] = b'y';
        assert_ne!(of(&bytes), before);
    }

    #[test]
    fn contents_that_are_not_csv_are_refused() {
        let kind = |bytes: &[u8]| header(bytes, Names::FirstRow).unwrap_err().kind();
        assert_eq!(kind(b""), ErrorKind::Malformed);
        assert_eq!(kind(b"\n\n# a\n"), ErrorKind::Malformed);
        assert_eq!(kind(b"\"a,b\n"), ErrorKind::Malformed);
        assert_eq!(kind(b"a\rb\n"), ErrorKind::Malformed);
        assert_eq!(kind(b"a,\xff\n"), ErrorKind::Malformed);
        for (magic, _) in OTHERS {
            assert_eq!(kind(&[magic, b"a,b\n1,2\n"].concat()), ErrorKind::Unsupported);
        }
        assert_eq!(kind(b"BZh91AY&SY,b\n"), ErrorKind::Unsupported);
        assert!(header(b"BZh9,b\n", Names::FirstRow).is_ok());
        let reason = |bytes: &[u8]| header(bytes, Names::Numbered).unwrap_err().reason().to_owned();
        assert!(reason(b"a,b\r1,2\r").contains("`tr '\\r' '\\n'`"));
        assert!(header(b"a,\"b\rc\"", Names::Numbered).is_ok());
        assert!(header(b"a,b\0\0\0\n1,2\0\0\0\n", Names::FirstRow).is_ok());
    }

    #[test]
    fn errors_name_the_encoding_of_wide_characters() {
        let text = "größe,Łódź,b\n1,2,3\n".repeat(200);
        let utf16: Vec<u16> = text.encode_utf16().collect();
        let utf32: Vec<u32> = text.chars().map(u32::from).collect();
        let cases: [(&str, Vec<u8>); 4] = [
            ("UTF-16LE", utf16.iter().flat_map(|unit| unit.to_le_bytes()).collect()),
            ("UTF-16BE", utf16.iter().flat_map(|unit| unit.to_be_bytes()).collect()),
            ("UTF-32LE", utf32.iter().flat_map(|unit| unit.to_le_bytes()).collect()),
            ("UTF-32BE", utf32.iter().flat_map(|unit| unit.to_be_bytes()).collect()),
        ];
        for (name, bytes) in cases {
            for len in [24, bytes.len()] {
                let error = header(&bytes[..len], Names::FirstRow).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Unsupported);
                assert!(
                    error.reason().contains(&format!("iconv -f {name} ")),
                    "{name}: {}",
                    error.reason()
                );
            }
        }
        for mark in [&b"\xff\xfe\0\0"[..], b"\0\0\xfe\xff"] {
            let error = header(&[mark, b"a\0\0\0"].concat(), Names::FirstRow).unwrap_err();
            assert!(error.reason().starts_with("the file is UTF-32"));
        }
        assert!(
            header(b"\xff\xfea\0", Names::FirstRow)
                .unwrap_err()
                .reason()
                .starts_with("the file is UTF-16")
        );
    }

    #[test]
    fn a_compressed_file_has_the_header_of_its_text() {
        let (stored, text) = (MemoryFile([7; 50]), MemoryFile(b"\xef\xbb\xbfa,b\n1,2\n"));
        let found = Header::read_compressed(&stored, &text, &Dialect::default()).unwrap();
        assert_eq!((names(&found), found.first, found.size), (vec!["a", "b"], 7, 50));
        let text = MemoryFile(format!("{},b\n", "x".repeat(500_000)));
        let other = Header::read_compressed(&stored, &text, &Dialect::default()).unwrap();
        assert_eq!((other.first, other.digest), (500_003, found.digest));
        let utf16 = MemoryFile(b"\xff\xfea\0");
        assert!(Header::read_compressed(&stored, &utf16, &Dialect::default()).is_err());
    }
}
