//! The chunks of a source's files. A chunk is a unit: consecutive whole rows of a file, which are read at once.

use std::sync::Arc;

use crate::buffers::Buffer;
use crate::error::{Error, ErrorKind};
use crate::fallible::try_reserve;
use crate::source::{ByteRange, Fetched, UnitInfo};

/// Number of chunks that share one count of the rows before them.
const STEP: usize = 64;

/// Consecutive whole rows of a file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Chunk {
    /// Offset of the first byte.
    pub offset: u64,
    /// Length in bytes.
    pub len: u32,
    /// Number of rows.
    pub rows: u32,
}

impl Chunk {
    /// Returns the position after the chunk.
    pub fn end(&self) -> u64 {
        self.offset + u64::from(self.len)
    }
}

#[derive(Debug)]
struct File {
    path: Arc<str>,
    first_unit: u64,
    /// The number of rows before the file.
    first_row: u64,
}

/// The chunks of several files, in sequence. Each takes about 16 bytes.
#[derive(Debug, Default)]
pub struct Chunks {
    files: Vec<File>,
    chunks: Vec<Chunk>,
    /// The number of rows before each [`STEP`]th chunk, counted over all files.
    rows_before: Vec<u64>,
    rows: u64,
}

impl Chunks {
    /// Adds a file with its chunks.
    ///
    /// # Errors
    /// [`ErrorKind::OutOfMemory`].
    pub fn add(&mut self, path: &Arc<str>, chunks: impl ExactSizeIterator<Item = Chunk>) -> Result<(), Error> {
        self.files.push(File {
            path: path.clone(),
            first_unit: self.units(),
            first_row: self.rows,
        });
        let what = "the list of all chunks";
        try_reserve(&mut self.chunks, chunks.len(), what).map_err(|e| e.at_path(path))?;
        try_reserve(&mut self.rows_before, chunks.len() / STEP + 1, what).map_err(|e| e.at_path(path))?;
        for chunk in chunks {
            if self.chunks.len().is_multiple_of(STEP) {
                self.rows_before.push(self.rows);
            }
            self.chunks.push(chunk);
            self.rows += u64::from(chunk.rows);
        }
        Ok(())
    }

    /// Returns the number of chunks.
    pub fn units(&self) -> u64 {
        self.chunks.len() as u64
    }

    /// Returns the number of chunks of each file.
    pub fn units_by_file(&self) -> Vec<u64> {
        let ends = self.files.iter().skip(1).map(|file| file.first_unit);
        let ends = ends.chain([self.units()]);
        ends.zip(&self.files).map(|(end, file)| end - file.first_unit).collect()
    }

    /// Returns a chunk.
    pub fn get(&self, unit: u64) -> Chunk {
        self.chunks[unit as usize]
    }

    /// Returns the index of a chunk's file.
    pub fn file(&self, unit: u64) -> usize {
        let after = self.files.partition_point(|file| file.first_unit <= unit);
        after.saturating_sub(1)
    }

    /// Returns the file of a chunk, and the index of the chunk in the file.
    pub fn unit_in_file(&self, unit: u64) -> (&Arc<str>, u64) {
        let file = &self.files[self.file(unit)];
        (&file.path, unit - file.first_unit)
    }

    /// Returns the file of a row of a chunk, and the index of the row in the file.
    pub fn row_in_file(&self, unit: u64, record: u64) -> (&Arc<str>, u64) {
        let (file, step) = (&self.files[self.file(unit)], unit as usize / STEP);
        let since = self.chunks[step * STEP..unit as usize].iter();
        let before = self.rows_before[step] + since.map(|chunk| u64::from(chunk.rows)).sum::<u64>();
        (&file.path, before - file.first_row + record)
    }

    /// Returns the facts about a chunk. It is read from its file, the location with the same index, and its source has
    /// only one class of units.
    pub fn describe(&self, unit: u64) -> UnitInfo {
        let chunk = self.get(unit);
        UnitInfo {
            rows: chunk.rows,
            range: Some(ByteRange {
                location: self.file(unit) as u32,
                offset: chunk.offset,
                len: chunk.len.into(),
            }),
            class: 0,
            apart: false,
            held: None,
        }
    }

    /// Returns the fetched bytes of a chunk.
    ///
    /// # Errors
    /// [`ErrorKind::Internal`] if there are more or fewer bytes.
    pub fn bytes_of(&self, unit: u64, fetched: Fetched) -> Result<Buffer, Error> {
        let (bytes, len) = (fetched.into_bytes(), self.get(unit).len);
        if bytes.len() != len as usize {
            let reason = format!("a chunk of {len} bytes was read as {} bytes", bytes.len());
            return Err(Error::new(ErrorKind::Internal, reason));
        }
        Ok(bytes)
    }

    /// Adds the file of a chunk, the index of the chunk in the file, and the unit to the location of an error.
    pub fn locate(&self, unit: u64, error: Error) -> Error {
        let (path, number) = self.unit_in_file(unit);
        let error = error.at_block(number, self.get(unit).offset);
        error.at_path(path).at_unit(unit)
    }

    /// Writes the layout of all chunks to `out`, for a digest. This is the number of chunks of each file, then the
    /// offset, bytes and rows of each chunk, all little-endian.
    pub fn write_layout(&self, mut out: impl FnMut(&[u8])) {
        let mut chunks = self.chunks.iter();
        for count in self.units_by_file() {
            out(&count.to_le_bytes());
            for chunk in chunks.by_ref().take(count as usize) {
                let mut bytes = [0; 16];
                bytes[..8].copy_from_slice(&chunk.offset.to_le_bytes());
                bytes[8..12].copy_from_slice(&chunk.len.to_le_bytes());
                bytes[12..].copy_from_slice(&chunk.rows.to_le_bytes());
                out(&bytes);
            }
        }
    }
}

/// Returns the error for a chunk that ends after `found` rows, although `indexed` rows were found before.
#[cold]
pub fn fewer_rows(found: u32, indexed: u32) -> Error {
    let reason = format!("the chunk has {found} rows, but had {indexed} when the file was indexed: the file changed");
    Error::new(ErrorKind::Storage, reason)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn chunks_match_a_naive_list(
            files in proptest::collection::vec(proptest::collection::vec((1u32..9, 0u32..4), 0..90), 0..5),
        ) {
            let (mut chunks, mut naive) = (Chunks::default(), Vec::new());
            for (number, file) in files.iter().enumerate() {
                let (path, mut offset, mut rows): (Arc<str>, _, _) = (format!("f{number}").into(), 3, 0);
                let mut own = Vec::new();
                for (index, &(len, count)) in file.iter().enumerate() {
                    let chunk = Chunk { offset, len, rows: count };
                    own.push(chunk);
                    naive.push((chunk, number, index as u64, rows));
                    (offset, rows) = (chunk.end(), rows + u64::from(count));
                }
                chunks.add(&path, own.into_iter()).unwrap();
            }
            prop_assert_eq!(chunks.units(), naive.len() as u64);
            let counts: Vec<u64> = files.iter().map(|file| file.len() as u64).collect();
            prop_assert_eq!(chunks.units_by_file(), counts);
            for (unit, &(chunk, file, index, rows)) in (0..).zip(&naive) {
                let path: Arc<str> = format!("f{file}").into();
                prop_assert_eq!((chunks.get(unit), chunks.file(unit)), (chunk, file));
                prop_assert_eq!(chunks.unit_in_file(unit), (&path, index));
                prop_assert_eq!(chunks.row_in_file(unit, 2), (&path, rows + 2));
                let info = chunks.describe(unit);
                let range = info.range.unwrap();
                prop_assert_eq!((range.location as usize, range.offset, range.len), (file, chunk.offset, chunk.len.into()));
                let error = chunks.locate(unit, fewer_rows(0, 1));
                let found = error.location();
                prop_assert_eq!((&found.path, found.block, found.offset), (&Some(path), Some(index), Some(chunk.offset)));
                prop_assert!(chunks.bytes_of(unit, Fetched::Nothing).is_err());
            }
        }

        #[test]
        fn layouts_differ_if_a_chunk_moves(counts in proptest::collection::vec(0usize..5, 1..5), moved in 0usize..20) {
            let layout = |counts: &[usize], first: u64| {
                let (mut chunks, mut bytes) = (Chunks::default(), Vec::new());
                for &count in counts {
                    let chunk = |i| Chunk { offset: first + i as u64, len: 1, rows: 1 };
                    chunks.add(&"x".into(), (0..count).map(chunk)).unwrap();
                }
                chunks.write_layout(|part| bytes.extend_from_slice(part));
                bytes
            };
            let whole = layout(&counts, 0);
            prop_assert_eq!(whole.len(), 8 * counts.len() + 16 * counts.iter().sum::<usize>());
            let at = moved % counts.len();
            let mut other = counts.clone();
            other[at] += 1;
            prop_assert_ne!(layout(&other, 0), whole.clone());
            if counts.iter().any(|&count| count > 0) {
                prop_assert_ne!(layout(&counts, 1), whole);
            }
        }
    }
}
