//! Encodes the chunks of a file compactly, so that they can be cached: the length and the number of records of each
//! chunk as varints in [postcard's wire format](https://postcard.jamesmunns.com/wire-format).
//!
//! The decoder doesn't trust the bytes. It returns only chunks that could exist in a file of this size.

use fastpipe_batch::{Chunk, Error, ErrorKind, ReadAt, Result, digest_of_ends, try_with_capacity};
use serde::{Deserialize, Serialize};

use crate::header::Header;
use crate::walk::{LEAST_RECORD, MOST_CHUNK};

/// The version of this format.
const VERSION: u8 = 1;

#[derive(Serialize, Deserialize)]
struct Index {
    version: u8,
    digest: u64,
    /// Bytes and records of each chunk.
    chunks: Vec<(u32, u32)>,
}

/// Encodes the chunks of a file.
pub fn encode_index(header: &Header, chunks: &[Chunk]) -> Vec<u8> {
    let index = Index {
        version: VERSION,
        digest: header.digest,
        chunks: chunks.iter().map(|chunk| (chunk.len, chunk.rows)).collect(),
    };
    postcard::to_allocvec(&index).expect("writing to memory never fails")
}

/// Decodes the chunks of a file. Returns `None` if they belong to a file with other ends.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not an index, or if its chunks can't exist in such a file.
pub fn decode_index(bytes: &[u8], header: &Header, size: u64) -> Result<Option<Vec<Chunk>>> {
    let index = Index::parse(bytes)?;
    if index.digest != header.digest {
        return Ok(None);
    }
    let (chunks, end) = index.chunks()?;
    if end != size {
        return Err(malformed("its chunks don't cover the file"));
    }
    Ok(Some(chunks))
}

/// Decodes the index of a file that has grown since. Returns the chunks that are still valid. Returns `None` if no
/// chunk is certain to be unchanged, or if the old part of the file has changed. Only the first bytes and the former
/// last bytes are compared to detect a change.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not an index, or if its chunks can't exist in a file. Also returns errors
/// of reading the file.
pub fn decode_front(bytes: &[u8], header: &Header, file: &dyn ReadAt) -> Result<Option<Vec<Chunk>>> {
    let index = Index::parse(bytes)?;
    let (mut chunks, size) = index.chunks()?;
    if size >= header.size || digest_of_ends(file, size)? != index.digest {
        return Ok(None);
    }
    // More records may belong to the last chunk.
    chunks.pop();
    Ok(Some(chunks).filter(|chunks| !chunks.is_empty()))
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

impl Index {
    fn parse(bytes: &[u8]) -> Result<Index> {
        let (index, rest) = postcard::take_from_bytes::<Index>(bytes).map_err(|e| malformed(&e.to_string()))?;
        if index.version != VERSION || !rest.is_empty() {
            return Err(malformed("it has another version"));
        }
        Ok(index)
    }

    /// Returns the chunks, and the position after the last one.
    fn chunks(&self) -> Result<(Vec<Chunk>, u64)> {
        let mut chunks = try_with_capacity(self.chunks.len(), "the index of a file's records")?;
        let mut offset = 0u64;
        for &(len, rows) in &self.chunks {
            let least = u64::from(rows) * LEAST_RECORD;
            if rows == 0 || least > len.into() || u64::from(len) > MOST_CHUNK {
                return Err(malformed("it contains an impossible chunk"));
            }
            chunks.push(Chunk { offset, len, rows });
            // Fewer than 2^64 bytes: the index has fewer than 2^32 chunks.
            offset = offset.saturating_add(len.into());
        }
        Ok((chunks, offset))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn encoded_chunks_come_back(lens in proptest::collection::vec((16u32..100_000, 1u32..100), 0..50)) {
            let mut offset = 0;
            let chunks: Vec<Chunk> = lens.iter().map(|&(len, rows)| {
                let chunk = Chunk { offset, len, rows: rows.min(len / 16) };
                offset += u64::from(len);
                chunk
            }).collect();
            let header = Header { size: offset, digest: 7 };
            let bytes = encode_index(&header, &chunks);
            prop_assert_eq!(decode_index(&bytes, &header, offset).unwrap(), Some(chunks.clone()));
            prop_assert_eq!(decode_index(&bytes, &Header { digest: 8, ..header }, offset).unwrap(), None);
            prop_assert!(decode_index(&bytes, &header, offset + 1).is_err());
            prop_assert!(decode_index(&bytes[..bytes.len() - 1], &header, offset).is_err());
        }

        #[test]
        fn any_bytes_are_an_index_or_an_error(bytes in any::<Vec<u8>>()) {
            if let Ok(Some(chunks)) = decode_index(&bytes, &Header { size: 1000, digest: 0 }, 1000) {
                prop_assert!(chunks.iter().all(|c| c.rows > 0 && c.end() <= 1000));
            }
        }
    }
}
