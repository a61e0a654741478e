//! The headers of batches that are sent together: a mark, the number of batches, the length of each header, and the
//! headers.

use fastpipe_batch::{Error, ErrorKind, Result};

use crate::header::Header;

const MARK: [u8; 4] = *b"fpg1";

/// The size of a number in bytes.
const NUMBER: usize = 4;

/// Encodes the headers of batches that are sent together.
pub fn write_group<'a>(headers: impl ExactSizeIterator<Item = &'a [u8]> + Clone) -> Vec<u8> {
    let number = |number: usize| (number as u32).to_le_bytes();
    let lengths = headers.clone().flat_map(|header| number(header.len()));
    let front = MARK.into_iter().chain(number(headers.len())).chain(lengths);
    let mut written: Vec<u8> = front.collect();
    headers.for_each(|header| written.extend_from_slice(header));
    written
}

/// Decodes the headers of batches that were sent together.
///
/// # Errors
/// [`ErrorKind::Malformed`] if the bytes are not valid headers.
pub fn read_group(bytes: &[u8]) -> Result<Vec<Header>> {
    let malformed = |why| {
        Error::new(
            ErrorKind::Malformed,
            format!("the headers of batches can't be read: {why}"),
        )
    };
    let cut = || malformed("they end too early");
    let numbers = bytes
        .strip_prefix(&MARK)
        .ok_or_else(|| malformed("their format is unknown: use the same version of fastpipe on both sides"))?;
    let (count, rest) = numbers.split_first_chunk::<NUMBER>().ok_or_else(cut)?;
    let count = u32::from_le_bytes(*count) as usize;
    let lengths = count.checked_mul(NUMBER).ok_or_else(cut)?;
    let (lengths, mut rest) = rest.split_at_checked(lengths).ok_or_else(cut)?;
    let mut headers = Vec::new();
    for length in lengths.as_chunks::<NUMBER>().0 {
        let (header, others) = rest
            .split_at_checked(u32::from_le_bytes(*length) as usize)
            .ok_or_else(cut)?;
        headers.push(Header::read(header)?);
        rest = others;
    }
    match rest.is_empty() {
        true => Ok(headers),
        false => Err(malformed("unexpected bytes follow them")),
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_engine::BatchInfo;
    use proptest::collection::vec;
    use proptest::prelude::*;

    use super::*;

    fn headers(steps: &[u64]) -> Vec<Header> {
        let header = |&step: &u64| Header {
            info: BatchInfo {
                step,
                ..BatchInfo::default()
            },
            lens: vec![3],
            sums: vec![step],
            parts: Vec::new(),
            dense_shapes: Vec::new(),
        };
        steps.iter().map(header).collect()
    }

    proptest! {
        #[test]
        fn headers_come_back_together(steps in vec(any::<u64>(), 0..9), at in any::<usize>(), bit in 0..8u32) {
            let headers = headers(&steps);
            let each: Vec<_> = headers.iter().map(Header::write).collect();
            let mut written = write_group(each.iter().map(Vec::as_slice));
            prop_assert_eq!(read_group(&written).unwrap(), headers);
            prop_assert!(read_group(&written[..at % written.len()]).is_err());
            let at = at % written.len();
            written[at] ^= 1 << bit;
            prop_assert_eq!(read_group(&written).unwrap_err().kind(), ErrorKind::Malformed);
        }

        #[test]
        fn what_is_none_is_refused(count in any::<u32>(), body in vec(any::<u8>(), 0..200)) {
            let bytes = [&MARK[..], &count.to_le_bytes(), &body].concat();
            prop_assert!(read_group(&bytes).map_or(true, |headers| headers.is_empty()));
            prop_assert!(read_group(&body).is_err());
        }
    }
}
