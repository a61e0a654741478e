//! Hashes of the values of a column, by which rows are divided.

use crate::Result;
use crate::error::{Error, ErrorKind};
use crate::fallible::try_with_capacity;
use crate::key::hash_of;

/// The purpose of the memory for hashes, as named in error messages.
const HASHES: &str = "the hashes of a column";

/// Returns the 64-bit XXH3 hash of each integer's eight bytes, the lowest first.
///
/// # Errors
/// [`ErrorKind::OutOfMemory`].
pub fn hash_integers(values: &[i64], seed: u64) -> Result<Vec<u64>> {
    let mut hashes = try_with_capacity(values.len(), HASHES)?;
    hashes.extend(values.iter().map(|value| hash_of(&value.to_le_bytes(), seed)));
    Ok(hashes)
}

/// Returns the 64-bit XXH3 hash of each text. Text `i` has the bytes `offsets[i]` to `offsets[i + 1] - 1`.
///
/// # Errors
/// [`ErrorKind::Shape`] if an offset is outside of the bytes, or less than the preceding one;
/// [`ErrorKind::OutOfMemory`].
pub fn hash_texts(bytes: &[u8], offsets: &[i64], seed: u64) -> Result<Vec<u64>> {
    let mut hashes = try_with_capacity(offsets.len().saturating_sub(1), HASHES)?;
    for pair in offsets.windows(2) {
        let range = usize::try_from(pair[0]).ok().zip(usize::try_from(pair[1]).ok());
        let Some(text) = range.and_then(|(start, end)| bytes.get(start..end)) else {
            let reason = format!("a text from byte {} to {} of {}", pair[0], pair[1], bytes.len());
            return Err(Error::new(ErrorKind::Shape, reason));
        };
        hashes.push(hash_of(text, seed));
    }
    Ok(hashes)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// As the reference implementation computes them.
    #[test]
    fn hashes_never_change() {
        let hashes = hash_texts(b"abc", &[0, 0, 3], 0).unwrap();
        assert_eq!(hashes, [0x2d06_8005_38d3_94c2, 0x78af_5f94_892f_3950]);
        let bytes = 7i64.to_le_bytes();
        assert_eq!(hash_integers(&[7], 3).unwrap(), hash_texts(&bytes, &[0, 8], 3).unwrap());
        assert_ne!(hash_integers(&[7], 3).unwrap(), hash_integers(&[7], 4).unwrap());
    }

    #[test]
    fn offsets_outside_of_the_bytes_are_errors() {
        for offsets in [[0, 4], [-1, 2], [2, 1], [5, 5]] {
            let error = hash_texts(b"abc", &offsets, 0).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Shape);
        }
        assert!(hash_texts(b"", &[], 0).unwrap().is_empty());
    }
}
