//! A compact encoding of the blocks of a file, so that they can be cached.
//!
//! Blocks are adjacent, so offsets follow from sizes. Each block is stored as three small numbers: rows, bytes of data
//! as stored, and bytes of the header. The numbers are varints in [postcard's wire
//! format](https://postcard.jamesmunns.com/wire-format). The version, the file's sync marker and the size of its header
//! precede them. In version 2, a [`Checksum`] of each block follows them.
//!
//! The decoder doesn't trust the bytes. It returns only blocks that a walk over a file of this size could have found,
//! or an error.

use fastpipe_batch::{Error, ErrorKind, Result};
use serde::{Deserialize, Serialize};

use crate::checksum::Checksum;
use crate::container::{Block, Counted, SYNC_BYTES};
use crate::file_info::FileInfo;
use crate::limits::{MAX_BLOCK_RECORDS, MAX_STORED_BLOCK_BYTES};

/// Version of this format without checksums, and with them.
const PLAIN: u8 = 1;
const CHECKSUMMED: u8 = 2;

#[derive(Serialize, Deserialize)]
struct Index {
    version: u8,
    sync: [u8; SYNC_BYTES],
    /// Offset of the first block.
    first: u64,
    blocks: Vec<Entry>,
}

#[derive(Serialize, Deserialize)]
struct Entry {
    rows: u32,
    size: u32,
    header: u8,
}

/// Encodes the blocks that were found in a file, with their checksums if all of them have one.
pub fn encode_index(info: &FileInfo, blocks: &[Block]) -> Vec<u8> {
    let entry = |block: &Block| Entry {
        rows: block.rows,
        size: block.size,
        // Two varints, which take at most 20 bytes.
        header: block.header as u8,
    };
    let checksums: Option<Vec<_>> = blocks.iter().map(|block| block.checksum).collect();
    let checksums = checksums.filter(|checksums| !checksums.is_empty());
    let index = Index {
        version: if checksums.is_some() { CHECKSUMMED } else { PLAIN },
        sync: info.header.sync,
        first: info.header.size,
        blocks: blocks.iter().map(entry).collect(),
    };
    let mut bytes = postcard::to_allocvec(&index).expect("writing to memory can't fail");
    bytes.extend(checksums.into_iter().flatten().flat_map(Checksum::to_bytes));
    bytes
}

/// Decodes the blocks of a file of `size` bytes. Returns `None` if the index belongs to a file with another header.
///
/// # Errors
/// Malformed, if the bytes are not an index, or if such a file can't contain the blocks.
pub fn decode_index(bytes: &[u8], info: &FileInfo, size: u64) -> Result<Option<Vec<Block>>> {
    let malformed = |reason: &str| Error::new(ErrorKind::Malformed, reason);
    // No memory is reserved for the declared number of blocks: each takes at least three bytes, and postcard's initial
    // allocation is small.
    let (index, rest) = postcard::take_from_bytes::<Index>(bytes).map_err(|e| malformed(&e.to_string()))?;
    let (checksums, odd) = rest.as_chunks::<{ Checksum::BYTES }>();
    let expected = match index.version {
        PLAIN => 0,
        CHECKSUMMED => index.blocks.len(),
        _ => return Err(malformed("it has another version")),
    };
    if checksums.len() != expected || !odd.is_empty() {
        return Err(malformed("it has extra bytes at its end, or lacks checksums"));
    }
    if (index.sync, index.first) != (info.header.sync, info.header.size) {
        return Ok(None);
    }
    let (mut offset, mut counted) = (index.first, Counted::default());
    let mut blocks = Vec::new();
    let bytes = index.blocks.len().saturating_mul(size_of::<Block>());
    let reserved = blocks.try_reserve_exact(index.blocks.len());
    reserved.map_err(|_| Error::out_of_memory(bytes, "the index of a file's blocks"))?;
    for (number, entry) in (0..).zip(index.blocks) {
        let block = Block {
            offset,
            header: u32::from(entry.header),
            size: entry.size,
            rows: entry.rows,
            checksum: checksums.get(blocks.len()).copied().and_then(Checksum::from_bytes),
        };
        if !block.is_possible() || block.checksum.is_some() != (index.version == CHECKSUMMED) {
            return Err(malformed("it contains an impossible block"));
        }
        counted.add(&block)?;
        info.check(number, &block)?;
        // This can't overflow: a block has less than 2^32 bytes, and the sum so far is at most the size of the file.
        offset += block.len();
        if offset > size {
            return Err(malformed("its blocks extend past the end of the file"));
        }
        blocks.push(block);
    }
    if offset != size {
        return Err(malformed("its blocks don't cover the file"));
    }
    Ok(Some(blocks))
}

impl Block {
    /// Whether a parsed header can have these values.
    fn is_possible(&self) -> bool {
        let bytes = |n: u32| (64 - (u64::from(n) << 1 | 1).leading_zeros()).div_ceil(7);
        u64::from(self.rows) <= MAX_BLOCK_RECORDS
            && u64::from(self.size) <= MAX_STORED_BLOCK_BYTES
            && (bytes(self.rows) + bytes(self.size)..=20).contains(&self.header)
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use proptest::prelude::*;

    use super::*;
    use crate::container::Header;

    fn info(codec: &str) -> FileInfo {
        let metadata = [("avro.schema", "\"int\""), ("avro.codec", codec)];
        let header = Header {
            metadata: metadata.map(|(k, v)| (k.to_owned(), v.as_bytes().to_vec())).into(),
            sync: [7; SYNC_BYTES],
            size: 60,
        };
        FileInfo::new(Arc::from("x.avro"), header).unwrap()
    }

    /// Returns adjacent blocks, and the end of the last one.
    fn laid_out(blocks: &[(u32, u32)]) -> (Vec<Block>, u64) {
        let mut offset = 60;
        let lay = |&(rows, size): &(u32, u32)| {
            let mut long = Vec::new();
            for n in [rows, size] {
                let mut n = u64::from(n) << 1;
                while n >= 0x80 {
                    long.push(n as u8 | 0x80);
                    n >>= 7;
                }
                long.push(n as u8);
            }
            let block = Block::parse(&long, offset).unwrap();
            offset += block.len();
            block
        };
        let blocks = blocks.iter().map(lay).collect();
        (blocks, offset)
    }

    /// Returns the blocks with some checksums.
    fn checksummed(mut blocks: Vec<Block>) -> Vec<Block> {
        for (i, block) in (0u32..).zip(&mut blocks) {
            block.checksum = Some(Checksum::of(&i.to_le_bytes()));
        }
        blocks
    }

    fn sample() -> (FileInfo, Vec<Block>, u64) {
        let (blocks, size) = laid_out(&[(3, 3), (0, 0), (100, 64), (1, 100), (1 << 30, 1 << 30)]);
        (info("deflate"), blocks, size)
    }

    #[test]
    fn a_small_block_takes_three_bytes() {
        let (blocks, _) = laid_out(&[(3, 3); 100]);
        let empty = encode_index(&info("null"), &[]).len();
        assert_eq!(encode_index(&info("null"), &blocks).len(), empty + 300);
        assert_eq!(encode_index(&info("null"), &checksummed(blocks)).len(), empty + 1100);
    }

    #[test]
    fn an_index_does_not_match_another_header() {
        let (mut file, blocks, size) = sample();
        let bytes = encode_index(&file, &blocks);
        assert_eq!(decode_index(&bytes, &file, size).unwrap(), Some(blocks));
        file.header.sync[3] ^= 1;
        assert_eq!(decode_index(&bytes, &file, size).unwrap(), None);
        file.header.sync[3] ^= 1;
        file.header.size += 1;
        assert_eq!(decode_index(&bytes, &file, size).unwrap(), None);
    }

    #[test]
    fn impossible_indexes_are_refused() {
        let (file, blocks, size) = sample();
        let encoded = |change: &dyn Fn(&mut Vec<Block>)| {
            let mut changed = blocks.clone();
            change(&mut changed);
            encode_index(&file, &changed)
        };
        let refused = |bytes: &[u8], size| decode_index(bytes, &file, size).is_err();
        assert!(!refused(&encoded(&|_| ()), size));
        for size in [0, 60, size - 1, size + 1, u64::MAX] {
            assert!(refused(&encoded(&|_| ()), size));
        }
        assert!(refused(&encoded(&|b| b.truncate(4)), size));
        assert!(refused(&encoded(&|b| b.push(b[0])), size));
        assert!(refused(&encoded(&|b| b[0].header = 1), size - 1));
        assert!(refused(&encoded(&|b| b[0].header = 21), size + 19));
        assert!(refused(&encoded(&|b| b[0].rows = u32::MAX), size));
        assert!(refused(
            &encoded(&|b| b[0].size = u32::MAX),
            size + u64::from(u32::MAX) - 3
        ));
        // No block has the checksum zero.
        let mut zero = encode_index(&file, &checksummed(blocks.clone()));
        assert!(!refused(&zero, size));
        let end = zero.len();
        zero[end - Checksum::BYTES..].fill(0);
        assert!(refused(&zero, size));
        // More records than bytes, although the file isn't compressed.
        let (blocks, size) = laid_out(&[(3, 2)]);
        let error = decode_index(&encode_index(&file, &blocks), &info("null"), size).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed);
    }

    #[test]
    fn every_truncation_is_detected() {
        let (file, blocks, size) = sample();
        for blocks in [blocks.clone(), checksummed(blocks)] {
            let mut bytes = encode_index(&file, &blocks);
            for n in 0..bytes.len() {
                assert!(decode_index(&bytes[..n], &file, size).is_err());
            }
            for _ in 0..2 * Checksum::BYTES {
                bytes.push(1);
                assert!(decode_index(&bytes, &file, size).is_err());
            }
        }
    }

    proptest! {
        #[test]
        fn blocks_round_trip(wanted in prop::collection::vec((0..=i32::MAX as u32, 0..=i32::MAX as u32), 0..50)) {
            let file = info("deflate");
            // At most one row per byte, which every block can hold.
            let possible = |(rows, size): (u32, u32)| (rows.min(size).min(1 << 30), size);
            let (blocks, size) = laid_out(&wanted.into_iter().map(possible).collect::<Vec<_>>());
            for blocks in [blocks.clone(), checksummed(blocks)] {
                prop_assert_eq!(decode_index(&encode_index(&file, &blocks), &file, size).unwrap(), Some(blocks));
            }
        }

        /// For any changes to the bytes, decoding returns blocks that the file could contain, or none.
        #[test]
        fn any_bytes_are_taken(any: Vec<u8>, at in 0usize..120, keep: bool, sums: bool, declared: u64) {
            let (file, blocks, size) = sample();
            let blocks = if sums { checksummed(blocks) } else { blocks };
            let mut bytes = encode_index(&file, &blocks);
            // After the marker, because changes to the marker are always detected.
            let at = at.min(bytes.len());
            bytes.splice(at..if keep { bytes.len().min(at + any.len()) } else { at }, any);
            if let Ok(Some(found)) = decode_index(&bytes, &file, size) {
                prop_assert_eq!(found.last().map_or(60, |b| b.offset + b.len()), size);
                prop_assert!(found.windows(2).all(|w| w[0].offset + w[0].len() == w[1].offset));
            }
            // The index declares blocks that it doesn't contain.
            let mut bytes = encode_index(&file, &[]);
            bytes.pop();
            bytes.extend(postcard::to_allocvec(&declared).unwrap());
            prop_assert!(declared == 0 || decode_index(&bytes, &file, size).is_err());
        }
    }
}
