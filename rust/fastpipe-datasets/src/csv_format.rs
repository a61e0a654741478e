//! CSV files as a [`Format`]: connects `fastpipe-csv` with `fastpipe-files`. A block is a chunk of rows ([`CsvChunk`]).

mod file_window;
mod walk;

use std::sync::atomic::AtomicU64;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, Result};
use fastpipe_csv::{
    CHUNK_BYTES, CsvChunk, Dialect, FirstNulls, Header, Indexed, Joining, Lines, NullSearch, decode_front,
    decode_index, encode_index, scan,
};
use fastpipe_files::{CompressedText, Compression, Extent, Format, Layout, Packed};

use self::file_window::FileWindow;
use self::walk::Walk;

/// Describes what positions in compressed files refer to, except positions of damage.
pub(crate) const TEXT: &str = "decompressed text";

/// The format of CSV files with one dialect.
pub(crate) struct CsvFormat {
    dialect: Dialect,
    tag: Vec<u8>,
    /// Number of threads that scan a file.
    threads: usize,
    /// Whether to find the rows.
    scans: bool,
    /// Whether to find nulls as well.
    seeks_nulls: bool,
}

impl CsvFormat {
    /// Creates a format that finds rows with this many threads per file and, if `seeks_nulls`, the columns with nulls.
    pub(crate) fn new(dialect: Dialect, threads: usize, seeks_nulls: bool) -> CsvFormat {
        CsvFormat {
            tag: dialect.tag(),
            dialect,
            threads: threads.max(1),
            scans: true,
            seeks_nulls,
        }
    }

    /// Creates a format that reads only the headers of files.
    pub(crate) fn unscanned(dialect: Dialect) -> CsvFormat {
        CsvFormat {
            scans: false,
            ..CsvFormat::new(dialect, 1, false)
        }
    }
}

/// Information about a file before its rows are found. After that, it also contains the nulls of columns, if requested,
/// and the restart points of a compressed file.
pub(crate) struct CsvHeader {
    pub(crate) header: Header,
    compression: Option<Compression>,
    layout: OnceLock<Arc<Layout>>,
    nulls: Mutex<Option<FirstNulls>>,
}

impl CsvHeader {
    /// Returns the compression of a file whose rows were found, or `None` if it isn't compressed.
    pub(crate) fn packed(&self) -> Option<Packed> {
        let layout = self.layout.get()?.clone();
        self.compression.map(|compression| Packed { compression, layout })
    }

    /// Returns the first null of each column, if nulls were searched for.
    pub(crate) fn nulls(&self) -> MutexGuard<'_, Option<FirstNulls>> {
        // No code panics while it holds this lock.
        self.nulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Stores the nulls of an index and returns its chunks. Returns `None` if nulls are needed and the index lacks
    /// them.
    fn take(&self, found: Option<Indexed>, seeks_nulls: bool) -> Option<Vec<CsvChunk>> {
        let (chunks, nulls) = found?;
        if seeks_nulls && nulls.is_none() {
            return None;
        }
        *self.nulls() = nulls;
        Some(chunks)
    }
}

impl Format for CsvFormat {
    type Header = CsvHeader;
    type Block = CsvChunk;
    /// Chunks of a few megabytes in total.
    const BLOCKS_AT_ONCE: usize = 64;
    const WALK_READS_ALL: bool = true;

    fn cache_tag(&self) -> &[u8] {
        &self.tag
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<CsvHeader> {
        let mut start = [0; Compression::MAGIC_BYTES];
        let found = file.read_at(0, &mut start)?;
        let compression = Compression::of(&start[..found]);
        if compression.is_some() && !self.scans {
            let reason = "a row at a random byte can't be found in a compressed file: use method=\"exact\", which finds all \
                          rows first, or method=\"stream\" with the output of `gunzip -c` or `zstd -dc`";
            return Err(Error::new(ErrorKind::Unsupported, reason).at_path(path));
        }
        let header = match compression {
            None => Header::read(file, &self.dialect),
            Some(compression) => {
                let text = CompressedText::new(file, compression);
                Header::read_compressed(file, &text, &self.dialect).map_err(of_text)
            }
        };
        Ok(CsvHeader {
            header: header.map_err(|e| e.at_path(path))?,
            compression,
            layout: OnceLock::new(),
            nulls: Mutex::default(),
        })
    }

    fn first_block(&self, header: &CsvHeader) -> u64 {
        header.header.first
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w CsvHeader,
    ) -> Result<impl Iterator<Item = Result<CsvChunk>> + 'w> {
        self.walk_from(file, header, header.header.first)
    }

    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w CsvHeader,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<CsvChunk>> + 'w> {
        let compressed = header.compression.map(|how| CompressedText::new(file, how));
        // If an index with nulls is extended, its nulls are kept. Nulls of a rejected index are dropped.
        let known = header.nulls().take().filter(|_| from > header.header.first);
        let front = known.or(self.seeks_nulls.then(FirstNulls::new));
        Ok(Walk {
            // The size of compressed text is known only at its end.
            size: AtomicU64::new(if compressed.is_some() {
                u64::MAX
            } else {
                header.header.size
            }),
            // Compressed text is decompressed in sequence.
            threads: if compressed.is_some() { 1 } else { self.threads },
            compressed,
            file,
            lines: Lines::new(&self.dialect, header.header.names.len()),
            nulls: front.map(|front| NullSearch::new(&self.dialect, header.header.names.len(), front)),
            at: if self.scans { from } else { header.header.size },
            window: FileWindow::default(),
            joining: Joining::default(),
            failed: None,
            header,
        })
    }

    fn extent(&self, chunk: &CsvChunk) -> Extent {
        Extent {
            offset: chunk.offset,
            len: chunk.len.into(),
            rows: chunk.rows,
        }
    }

    fn check_empty(
        &self,
        header: &CsvHeader,
        number: u64,
        chunk: &CsvChunk,
        stored: &[u8],
        _: &BufferPool,
    ) -> Result<()> {
        let found = scan(
            stored,
            chunk.offset,
            &Lines::new(&self.dialect, header.header.names.len()),
            CHUNK_BYTES,
            None,
        );
        let others = found.cuts.iter().any(|cut| cut.rows > 0);
        let skipped: u32 = found.cuts.iter().map(|cut| cut.skipped).sum();
        if stored.len() != chunk.len as usize || found.open.is_some() || others || skipped != chunk.skipped {
            let reason = "it lists an empty chunk that does not exist";
            return Err(Error::new(ErrorKind::Malformed, reason).at_block(number, chunk.offset));
        }
        Ok(())
    }

    fn encode(&self, header: &CsvHeader, chunks: &[CsvChunk]) -> Result<Vec<u8>> {
        let index = encode_index(&header.header, chunks, header.nulls().as_ref());
        match header.layout.get() {
            None => Ok(index),
            Some(layout) => Ok([layout.encode()?, index].concat()),
        }
    }

    fn decode(&self, header: &CsvHeader, index: &[u8], size: u64) -> Result<Option<Vec<CsvChunk>>> {
        if header.compression.is_none() {
            return Ok(header.take(decode_index(index, &header.header, size)?, self.seeks_nulls));
        }
        let (layout, index) = Layout::decode(index, size)?;
        let chunks = header.take(decode_index(index, &header.header, layout.size())?, self.seeks_nulls);
        // To check that a chunk is empty, all text before it would have to be decompressed, and then the rows can just
        // as well be found. Hardly any file has a megabyte without a row.
        let chunks = chunks.filter(|chunks| chunks.iter().all(|chunk| chunk.rows > 0));
        if chunks.is_some() {
            header.layout.get_or_init(|| Arc::new(layout));
        }
        Ok(chunks)
    }

    fn decode_front(&self, file: &dyn ReadAt, header: &CsvHeader, index: &[u8]) -> Result<Option<Vec<CsvChunk>>> {
        match header.compression {
            None => Ok(header.take(decode_front(index, &header.header, file)?, self.seeks_nulls)),
            // The data appended to a compressed file may be anything, and isn't examined.
            Some(_) => Ok(None),
        }
    }
}

/// Adds context to an error in the text of a compressed file. An error of decompression already has a path and a
/// position.
pub(crate) fn of_text(error: Error) -> Error {
    match error.location().path {
        Some(_) => error,
        None => error.with_offset_within(TEXT),
    }
}

#[cfg(test)]
mod tests {
    use fastpipe_csv::OnRagged;
    use fastpipe_files::SourceFile;

    use super::*;

    #[test]
    fn a_discarded_index_leaves_no_nulls() {
        let folder = tempfile::tempdir().unwrap();
        let path: Arc<str> = folder.path().join("x.csv").to_str().unwrap().into();
        std::fs::write(&*path, "a,b\n1,2\n3,4\n").unwrap();
        let file = SourceFile::open(&path).unwrap();
        let format = CsvFormat::new(Dialect::default(), 1, true);
        let header = format.read_header(&path, &file).unwrap();
        // The index claims a null in a chunk without rows.
        let empty = CsvChunk {
            offset: 4,
            len: 8,
            rows: 0,
            skipped: 0,
        };
        let index = encode_index(&header.header, &[empty], Some(&vec![Some(4), None]));
        assert_eq!(format.decode(&header, &index, 12).unwrap(), Some(vec![empty]));
        let pool = BufferPool::default();
        assert!(format.check_empty(&header, 0, &empty, b"1,2\n3,4\n", &pool).is_err());
        let found: Vec<CsvChunk> = format.walk(&file, &header).unwrap().collect::<Result<_>>().unwrap();
        assert_eq!(found.iter().map(|chunk| chunk.rows).sum::<u32>(), 2);
        assert_eq!(*header.nulls(), Some(vec![None, None]));
    }

    #[test]
    fn the_skipped_rows_of_a_chunk_without_rows_are_checked() {
        let dialect = Dialect {
            on_ragged: OnRagged::Skip,
            ..Dialect::default()
        };
        let text = b"1\n2,3,4\n";
        let folder = tempfile::tempdir().unwrap();
        let path: Arc<str> = folder.path().join("x.csv").to_str().unwrap().into();
        std::fs::write(&*path, [b"a,b\n", &text[..]].concat()).unwrap();
        let file = SourceFile::open(&path).unwrap();
        let format = CsvFormat::new(dialect, 1, false);
        let header = format.read_header(&path, &file).unwrap();
        let found: Vec<CsvChunk> = format.walk(&file, &header).unwrap().collect::<Result<_>>().unwrap();
        let [empty] = found[..] else { panic!("{found:?}") };
        assert_eq!((empty.rows, empty.skipped), (0, 2));
        let pool = BufferPool::default();
        format.check_empty(&header, 0, &empty, text, &pool).unwrap();
        let wrong = CsvChunk { skipped: 1, ..empty };
        assert!(format.check_empty(&header, 0, &wrong, text, &pool).is_err());
    }
}
