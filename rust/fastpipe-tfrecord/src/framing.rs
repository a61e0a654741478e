//! The framing of records: the length (8 bytes), the masked CRC-32C of the length (4 bytes), the data, and the masked
//! CRC-32C of the data (4 bytes). All integers are little-endian.

use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind};

/// Number of bytes before the data of a record.
pub(crate) const HEAD: usize = 12;

/// Number of bytes after the data of a record.
pub(crate) const TAIL: usize = 4;

/// Maximum size of a record's data in bytes: the limit of Protocol Buffers for a message.
pub const MOST_RECORD_BYTES: u64 = i32::MAX as u64;

/// Returns the masked CRC-32C of some bytes. A CRC of bytes that contain their own CRC is a poor check, so stored CRCs
/// are masked: rotated, with a constant added.
pub fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// Returns the length that a record declares, or `None` if its checksum doesn't match.
pub(crate) fn declared(head: &[u8; HEAD]) -> Option<u64> {
    let (length, crc) = head.split_at(8);
    let stored = u32::from_le_bytes(crc.try_into().ok()?);
    (masked_crc(length) == stored).then_some(u64::from_le_bytes(length.try_into().ok()?))
}

/// Returns the bytes before and after the data of a record, to write it.
///
/// # Errors
/// [`ErrorKind::Limit`] if the record is too large.
pub fn frame(data: &[u8]) -> Result<([u8; HEAD], [u8; TAIL]), Error> {
    let length = data.len() as u64;
    if length > MOST_RECORD_BYTES {
        let reason = format!("a record must have at most {MOST_RECORD_BYTES} bytes; got {length}");
        return Err(Error::new(ErrorKind::Limit, reason));
    }
    let mut head = [0; HEAD];
    head[..8].copy_from_slice(&length.to_le_bytes());
    let crc = masked_crc(&head[..8]);
    head[8..].copy_from_slice(&crc.to_le_bytes());
    Ok((head, masked_crc(data).to_le_bytes()))
}

/// The error for a record whose length has a wrong checksum.
#[cold]
pub(crate) fn wrong_length() -> Error {
    let reason = "the checksum of the record's length doesn't match: the file is damaged";
    Error::new(ErrorKind::Malformed, reason)
}

/// The error for a record that ends after its file or its chunk.
#[cold]
pub(crate) fn cut_short(length: u64, left: u64) -> Error {
    let reason =
        format!("the record declares {length} bytes of data, but only {left} bytes follow: the file is truncated");
    Error::new(ErrorKind::Malformed, reason)
}

/// Returns the position of the data of the record that starts at `at`. The data and its checksum are complete. The
/// checksum of the length is verified, that of the data isn't.
///
/// # Errors
/// [`ErrorKind::Malformed`], without a location.
#[inline]
pub(crate) fn data_at(bytes: &[u8], at: usize) -> Result<Range<usize>, Error> {
    let rest = bytes.get(at..).unwrap_or_default();
    let Some(head) = rest.first_chunk::<HEAD>() else {
        return Err(cut_short(0, rest.len() as u64));
    };
    let length = declared(head).ok_or_else(wrong_length)?;
    let left = (rest.len() - HEAD) as u64;
    if length.saturating_add(TAIL as u64) > left {
        return Err(cut_short(length, left));
    }
    let start = at + HEAD;
    Ok(start..start + length as usize)
}

/// Verifies the checksum of a record's data, which must be followed by its checksum.
///
/// # Errors
/// [`ErrorKind::Malformed`], without a location.
#[inline]
pub(crate) fn verify(bytes: &[u8], data: &Range<usize>) -> Result<(), Error> {
    let stored = bytes.get(data.end..).and_then(|rest| rest.first_chunk::<TAIL>());
    if stored.map(|crc| u32::from_le_bytes(*crc)) == Some(masked_crc(&bytes[data.clone()])) {
        return Ok(());
    }
    let reason = "the checksum of the record's data doesn't match: the file is damaged";
    Err(Error::new(ErrorKind::Malformed, reason))
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Returns a file with these records.
    pub(crate) fn file(records: &[Vec<u8>]) -> Vec<u8> {
        let framed = records.iter().map(|data| {
            let (head, tail) = frame(data).unwrap();
            [&head[..], data, &tail].concat()
        });
        framed.collect::<Vec<_>>().concat()
    }

    /// The check value of CRC-32C is from its specification. The mask is the one of TensorFlow's `crc32c.h`.
    #[test]
    fn checksums_never_change() {
        assert_eq!(crc32c::crc32c(b"123456789"), 0xe306_9283);
        assert_eq!(
            masked_crc(b"123456789"),
            0xe306_9283u32.rotate_right(15).wrapping_add(0xa282_ead8)
        );
        assert_eq!(frame(b"").unwrap().0, *b"\0\0\0\0\0\0\0\0\x29\x03\x98\x07");
    }

    proptest! {
        #[test]
        fn records_come_back(records in proptest::collection::vec(any::<Vec<u8>>(), 0..10)) {
            let (bytes, mut at) = (file(&records), 0);
            for record in &records {
                let data = data_at(&bytes, at).unwrap();
                prop_assert_eq!(&bytes[data.clone()], &record[..]);
                verify(&bytes, &data).unwrap();
                at = data.end + TAIL;
            }
            prop_assert_eq!(at, bytes.len());
        }

        #[test]
        fn any_changed_bit_is_found(record in any::<Vec<u8>>(), at in any::<prop::sample::Index>(), bit in 0..8) {
            let mut bytes = file(&[record]);
            let at = at.index(bytes.len());
            bytes[at] ^= 1u8 << bit;
            let found = data_at(&bytes, 0).and_then(|data| verify(&bytes, &data));
            prop_assert_eq!(found.unwrap_err().kind(), ErrorKind::Malformed);
        }
    }
}
