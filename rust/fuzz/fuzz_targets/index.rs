//! Any bytes as the index of a file that may have been kept. Errors are fine as long as none is internal; panics,
//! hangs, and memory for blocks that are only declared aren't.
#![no_main]

use std::sync::OnceLock;

use fastpipe_avro::{Block, FileInfo, Header, SYNC_BYTES, decode_index, encode_index};
use fastpipe_batch::ErrorKind;
use libfuzzer_sys::fuzz_target;

/// Bytes of the files' headers: the offset of their first block.
const HEADER: u64 = 60;

/// Files of one long a record, of no codec and of one that could explain any number of them.
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

/// Whether the blocks are what a walk over a file of this size could find.
fn check(blocks: &[Block], size: u64) {
    let mut offset = HEADER;
    for block in blocks {
        assert_eq!(block.offset, offset);
        offset += block.len();
    }
    assert_eq!(offset, size);
}

/// Where the last block would end if the bytes say how many there are, and of each its rows, its size and its header's.
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
    // Most bytes aren't even a version and the header's: those are put in front, in place of the number of blocks.
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
            Ok(None) => assert!(!framed, "another header"),
            Err(error) => assert_ne!(error.kind(), ErrorKind::Internal, "{error}"),
        }
    }
});
