//! What is known about a file before its records are found. A TFRecord file has no header: this is its size and a
//! digest of its ends.

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, digest_of_ends};

use crate::framing::{HEAD, declared, wrong_length};

/// First bytes of formats that hold records in another way, and what to do.
const OTHERS: [(&[u8], &str); 3] = [
    (
        b"\x1f\x8b",
        "the file is compressed with gzip, and compressed TFRecord files can't be read: decompress it with `gunzip`, or write \
         it without compression",
    ),
    (
        b"\x28\xb5\x2f\xfd",
        "the file is compressed with zstandard, and compressed TFRecord files can't be read: decompress it with `zstd -d`",
    ),
    (b"Obj\x01", "the file is an Avro file: read it with fastpipe.read_avro"),
];

const ZLIB: &str = "the file seems to be compressed with zlib, and compressed TFRecord files can't be read: decompress it with `pigz \
                    -dz`, or write it without compression";

/// The size and the ends of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    /// Size of the file in bytes.
    pub size: u64,
    /// Digest of the first and the last bytes of the file.
    pub digest: u64,
}

impl Header {
    /// Reads the ends of a file. The checksum of the first length distinguishes TFRecord files from other files.
    ///
    /// # Errors
    /// Errors don't contain the path of the file. [`ErrorKind::Unsupported`] if the file is compressed;
    /// [`ErrorKind::Malformed`] if it is no TFRecord file; errors of storage.
    pub fn read(file: &dyn ReadAt) -> Result<Header> {
        let size = file.size()?;
        let mut start = [0; HEAD];
        let found = file.read_at(0, &mut start)?;
        if found > 0 && (found < HEAD || declared(&start).is_none()) {
            return Err(other(&start[..found]));
        }
        Ok(Header {
            size,
            digest: digest_of_ends(file, size)?,
        })
    }
}

/// Returns the error for a file that doesn't begin with a record.
#[cold]
fn other(start: &[u8]) -> Error {
    if let Some((_, reason)) = OTHERS.iter().find(|(magic, _)| start.starts_with(magic)) {
        return Error::new(ErrorKind::Unsupported, *reason);
    }
    if let [first, second, ..] = *start
        && first & 0x8f == 0x08
        && (u16::from(first) << 8 | u16::from(second)) % 31 == 0
    {
        return Error::new(ErrorKind::Unsupported, ZLIB);
    }
    if start.len() < HEAD {
        let reason = format!(
            "the file has only {} bytes, and a record has at least 16: it is no TFRecord file, or truncated",
            start.len()
        );
        return Error::new(ErrorKind::Malformed, reason).at_offset(0);
    }
    let reason = format!("{}, or it is no TFRecord file", wrong_length().reason());
    Error::new(ErrorKind::Malformed, reason).at_offset(0)
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::MemoryFile;

    use super::*;
    use crate::framing::tests::file;

    #[test]
    fn files_that_hold_no_records_are_refused() {
        let kind = |bytes: &[u8]| Header::read(&MemoryFile(bytes)).unwrap_err().kind();
        assert_eq!(kind(b"\x1f\x8b\x08\0\0\0\0\0\0\0\0\0"), ErrorKind::Unsupported);
        assert_eq!(kind(b"\x78\x9c\x63\x60\0\0\0\0\0\0\0\0"), ErrorKind::Unsupported);
        assert_eq!(kind(b"\x28\xb5\x2f\xfd\0\0\0\0\0\0\0\0"), ErrorKind::Unsupported);
        assert_eq!(kind(b"Obj\x01\0\0\0\0\0\0\0\0"), ErrorKind::Unsupported);
        assert_eq!(kind(b"a,b\n1,2\n3,4\n"), ErrorKind::Malformed);
        assert_eq!(kind(b"a"), ErrorKind::Malformed);
        assert_eq!(Header::read(&MemoryFile(b"")).unwrap().size, 0);
    }

    #[test]
    fn a_record_whose_length_looks_like_a_magic_number_is_read() {
        // The length 0x8b1f is the magic number of gzip.
        let bytes = file(&[vec![0; 0x8b1f]]);
        assert!(bytes.starts_with(b"\x1f\x8b"));
        assert_eq!(Header::read(&MemoryFile(bytes)).unwrap().size, 0x8b1f + 16);
    }
}
