//! The stretches of a file as few bytes, so that they can be kept: of each its length and its rows, as varints in
//! [postcard's wire format](https://postcard.jamesmunns.com/wire-format). For a file with rows of 100 bytes that is a
//! ten-thousandth of it.
//!
//! Nothing in those bytes is trusted: what comes out could be stretches of a file of this size.

use fastpipe_batch::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::header::Header;
use crate::scan::{MOST_ROW_BYTES, STRETCH_BYTES};
use crate::source::Stretch;

/// The version of this format.
const VERSION: u8 = 1;

/// Bytes that a stretch has at most: it ends with the row that it is full with.
const MOST_BYTES: u64 = MOST_ROW_BYTES + 2 * STRETCH_BYTES as u64;

#[derive(Serialize, Deserialize)]
struct Index {
    version: u8,
    digest: u64,
    columns: u64,
    first: u64,
    /// Bytes and rows.
    stretches: Vec<(u32, u32)>,
}

/// Encodes the stretches that were found in a file.
pub fn encode_index(header: &Header, stretches: &[Stretch]) -> Vec<u8> {
    let index = Index {
        version: VERSION,
        digest: header.digest,
        columns: header.names.len() as u64,
        first: header.first,
        stretches: stretches.iter().map(|s| (s.len, s.rows)).collect(),
    };
    postcard::to_allocvec(&index).expect("memory takes whatever is written to it")
}

/// Decodes the stretches of a file; `None` if they are those of a file with another header.
///
/// # Errors
/// Malformed, if the bytes are no index, or not one of stretches that such a file could have.
pub fn decode_index(bytes: &[u8], header: &Header, size: u64) -> Result<Option<Vec<Stretch>>> {
    let malformed = |reason: &str| Error::new(ErrorKind::Malformed, reason);
    let (index, rest) = postcard::take_from_bytes::<Index>(bytes).map_err(|e| malformed(&e.to_string()))?;
    if index.version != VERSION || !rest.is_empty() {
        return Err(malformed("it is of another version, or something stands behind it"));
    }
    if (index.digest, index.columns, index.first) != (header.digest, header.names.len() as u64, header.first) {
        return Ok(None);
    }
    let mut stretches = fastpipe_batch::try_with_capacity(index.stretches.len(), "the index of a file's rows")?;
    let mut offset = index.first;
    for (len, rows) in index.stretches {
        // A row has a byte at least.
        if rows > len || len == 0 || u64::from(len) > MOST_BYTES {
            return Err(malformed("it has a stretch that can't be"));
        }
        stretches.push(Stretch { offset, len, rows });
        offset += u64::from(len);
    }
    match offset == size || stretches.is_empty() {
        true => Ok(Some(stretches)),
        false => Err(malformed("its stretches don't fill the file")),
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn header(size: u64) -> Header {
        Header {
            names: vec!["a".into(), "b".into()],
            first: 4,
            size,
            digest: 77,
        }
    }

    proptest! {
        #[test]
        fn what_is_kept_comes_back(lens in proptest::collection::vec((1u32..100_000, 0u32..100), 0..50)) {
            let mut offset = 4;
            let stretches: Vec<Stretch> = lens.iter().map(|&(len, rows)| {
                let stretch = Stretch { offset, len, rows: rows.min(len) };
                offset += u64::from(len);
                stretch
            }).collect();
            let bytes = encode_index(&header(offset), &stretches);
            prop_assert_eq!(decode_index(&bytes, &header(offset), offset).unwrap(), Some(stretches.clone()));
            let other = Header { digest: 78, ..header(offset) };
            prop_assert_eq!(decode_index(&bytes, &other, offset).unwrap(), None);
            if !stretches.is_empty() {
                prop_assert!(decode_index(&bytes, &header(offset), offset + 1).is_err());
            }
            prop_assert!(decode_index(&bytes[..bytes.len() - 1], &header(offset), offset).is_err());
        }

        #[test]
        fn any_bytes_are_an_index_or_an_error(bytes in any::<Vec<u8>>()) {
            if let Ok(Some(stretches)) = decode_index(&bytes, &header(1000), 1000) {
                prop_assert!(stretches.iter().all(|s| s.rows <= s.len && s.offset + u64::from(s.len) <= 1000));
            }
        }
    }
}
