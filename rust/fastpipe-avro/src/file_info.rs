//! Facts about a file that are known before its blocks are read, and checks of what its blocks declare.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, Error, ErrorKind, Result};

use crate::codec::{Codec, decompress};
use crate::container::{Block, Header};
use crate::limits::{MAX_BLOCK_BYTES, MAX_EMPTY_RECORDS, MAX_ZERO_WIDTH};
use crate::schema::Schema;

/// Facts about a file that are known before its blocks are read.
pub struct FileInfo {
    /// Path of the file.
    pub path: Arc<str>,
    /// Header of the file.
    pub header: Header,
    /// Schema of the file.
    pub schema: Arc<Schema>,
    /// Codec of the file.
    pub codec: Codec,
}

impl FileInfo {
    /// Parses the contents of a header.
    pub fn new(path: Arc<str>, header: Header) -> Result<FileInfo> {
        Self::parsed(path, header, |json| Schema::parse(json).map(Arc::new))
    }

    /// Parses the contents of a header. `parse` returns the schema for a JSON text, for example from a cache of schemas
    /// of other files.
    pub fn parsed(path: Arc<str>, header: Header, parse: impl FnOnce(&str) -> Result<Arc<Schema>>) -> Result<FileInfo> {
        let at = |e: Error| e.at_path(&path);
        let codec = header.codec().map_err(at)?;
        let json = header.schema().map_err(at)?;
        let schema = parse(json).map_err(|e| at(e.at_offset(4)))?;
        Ok(FileInfo {
            path,
            header,
            schema,
            codec,
        })
    }

    /// Checks the record count in a block's header against the minimum size of a record and the maximum decompressed
    /// size of the block. Later code can rely on the count.
    pub fn check(&self, number: u64, block: &Block) -> Result<()> {
        let (rows, smallest) = (u64::from(block.rows), self.schema.smallest(self.schema.root()));
        let size = u64::from(block.size);
        let error = if smallest == 0 && rows > MAX_ZERO_WIDTH {
            let reason = format!("a block declares {rows} records of zero bytes; the limit is {MAX_ZERO_WIDTH}");
            Error::new(ErrorKind::Limit, reason)
        } else if rows.saturating_mul(smallest) > self.codec.most_decompressed(size) {
            Error::new(ErrorKind::Malformed, self.too_many(size, rows, smallest))
        } else if self.codec != Codec::Null && rows.saturating_mul(smallest) > MAX_BLOCK_BYTES as u64 {
            let reason = format!(
                "a {} block declares {rows} records of at least {smallest} bytes; the limit is {MAX_BLOCK_BYTES} bytes \
                 after decompression",
                self.codec
            );
            Error::new(ErrorKind::Limit, reason)
        } else {
            return Ok(());
        };
        Err(error.at_block(number, block.offset).at_path(&self.path))
    }

    #[cold]
    fn too_many(&self, size: u64, rows: u64, smallest: u64) -> String {
        let most = self.codec.most_decompressed(size);
        let bytes = match self.codec {
            Codec::Null => format!("{size} bytes"),
            codec => format!("{size} bytes, which {codec} decompresses to at most {most},"),
        };
        format!("a block of {bytes} can't hold the {rows} records of at least {smallest} bytes it declares")
    }

    /// Returns the index of the file that determines the layout of columns: the first file with records, or 0 if all
    /// files are empty.
    pub fn deciding(files: &[(FileInfo, Vec<Block>)]) -> usize {
        let found = files.iter().position(|(_, blocks)| !has_no_records(blocks));
        found.unwrap_or(0)
    }

    /// Checks the total counts that the blocks of the file declare.
    pub(crate) fn check_all(&self, blocks: &[Block]) -> Result<()> {
        if self.schema.smallest(self.schema.root()) > 0 {
            return Ok(());
        }
        let mut rows = 0;
        for (number, block) in (0..).zip(blocks) {
            // This can't overflow: each count has been checked against a limit.
            rows += u64::from(block.rows);
            if rows > MAX_EMPTY_RECORDS {
                let reason = format!(
                    "the file declares {rows} records of zero bytes up to this block; the limit is {MAX_EMPTY_RECORDS} \
                     per file"
                );
                let error = Error::new(ErrorKind::Limit, reason);
                return Err(error.at_block(number, block.offset).at_path(&self.path));
            }
        }
        Ok(())
    }

    /// Checks that a block that declares no records is empty after decompression.
    pub fn check_empty(&self, number: u64, block: &Block, stored: &[u8], pool: &BufferPool) -> Result<()> {
        let checked = decompress(self.codec, stored, 0, pool).and_then(|data| match data.len() {
            0 => Ok(()),
            n => Err(Error::new(
                ErrorKind::Malformed,
                format!("expected no bytes in a block that declares no records, found {n}"),
            )),
        });
        checked.map_err(|e| e.at_block(number, block.offset).at_path(&self.path))
    }
}

/// Returns whether a file with these blocks has no records.
pub(crate) fn has_no_records(blocks: &[Block]) -> bool {
    blocks.iter().all(|block| block.rows == 0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::container::SYNC_BYTES;
    use crate::source::AvroSource;

    fn info(kind: &str, codec: &str) -> FileInfo {
        let schema = format!(r#"{{"type": "record", "name": "R", "fields": [{{"name": "a", "type": "{kind}"}}]}}"#);
        let metadata = [("avro.schema", &*schema), ("avro.codec", codec)];
        let header = Header {
            metadata: metadata
                .map(|(key, value)| (key.to_owned(), value.as_bytes().to_vec()))
                .into(),
            sync: [7; SYNC_BYTES],
            size: 60,
        };
        FileInfo::new("x.avro".into(), header).unwrap()
    }

    fn block(rows: u32, size: u32) -> Block {
        Block {
            offset: 60,
            header: 10,
            size,
            rows,
            checksum: None,
        }
    }

    #[test]
    fn row_counts_beyond_the_bytes_of_a_block_are_refused() {
        // A double takes eight bytes.
        for (codec, size, most) in [
            ("null", 80, 10),
            ("deflate", 3, 3 * 1032 / 8),
            ("snappy", 34, 30 * 64 / 3 / 8),
            ("zstandard", 15, 3 * (128 << 10) / 8),
            ("bzip2", 41, 46_620_000 / 8),
            ("xz", 3, 3 * 7094 / 8),
        ] {
            let info = info("double", codec);
            info.check(0, &block(most, size)).unwrap();
            for rows in [most + 1, (1 << 31) - 1] {
                let error = info.check(3, &block(rows, size)).unwrap_err();
                assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
                assert_eq!((error.location().block, error.location().offset), (Some(3), Some(60)));
                assert!(
                    error.reason().contains(&format!("can't hold the {rows} records")),
                    "{error}"
                );
            }
        }
        // The codec allows the records, but they exceed the limit of decompressed bytes.
        let error = info("double", "deflate")
            .check(0, &block((1 << 27) + 1, 1 << 24))
            .unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
        info("double", "null").check(0, &block(1 << 27, 1 << 30)).unwrap();
    }

    #[test]
    fn records_without_bytes_are_counted_by_file() {
        let source = |blocks: &[Block]| AvroSource::new(&[], &[(info("null", "null"), blocks.to_vec())]).map(drop);
        let half = block(1 << 23, 0);
        source(&[half, half]).unwrap();
        let error = source(&[half, half, block(0, 0), block(1, 0)]).unwrap_err();
        assert_eq!(
            (error.kind(), error.location().block),
            (ErrorKind::Limit, Some(3)),
            "{error}"
        );
        assert_eq!(
            info("null", "deflate").check(0, &block(1 << 25, 9)).unwrap_err().kind(),
            ErrorKind::Limit
        );
    }
}
