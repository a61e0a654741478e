//! Encodes the chunks of a file compactly, so that they can be cached. The encoding contains the length, the number of
//! rows and the number of skipped ragged rows of each chunk as varints in
//! [postcard's wire format](https://postcard.jamesmunns.com/wire-format). It also contains the columns that have nulls,
//! if nulls were searched for. For a file with rows of 100 bytes, the index is about 1/10,000 of the file's size.
//!
//! The decoder doesn't trust the bytes. It returns only chunks that could exist in a file of this size.

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, digest_of_ends};
use serde::{Deserialize, Serialize};

use crate::file::CsvChunk;
use crate::header::Header;
use crate::joining::MOST_BYTES;
use crate::nulls::FirstNulls;

/// The version of this format.
const VERSION: u8 = 4;

#[derive(Serialize, Deserialize)]
struct Index {
    version: u8,
    digest: u64,
    columns: u64,
    first: u64,
    /// Bytes, rows and skipped rows of each chunk.
    chunks: Vec<(u32, u32, u32)>,
    nulls: Option<FirstNulls>,
}

/// The result of scanning a file: its chunks, and its nulls if they were searched for.
pub type Indexed = (Vec<CsvChunk>, Option<FirstNulls>);

/// Encodes the result of scanning a file.
pub fn encode_index(header: &Header, chunks: &[CsvChunk], nulls: Option<&FirstNulls>) -> Vec<u8> {
    let index = Index {
        version: VERSION,
        digest: header.digest,
        columns: header.names.len() as u64,
        first: header.first,
        chunks: chunks
            .iter()
            .map(|chunk| (chunk.len, chunk.rows, chunk.skipped))
            .collect(),
        nulls: nulls.cloned(),
    };
    postcard::to_allocvec(&index).expect("writing to memory never fails")
}

/// Decodes the result of scanning a file. Returns `None` if it belongs to a file with another header.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not an index, or if its chunks can't exist in such a file.
pub fn decode_index(bytes: &[u8], header: &Header, size: u64) -> Result<Option<Indexed>> {
    let index = Index::parse(bytes)?;
    if (index.digest, index.columns, index.first) != (header.digest, header.names.len() as u64, header.first) {
        return Ok(None);
    }
    let (chunks, end) = index.chunks()?;
    if end != size && !chunks.is_empty() {
        return Err(malformed("its chunks don't cover the file"));
    }
    Ok(Some((chunks, index.nulls)))
}

/// Decodes the index of a file that has grown since. Returns the chunks that are still valid, and the nulls in them.
/// Returns `None` if no chunk is valid, or if the old part of the file has changed. Only the first bytes and the former
/// last bytes are compared to detect a change.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not an index, or if its chunks can't exist in a file. Also returns errors
/// of reading the file.
pub fn decode_front(bytes: &[u8], header: &Header, file: &dyn ReadAt) -> Result<Option<Indexed>> {
    let index = Index::parse(bytes)?;
    let (mut chunks, size) = index.chunks()?;
    let alike = (index.columns, index.first) == (header.names.len() as u64, header.first);
    if !alike || size >= header.size || digest_of_ends(file, size)? != index.digest {
        return Ok(None);
    }
    // The last row may have continued. If the longer row is skipped now, its chunk may have no rows left, and such a
    // chunk is merged into the previous one. So the last two chunks must be scanned again.
    chunks.truncate(chunks.len().saturating_sub(2));
    let Some(end) = chunks.last().map(|last| last.offset + u64::from(last.len)) else {
        return Ok(None);
    };
    let in_front = |nulls: FirstNulls| nulls.iter().map(|first| first.filter(|&at| at < end)).collect();
    Ok(Some((chunks, index.nulls.map(in_front))))
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

impl Index {
    fn parse(bytes: &[u8]) -> Result<Index> {
        let (index, rest) = postcard::take_from_bytes::<Index>(bytes).map_err(|e| malformed(&e.to_string()))?;
        if index.version != VERSION || !rest.is_empty() {
            return Err(malformed("it has another version, or extra bytes at its end"));
        }
        Ok(index)
    }

    /// Returns the chunks and the end of the last one.
    fn chunks(&self) -> Result<(Vec<CsvChunk>, u64)> {
        let mut chunks = fastpipe_batch::try_with_capacity(self.chunks.len(), "the index of a file's rows")?;
        let mut offset = self.first;
        for &(len, rows, skipped) in &self.chunks {
            // A row has at least one byte.
            if rows.checked_add(skipped).is_none_or(|all| all > len) || len == 0 || u64::from(len) > MOST_BYTES {
                return Err(malformed("it contains an impossible chunk"));
            }
            chunks.push(CsvChunk {
                offset,
                len,
                rows,
                skipped,
            });
            offset = offset
                .checked_add(len.into())
                .ok_or_else(|| malformed("its chunks don't cover the file"))?;
        }
        if let Some(nulls) = &self.nulls {
            let lie_there = nulls.iter().flatten().all(|at| (self.first..offset).contains(at));
            if nulls.len() as u64 != self.columns || !lie_there {
                return Err(malformed("it contains impossible positions of nulls"));
            }
        }
        Ok((chunks, offset))
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
        fn what_is_kept_comes_back(
            lens in proptest::collection::vec((1u32..100_000, 0u32..100, 0u32..100), 0..50),
            nulls in proptest::option::of(proptest::collection::vec(proptest::option::of(any::<prop::sample::Index>()), 2)),
        ) {
            let mut offset = 4;
            let chunks: Vec<CsvChunk> = lens.iter().map(|&(len, rows, skipped)| {
                let rows = rows.min(len);
                let chunk = CsvChunk { offset, len, rows, skipped: skipped.min(len - rows) };
                offset += u64::from(len);
                chunk
            }).collect();
            let nulls: Option<FirstNulls> = nulls.filter(|_| offset > 4).map(|nulls| {
                nulls.iter().map(|first| first.map(|at| 4 + at.index(offset as usize - 4) as u64)).collect()
            });
            let bytes = encode_index(&header(offset), &chunks, nulls.as_ref());
            let found = Some((chunks.clone(), nulls));
            prop_assert_eq!(decode_index(&bytes, &header(offset), offset).unwrap(), found);
            for wrong in [vec![None], vec![Some(3), None], vec![None, Some(offset)]] {
                let bytes = encode_index(&header(offset), &chunks, Some(&wrong));
                prop_assert!(decode_index(&bytes, &header(offset), offset).is_err());
            }
            let other = Header { digest: 78, ..header(offset) };
            prop_assert_eq!(decode_index(&bytes, &other, offset).unwrap(), None);
            if !chunks.is_empty() {
                prop_assert!(decode_index(&bytes, &header(offset), offset + 1).is_err());
            }
            prop_assert!(decode_index(&bytes[..bytes.len() - 1], &header(offset), offset).is_err());
        }

        #[test]
        fn any_bytes_are_an_index_or_an_error(bytes in any::<Vec<u8>>()) {
            if let Ok(Some((chunks, _))) = decode_index(&bytes, &header(1000), 1000) {
                prop_assert!(chunks.iter().all(|c| c.rows + c.skipped <= c.len && c.offset + u64::from(c.len) <= 1000));
            }
        }
    }
}
