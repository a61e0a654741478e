//! The stretches of a file as few bytes, so that they can be kept: of each its length and its rows, as varints in
//! [postcard's wire format](https://postcard.jamesmunns.com/wire-format); and which columns have nulls, if they were
//! searched for. For a file with rows of 100 bytes that is a ten-thousandth of it.
//!
//! Nothing in those bytes is trusted: what comes out could be stretches of a file of this size.

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result};
use serde::{Deserialize, Serialize};

use crate::file::Stretch;
use crate::header::Header;
use crate::joining::MOST_BYTES;
use crate::nulls::FirstNulls;

/// The version of this format.
const VERSION: u8 = 3;

#[derive(Serialize, Deserialize)]
struct Index {
    version: u8,
    digest: u64,
    columns: u64,
    first: u64,
    /// Bytes and rows.
    stretches: Vec<(u32, u32)>,
    nulls: Option<FirstNulls>,
}

/// What is known of a file whose rows were found: its stretches, and its nulls, if these were searched for.
pub type Indexed = (Vec<Stretch>, Option<FirstNulls>);

/// Encodes what was found in a file.
pub fn encode_index(header: &Header, stretches: &[Stretch], nulls: Option<&FirstNulls>) -> Vec<u8> {
    let index = Index {
        version: VERSION,
        digest: header.digest,
        columns: header.names.len() as u64,
        first: header.first,
        stretches: stretches.iter().map(|s| (s.len, s.rows)).collect(),
        nulls: nulls.cloned(),
    };
    postcard::to_allocvec(&index).expect("memory takes whatever is written to it")
}

/// Decodes what was found in a file; `None` if that was a file with another header.
///
/// # Errors
/// Malformed, if the bytes are no index, or not one of stretches that such a file could have.
pub fn decode_index(bytes: &[u8], header: &Header, size: u64) -> Result<Option<Indexed>> {
    let index = Index::parse(bytes)?;
    if (index.digest, index.columns, index.first) != (header.digest, header.names.len() as u64, header.first) {
        return Ok(None);
    }
    let (stretches, end) = index.stretches()?;
    if end != size && !stretches.is_empty() {
        return Err(malformed("its stretches don't fill the file"));
    }
    Ok(Some((stretches, index.nulls)))
}

/// Decodes what was found in a file that had fewer bytes when its index was made, as far as the whole file has it:
/// stretches, and nulls in them. `None` if there are none, or the file isn't the same in front of what is new. That is
/// told by its first bytes, and by those that were the last.
///
/// # Errors
/// Malformed, if the bytes are no index, or not one of stretches that a file could have; those of reading the file.
pub fn decode_front(bytes: &[u8], header: &Header, file: &dyn ReadAt) -> Result<Option<Indexed>> {
    let index = Index::parse(bytes)?;
    let (mut stretches, size) = index.stretches()?;
    let alike = (index.columns, index.first) == (header.names.len() as u64, header.first);
    if !alike || size >= header.size || Header::digest_of_front(file, size)? != index.digest {
        return Ok(None);
    }
    // The last row may have gone on; and if that made it one that is passed over, nothing may begin with it any more,
    // so that it is part of the stretch in front of it.
    stretches.truncate(stretches.len().saturating_sub(2));
    let Some(end) = stretches.last().map(|last| last.offset + u64::from(last.len)) else {
        return Ok(None);
    };
    let in_front = |nulls: FirstNulls| nulls.iter().map(|first| first.filter(|&at| at < end)).collect();
    Ok(Some((stretches, index.nulls.map(in_front))))
}

fn malformed(reason: &str) -> Error {
    Error::new(ErrorKind::Malformed, reason)
}

impl Index {
    fn parse(bytes: &[u8]) -> Result<Index> {
        let (index, rest) = postcard::take_from_bytes::<Index>(bytes).map_err(|e| malformed(&e.to_string()))?;
        if index.version != VERSION || !rest.is_empty() {
            return Err(malformed("it is of another version, or something stands behind it"));
        }
        Ok(index)
    }

    /// The stretches, and where the last one ends.
    fn stretches(&self) -> Result<(Vec<Stretch>, u64)> {
        let mut stretches = fastpipe_batch::try_with_capacity(self.stretches.len(), "the index of a file's rows")?;
        let mut offset = self.first;
        for &(len, rows) in &self.stretches {
            // A row has a byte at least.
            if rows > len || len == 0 || u64::from(len) > MOST_BYTES {
                return Err(malformed("it has a stretch that can't be"));
            }
            stretches.push(Stretch { offset, len, rows });
            offset = offset
                .checked_add(len.into())
                .ok_or_else(|| malformed("its stretches don't fill the file"))?;
        }
        if let Some(nulls) = &self.nulls {
            let lie_there = nulls.iter().flatten().all(|at| (self.first..offset).contains(at));
            if nulls.len() as u64 != self.columns || !lie_there {
                return Err(malformed("it has nulls that can't be"));
            }
        }
        Ok((stretches, offset))
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
            lens in proptest::collection::vec((1u32..100_000, 0u32..100), 0..50),
            nulls in proptest::option::of(proptest::collection::vec(proptest::option::of(any::<prop::sample::Index>()), 2)),
        ) {
            let mut offset = 4;
            let stretches: Vec<Stretch> = lens.iter().map(|&(len, rows)| {
                let stretch = Stretch { offset, len, rows: rows.min(len) };
                offset += u64::from(len);
                stretch
            }).collect();
            let nulls: Option<FirstNulls> = nulls.filter(|_| offset > 4).map(|nulls| {
                nulls.iter().map(|first| first.map(|at| 4 + at.index(offset as usize - 4) as u64)).collect()
            });
            let bytes = encode_index(&header(offset), &stretches, nulls.as_ref());
            let found = Some((stretches.clone(), nulls));
            prop_assert_eq!(decode_index(&bytes, &header(offset), offset).unwrap(), found);
            for wrong in [vec![None], vec![Some(3), None], vec![None, Some(offset)]] {
                let bytes = encode_index(&header(offset), &stretches, Some(&wrong));
                prop_assert!(decode_index(&bytes, &header(offset), offset).is_err());
            }
            let other = Header { digest: 78, ..header(offset) };
            prop_assert_eq!(decode_index(&bytes, &other, offset).unwrap(), None);
            if !stretches.is_empty() {
                prop_assert!(decode_index(&bytes, &header(offset), offset + 1).is_err());
            }
            prop_assert!(decode_index(&bytes[..bytes.len() - 1], &header(offset), offset).is_err());
        }

        #[test]
        fn any_bytes_are_an_index_or_an_error(bytes in any::<Vec<u8>>()) {
            if let Ok(Some((stretches, _))) = decode_index(&bytes, &header(1000), 1000) {
                prop_assert!(stretches.iter().all(|s| s.rows <= s.len && s.offset + u64::from(s.len) <= 1000));
            }
        }
    }
}
