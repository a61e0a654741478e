//! Finds the chunks of a file by a walk from record to record.
//!
//! A walk reads the length of each record. It reads small records with their neighbors, in pieces of 256 KiB. Of large
//! records, such as images, it reads only the first bytes and then seeks to the next record.

use fastpipe_batch::{Chunk, Error, ErrorKind, ReadAt, Result, try_filled};

use crate::framing::{HEAD, MOST_RECORD_BYTES, TAIL, cut_short, declared, wrong_length};

/// A chunk ends with the record that fills this many bytes. A larger record is a chunk of its own.
pub const CHUNK_BYTES: u64 = 64 << 10;

/// Bytes that are read at once.
const PIECE: usize = 256 << 10;

/// Number of bytes of a record without data.
pub(crate) const LEAST_RECORD: u64 = (HEAD + TAIL) as u64;

/// Maximum size of a chunk in bytes.
pub(crate) const MOST_CHUNK: u64 = CHUNK_BYTES + MOST_RECORD_BYTES + LEAST_RECORD;

/// A walk over the chunks of a file, from a position at which a record starts. A chunk has at least one record.
pub struct Walk<'f> {
    file: &'f dyn ReadAt,
    size: u64,
    at: u64,
    /// Bytes of the file from `start` on. The first `len` ones are valid.
    piece: Vec<u8>,
    start: u64,
    len: usize,
    /// Size of the last record.
    last: u64,
}

impl<'f> Walk<'f> {
    /// Starts a walk at `from`, the start of the file or the end of a chunk.
    pub fn new(file: &'f dyn ReadAt, size: u64, from: u64) -> Walk<'f> {
        Walk {
            file,
            size,
            at: from,
            piece: Vec::new(),
            start: 0,
            len: 0,
            last: 0,
        }
    }

    /// Returns the size of the record that starts at `at`.
    fn record(&mut self, at: u64) -> Result<u64> {
        let left = self.size - at;
        if left < HEAD as u64 {
            let reason = format!(
                "the file ends within the length of a record, of which only {left} bytes follow: it is truncated"
            );
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        let length = declared(&self.head(at)?).ok_or_else(wrong_length)?;
        let behind = left - HEAD as u64;
        if length.saturating_add(TAIL as u64) > behind {
            return Err(cut_short(length, behind));
        }
        if length > MOST_RECORD_BYTES {
            let reason = format!(
                "the record has {length} bytes, and the limit of Protocol Buffers is {MOST_RECORD_BYTES} bytes"
            );
            return Err(Error::new(ErrorKind::Limit, reason));
        }
        Ok(length + LEAST_RECORD)
    }

    /// Returns the first bytes of the record that starts at `at`.
    fn head(&mut self, at: u64) -> Result<[u8; HEAD]> {
        let known = at
            .checked_sub(self.start)
            .filter(|&before| before + HEAD as u64 <= self.len as u64);
        if let Some(head) = known.and_then(|before| self.piece.get(before as usize..)?.first_chunk()) {
            return Ok(*head);
        }
        if self.last > PIECE as u64 {
            let mut head = [0; HEAD];
            let found = self.file.glance_at(at, &mut head)?;
            return if found == HEAD { Ok(head) } else { Err(shorter()) };
        }
        if self.piece.is_empty() {
            self.piece = try_filled(0, PIECE.min(self.size as usize), "a part of a file")?;
        }
        self.start = at;
        self.len = self.file.read_at(at, &mut self.piece)?;
        self.piece[..self.len].first_chunk().copied().ok_or_else(shorter)
    }

    fn chunk(&mut self) -> Result<Chunk> {
        let (offset, mut rows) = (self.at, 0);
        while self.at < self.size && self.at - offset < CHUNK_BYTES {
            let bytes = self.record(self.at).map_err(|error| error.at_offset(self.at))?;
            if rows > 0 && bytes >= CHUNK_BYTES {
                break;
            }
            (self.last, rows) = (bytes, rows + 1);
            self.at += bytes;
        }
        // At most `MOST_CHUNK`, which fits.
        let len = (self.at - offset) as u32;
        Ok(Chunk { offset, len, rows })
    }
}

#[cold]
fn shorter() -> Error {
    let reason = "the file became shorter while its records were located: start again when no process writes to it";
    Error::new(ErrorKind::Storage, reason)
}

impl Iterator for Walk<'_> {
    type Item = Result<Chunk>;

    fn next(&mut self) -> Option<Result<Chunk>> {
        if self.at >= self.size {
            return None;
        }
        let found = self.chunk().map_err(|error| error.at_path(self.file.location()));
        if found.is_err() {
            self.at = self.size;
        }
        Some(found)
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_batch::MemoryFile;
    use proptest::prelude::*;

    use super::*;
    use crate::framing::tests::file;
    use crate::header::Header;
    use crate::index::{decode_front, encode_index};

    fn chunks(bytes: &[u8]) -> Result<Vec<Chunk>> {
        Walk::new(&MemoryFile(bytes), bytes.len() as u64, 0).collect()
    }

    fn records(sizes: &[usize]) -> Vec<Vec<u8>> {
        sizes.iter().map(|&size| vec![b'x'; size]).collect()
    }

    fn sizes() -> impl Strategy<Value = Vec<usize>> {
        let size = prop_oneof![4 => 0usize..100, 3 => 5_000usize..30_000, 1 => 65_000usize..66_000, 1 => 200_000usize..600_000];
        proptest::collection::vec(size, 0..40)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(64))]

        #[test]
        fn chunks_cover_a_file_with_whole_records(sizes in sizes()) {
            let bytes = file(&records(&sizes));
            let (found, mut at, mut left) = (chunks(&bytes).unwrap(), 0, &sizes[..]);
            for chunk in &found {
                prop_assert_eq!(chunk.offset, at);
                let (own, rest) = left.split_at(chunk.rows as usize);
                prop_assert_eq!(own.iter().map(|size| *size as u64 + 16).sum::<u64>(), u64::from(chunk.len));
                prop_assert!(chunk.rows == 1 || u64::from(chunk.len) < 2 * CHUNK_BYTES);
                (at, left) = (chunk.end(), rest);
            }
            prop_assert!(left.is_empty());
            prop_assert_eq!(at, bytes.len() as u64);
        }

        #[test]
        fn a_truncated_file_is_an_error_with_an_offset(sizes in sizes(), cut in any::<prop::sample::Index>()) {
            let bytes = file(&records(&sizes));
            prop_assume!(!bytes.is_empty());
            let cut = cut.index(bytes.len());
            let ends = sizes.iter().scan(0, |at, size| { *at += size + 16; Some(*at) });
            let last = std::iter::once(0).chain(ends).take_while(|&end| end <= cut).last().unwrap();
            match chunks(&bytes[..cut]) {
                Ok(_) => prop_assert_eq!(last, cut),
                Err(error) => {
                    prop_assert_eq!(error.kind(), ErrorKind::Malformed);
                    prop_assert_eq!(error.location().offset, Some(last as u64));
                }
            }
        }

        #[test]
        fn the_index_of_the_front_extended_is_that_of_all(sizes in sizes(), cut in any::<prop::sample::Index>()) {
            prop_assume!(!sizes.is_empty());
            let bytes = file(&records(&sizes));
            let front = file(&records(&sizes[..cut.index(sizes.len())]));
            let (whole, old) = (chunks(&bytes).unwrap(), chunks(&front).unwrap());
            let before = Header::read(&MemoryFile(&front)).unwrap();
            let memory = MemoryFile(&bytes);
            let header = Header::read(&memory).unwrap();
            let index = encode_index(&before, &old);
            let known = decode_front(&index, &header, &memory).unwrap();
            prop_assert_eq!(known.is_some(), old.len() > 1);
            let mut all = known.unwrap_or_default();
            let from = all.last().map_or(0, Chunk::end);
            for chunk in Walk::new(&memory, bytes.len() as u64, from) {
                all.push(chunk.unwrap());
            }
            prop_assert_eq!(all, whole);
        }
    }

    #[test]
    fn declared_lengths_allocate_nothing() {
        for length in [1 << 20, 1 << 31, 1 << 40, u64::MAX] {
            let mut bytes = length.to_le_bytes().to_vec();
            bytes.extend(crate::framing::masked_crc(&length.to_le_bytes()).to_le_bytes());
            bytes.extend([0; 100]);
            let error = chunks(&[file(&records(&[3])), bytes].concat()).unwrap_err();
            assert_eq!(
                (error.kind(), error.location().offset),
                (ErrorKind::Malformed, Some(19))
            );
            assert!(error.reason().contains("truncated"), "{error}");
        }
    }
}
