//! Reads arbitrary bytes as the stored index of a file. Errors are allowed unless they are internal. Panics, hangs, and
//! memory for blocks that are merely declared are bugs.
#![no_main]

use std::sync::OnceLock;

use fastpipe_avro::{Block, FileInfo, Header, SYNC_BYTES, decode_index, encode_index};
use fastpipe_batch::ErrorKind;
use libfuzzer_sys::fuzz_target;

/// The size of the files' headers in bytes, which is the offset of the first block.
const HEADER: u64 = 60;

/// Returns two files with one long per record. One is uncompressed. The other has a codec with which a block of any
/// size can contain any number of records.
fn files() -> &'static [FileInfo] {
    static FILES: OnceLock<Vec<FileInfo>> = OnceLock::new();
    FILES.get_or_init(|| {
        let file = |codec: &str| {
            let metadata = [("avro.schema", "\"long\""), ("avro.codec", codec)];
            let header = Header {
                metadata: metadata.map(|(k, v)| (k.to_owned(), v.as_bytes().to_vec())).into(),
                sync: [0; SYNC_BYTES],
                size: HEADER,
            };
            FileInfo::new("memory".into(), header).unwrap()
        };
        ["null", "deflate"].map(file).into()
    })
}

/// Checks that a scan of a file of this size could have found these blocks.
fn check(blocks: &[Block], size: u64) {
    let mut offset = HEADER;
    for block in blocks {
        assert_eq!(block.offset, offset);
        offset += block.len();
    }
    assert_eq!(offset, size);
}

/// Returns the end of the last block, if the bytes declare a number of blocks, and for each block its rows, its size
/// and the size of its header.
fn laid_out(mut bytes: &[u8]) -> Option<u64> {
    let mut number = || {
        let mut value = 0u64;
        for shift in (0..64).step_by(7) {
            let (&byte, rest) = bytes.split_first()?;
            bytes = rest;
            value |= u64::from(byte & 0x7f) << shift;
            if byte < 0x80 {
                return Some(value);
            }
        }
        None
    };
    let mut end = HEADER;
    for _ in 0..number()? {
        let (_rows, size, header) = (number()?, number()?, number()?);
        end = end
            .checked_add(size)?
            .checked_add(header)?
            .checked_add(SYNC_BYTES as u64)?;
    }
    Some(end)
}

fuzz_target!(|input: (bool, bool, u64, &[u8])| {
    let (compressed, framed, size, bytes) = input;
    let file = &files()[usize::from(compressed)];
    // Most inputs don't start with a valid version and header. Therefore a valid start is prepended, without its number
    // of blocks.
    let mut index = if framed { encode_index(file, &[]) } else { Vec::new() };
    index.pop();
    index.extend(bytes);
    for size in laid_out(bytes).into_iter().chain([size, HEADER]) {
        match decode_index(&index, file, size) {
            Ok(Some(blocks)) => {
                check(&blocks, size);
                let again = decode_index(&encode_index(file, &blocks), file, size).unwrap();
                assert_eq!(again, Some(blocks));
            }
            Ok(None) => assert!(!framed, "the header must match"),
            Err(error) => assert_ne!(error.kind(), ErrorKind::Internal, "{error}"),
        }
    }
});
