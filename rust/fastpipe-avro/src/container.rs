//! Object container files (Avro 1.12 specification, "Object Container Files"): parses the file header, and walks over
//! the block headers to locate all blocks without reading their data.

mod whole;

use std::collections::BTreeMap;

use fastpipe_batch::{Error, ErrorKind, ReadAt};

pub use self::whole::whole_blocks_end;

use crate::checksum::{Checksum, Checksummer};
use crate::codec::Codec;
use crate::cursor::Cursor;
use crate::decode_error::DecodeError;
use crate::limits::{
    MAX_BLOCK_RECORDS, MAX_BLOCKS, MAX_EMPTY_BLOCKS, MAX_HEADER_BYTES, MAX_METADATA_ENTRIES, MAX_STORED_BLOCK_BYTES,
};

const MAGIC: [u8; 4] = *b"Obj\x01";

/// Bytes of a sync marker.
pub const SYNC_BYTES: usize = 16;

/// Maximum bytes of a block's header: two varints.
const BLOCK_HEADER_BYTES: usize = 20;

/// Bytes of a block's data that are read at once to compute its checksum.
const CHECKSUM_BYTES: u64 = 1 << 20;

/// Minimum size of blocks whose headers are read without caching. The walk reads one page of memory per block. If
/// blocks are smaller, these pages are a large part of the file and should stay cached.
const PASSED_OVER: u64 = 128 << 10;

/// The header of a file.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Header {
    /// The metadata map.
    pub metadata: BTreeMap<String, Vec<u8>>,
    /// The sync marker after every block.
    pub sync: [u8; SYNC_BYTES],
    /// Size of the header in bytes, which is the offset of the first block.
    pub size: u64,
}

/// A file header that borrows from the bytes of the file.
struct Parsed<'a> {
    metadata: BTreeMap<&'a str, &'a [u8]>,
    sync: [u8; SYNC_BYTES],
    size: u64,
}

impl Parsed<'_> {
    fn kept(self) -> Result<Header, Error> {
        let mut metadata = BTreeMap::new();
        for (key, value) in self.metadata {
            let mut bytes = zeroed(value.len(), "a file's metadata")?;
            bytes.copy_from_slice(value);
            metadata.insert(key.to_owned(), bytes);
        }
        Ok(Header {
            metadata,
            sync: self.sync,
            size: self.size,
        })
    }
}

impl Header {
    /// Reads the header of a file.
    pub fn read(file: &dyn ReadAt) -> Result<Header, Error> {
        let size = file.size()?;
        let mut wanted = (64 << 10).min(size);
        loop {
            let bytes = read_exact(file, 0, wanted as usize, false)?;
            if !bytes.starts_with(&MAGIC) {
                let reason = "not an Avro container file: expected it to begin with the magic bytes b\"Obj\\x01\"";
                return Err(Error::new(ErrorKind::Malformed, reason)
                    .at_offset(0)
                    .at_path(file.location()));
            }
            match Self::parse(&bytes) {
                Ok(parsed) => return parsed.kept().map_err(|e| e.at_path(file.location())),
                Err((DecodeError::End { .. } | DecodeError::ItemCount { .. }, _))
                    if wanted < size && wanted < MAX_HEADER_BYTES =>
                {
                    wanted = (wanted * 8).min(size).min(MAX_HEADER_BYTES);
                }
                Err((DecodeError::End { .. } | DecodeError::ItemCount { .. }, _)) if wanted < size => {
                    let reason = format!("the file's header is larger than {MAX_HEADER_BYTES} bytes, the limit");
                    return Err(Error::new(ErrorKind::Limit, reason)
                        .at_offset(0)
                        .at_path(file.location()));
                }
                Err((fault, offset)) => {
                    let inner = fault.into_error();
                    let what = match inner.kind() {
                        ErrorKind::Limit => "is too large",
                        _ => "is damaged or cut short",
                    };
                    let reason = format!("the file's header {what}: {}", inner.reason());
                    return Err(Error::new(inner.kind(), reason)
                        .at_offset(offset)
                        .at_path(file.location()));
                }
            }
        }
    }

    /// Parses a header from the first bytes of a file. The error includes the offset of the failure.
    fn parse(bytes: &[u8]) -> Result<Parsed<'_>, (DecodeError, u64)> {
        let mut cursor = Cursor::new(bytes, MAGIC.len());
        Self::parse_behind_magic(&mut cursor).map_err(|fault| (fault, cursor.position() as u64))
    }

    fn parse_behind_magic<'a>(cursor: &mut Cursor<'a>) -> Result<Parsed<'a>, DecodeError> {
        let (mut metadata, mut entries) = (BTreeMap::new(), 0);
        while let Some(items) = cursor.items(2)? {
            // The count is bounded by the bytes of the header, so the sum can't overflow.
            entries += items.count;
            if entries > MAX_METADATA_ENTRIES {
                return Err(DecodeError::MetadataEntries);
            }
            for _ in 0..items.count {
                let key = simdutf8::basic::from_utf8(cursor.text()?).map_err(|_| DecodeError::Utf8)?;
                metadata.insert(key, cursor.text()?);
            }
            cursor.check_end(items)?;
        }
        let sync = cursor.array()?;
        Ok(Parsed {
            metadata,
            sync,
            size: cursor.position() as u64,
        })
    }

    /// Returns the JSON text of the schema.
    pub fn schema(&self) -> Result<&str, Error> {
        let bytes = self.metadata.get("avro.schema").ok_or_else(|| {
            Error::new(
                ErrorKind::Malformed,
                "expected the metadata 'avro.schema', which is missing",
            )
            .at_offset(4)
        })?;
        simdutf8::basic::from_utf8(bytes)
            .map_err(|_| Error::new(ErrorKind::Malformed, "expected 'avro.schema' to be UTF-8 text").at_offset(4))
    }

    /// Returns the codec, or the null codec if the metadata doesn't name one.
    pub fn codec(&self) -> Result<Codec, Error> {
        match self.metadata.get("avro.codec") {
            None => Ok(Codec::Null),
            Some(name) => Codec::from_name(&String::from_utf8_lossy(name)).map_err(|e| e.at_offset(4)),
        }
    }
}

/// The location of a block in its file.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Block {
    /// Offset of the block's header.
    pub offset: u64,
    /// Bytes of the header.
    pub header: u32,
    /// Bytes of the data as stored.
    pub size: u32,
    /// Number of records.
    pub rows: u32,
    /// Checksum of the data as stored, if it was computed.
    pub checksum: Option<Checksum>,
}

impl Block {
    /// Returns the total bytes of header, data and sync marker.
    pub fn len(&self) -> u64 {
        u64::from(self.header) + u64::from(self.size) + SYNC_BYTES as u64
    }

    /// Returns false: a block always has a header and a sync marker.
    pub fn is_empty(&self) -> bool {
        false
    }

    /// Parses the header of the block at `offset`. `bytes` must begin there.
    pub fn parse(bytes: &[u8], offset: u64) -> Result<Block, Error> {
        let at = |e: Error| e.at_offset(offset);
        let mut cursor = Cursor::new(bytes, 0);
        let mut number = |what: &str, most: u64| {
            let value = cursor.long().map_err(|f| at(f.into_error()))?;
            if value < 0 {
                let reason = format!("expected a block's {what}, found {value}");
                return Err(at(Error::new(ErrorKind::Malformed, reason)));
            }
            if value as u64 > most {
                let reason = format!("a block declares {value} as its {what}; the limit is {most}");
                return Err(at(Error::new(ErrorKind::Limit, reason)));
            }
            Ok(value as u64)
        };
        let rows = number("number of records", MAX_BLOCK_RECORDS)?;
        let size = number("size in bytes", MAX_STORED_BLOCK_BYTES)?;
        // The limits checked above are less than 2^32.
        Ok(Block {
            offset,
            header: cursor.position() as u32,
            size: size as u32,
            rows: rows as u32,
            checksum: None,
        })
    }

    /// Computes the checksum. Reads the block's data, in small pieces.
    ///
    /// # Errors
    /// Errors of reading the file, or of memory.
    pub fn add_checksum(&mut self, file: &dyn ReadAt) -> Result<(), Error> {
        let mut at = self.offset + u64::from(self.header);
        let end = at + u64::from(self.size);
        let mut sum = Checksummer::default();
        while at < end {
            let piece = read_exact(file, at, (end - at).min(CHECKSUM_BYTES) as usize, false)?;
            sum.add(&piece);
            at += piece.len() as u64;
        }
        self.checksum = Some(sum.finish());
        Ok(())
    }
}

/// Numbers of blocks found in a file so far.
#[derive(Default)]
pub(crate) struct Counted {
    blocks: u64,
    empty: u64,
}

impl Counted {
    /// Counts a block and checks the limits. An index takes memory for each block.
    pub(crate) fn add(&mut self, block: &Block) -> Result<(), Error> {
        self.blocks += 1;
        self.empty += u64::from(block.rows == 0);
        let (what, most) = if self.empty > MAX_EMPTY_BLOCKS {
            ("blocks without records", MAX_EMPTY_BLOCKS)
        } else if self.blocks > MAX_BLOCKS {
            ("blocks", MAX_BLOCKS)
        } else {
            return Ok(());
        };
        let reason = format!("the file has more than {most} {what}, the limit; it may be sparse or filled with zeros");
        Err(Error::new(ErrorKind::Limit, reason))
    }
}

/// An iterator over the blocks of a file. It jumps from block header to block header and checks each sync marker.
pub struct Walk<'a> {
    file: &'a dyn ReadAt,
    sync: [u8; SYNC_BYTES],
    size: u64,
    /// Offset and index of the next block.
    offset: u64,
    number: u64,
    counted: Counted,
    /// Bytes at `offset` that have already been read.
    ahead: Vec<u8>,
    failed: bool,
}

impl<'a> Walk<'a> {
    /// Creates a walk over the blocks of `file`.
    pub fn new(file: &'a dyn ReadAt, header: &Header) -> Result<Self, Error> {
        let size = file.size()?;
        let mut walk = Walk {
            file,
            sync: header.sync,
            size,
            offset: header.size,
            number: 0,
            counted: Counted::default(),
            ahead: Vec::new(),
            failed: false,
        };
        let n = walk.header_bytes(header.size);
        walk.ahead = read_exact(file, header.size, n, false)?;
        Ok(walk)
    }

    fn header_bytes(&self, offset: u64) -> usize {
        (self.size - offset.min(self.size)).min(BLOCK_HEADER_BYTES as u64) as usize
    }

    fn step(&mut self) -> Result<Block, Error> {
        let block = Block::parse(&self.ahead, self.offset).map_err(|e| match e.kind() {
            ErrorKind::Malformed => {
                let reason = format!("expected a block's header: {}", e.reason());
                Error::new(ErrorKind::Malformed, reason)
            }
            _ => e,
        })?;
        self.counted.add(&block)?;
        let end = self.offset + block.len();
        if end > self.size {
            let reason = format!(
                "the file is cut short: this block takes {} bytes with its sync marker, {} are left",
                block.len(),
                self.size - self.offset
            );
            return Err(Error::new(ErrorKind::Malformed, reason));
        }
        // The marker and the next header are adjacent, so one read returns both.
        let (from, n) = (end - SYNC_BYTES as u64, SYNC_BYTES + self.header_bytes(end));
        let mut bytes = read_exact(self.file, from, n, block.len() >= PASSED_OVER)?;
        if bytes[..SYNC_BYTES] != self.sync {
            return Err(wrong_marker());
        }
        self.ahead = bytes.split_off(SYNC_BYTES);
        self.offset = end;
        self.number += 1;
        Ok(block)
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<Block, Error>;

    fn next(&mut self) -> Option<Self::Item> {
        if self.failed || self.offset >= self.size {
            return None;
        }
        let (number, offset) = (self.number, self.offset);
        let step = self.step();
        self.failed = step.is_err();
        Some(step.map_err(|e| e.at_block(number, offset).at_path(self.file.location())))
    }
}

/// Returns the error for a block that isn't followed by its file's sync marker.
#[cold]
pub(crate) fn wrong_marker() -> Error {
    Error::new(
        ErrorKind::Malformed,
        "expected the file's sync marker after the block, found other bytes",
    )
}

fn zeroed(n: usize, what: &str) -> Result<Vec<u8>, Error> {
    let mut bytes = Vec::new();
    bytes.try_reserve_exact(n).map_err(|_| Error::out_of_memory(n, what))?;
    bytes.resize(n, 0);
    Ok(bytes)
}

/// Reads exactly `n` bytes at `offset`. For `glance`, see [`ReadAt::glance_at`].
fn read_exact(file: &dyn ReadAt, offset: u64, n: usize, glance: bool) -> Result<Vec<u8>, Error> {
    let mut bytes = zeroed(n, "a range of a file").map_err(|e| e.at_path(file.location()))?;
    let found = if glance {
        file.glance_at(offset, &mut bytes)?
    } else {
        file.read_at(offset, &mut bytes)?
    };
    if found < n {
        let reason = format!("expected {n} bytes, found {found}: the file became shorter while it was read");
        return Err(Error::new(ErrorKind::Storage, reason)
            .at_offset(offset)
            .at_path(file.location()));
    }
    Ok(bytes)
}

#[cfg(test)]
mod tests;
