use fastpipe_batch::MemoryFile;

use super::*;
use crate::file_info::FileInfo;

fn text(out: &mut Vec<u8>, s: &str) {
    assert!(s.len() < 64);
    out.push(2 * s.len() as u8);
    out.extend(s.as_bytes());
}

/// A file whose metadata is in two blocks, the second with a negative count, and with two data blocks of ints.
fn sample() -> Vec<u8> {
    let mut out = MAGIC.to_vec();
    out.push(2);
    text(&mut out, "avro.codec");
    text(&mut out, "null");
    let mut second = Vec::new();
    text(&mut second, "avro.schema");
    text(&mut second, "\"int\"");
    out.extend([1, 2 * second.len() as u8]);
    out.extend(second);
    out.push(0);
    out.extend([7; SYNC_BYTES]);
    for rows in [2u8, 0, 3] {
        out.extend([2 * rows, 2 * rows]);
        out.extend(vec![4; rows as usize]);
        out.extend([7; SYNC_BYTES]);
    }
    out
}

#[test]
fn headers_and_blocks_are_parsed() {
    let file = MemoryFile(sample());
    let header = Header::read(&file).unwrap();
    assert_eq!(
        (header.schema().unwrap(), header.codec().unwrap()),
        ("\"int\"", Codec::Null)
    );
    let blocks: Vec<_> = Walk::new(&file, &header).unwrap().map(Result::unwrap).collect();
    assert_eq!(blocks.iter().map(|b| b.rows).collect::<Vec<_>>(), [2, 0, 3]);
    assert_eq!(blocks[1].offset, header.size + 20);
}

#[test]
fn every_truncation_is_an_error_or_ends_between_blocks() {
    let whole = sample();
    let header = Header::read(&MemoryFile(&whole)).unwrap();
    let ends: Vec<usize> = [0, 20, 38, 59].map(|n| header.size as usize + n).to_vec();
    for n in 0..=whole.len() {
        let file = MemoryFile(&whole[..n]);
        let walked = Header::read(&file).and_then(|h| Walk::new(&file, &h)?.collect::<Result<Vec<_>, _>>());
        assert_eq!(walked.is_ok(), ends.contains(&n), "cut at {n}: {walked:?}");
        if let Err(e) = walked {
            assert_eq!(e.kind(), ErrorKind::Malformed);
            assert!(e.location().offset.is_some() && e.location().path.is_some());
        }
    }
}

#[test]
fn only_an_incomplete_last_block_is_reported_as_incomplete() {
    let mut whole = sample();
    // Another block, whose size takes two bytes.
    whole.extend([200, 1, 200, 1]);
    whole.extend([4; 100]);
    whole.extend([7; SYNC_BYTES]);
    let file = MemoryFile(&whole);
    let info = FileInfo::new("memory".into(), Header::read(&file).unwrap()).unwrap();
    let first = info.header.size;
    let ends: Vec<u64> = [0, 20, 38, 59, 179].map(|n| first + n).to_vec();
    assert_eq!(ends[4], whole.len() as u64);
    for n in first..=whole.len() as u64 {
        let file = MemoryFile(&whole[..n as usize]);
        let end = whole_blocks_end(&file, &info).unwrap();
        assert_eq!(Some(&end), ends.iter().rfind(|end| **end <= n), "cut at {n}");
    }
    // Damage must not be mistaken for the end of the file, wherever it is.
    for at in ends[..4].iter().flat_map(|end| [*end as usize, *end as usize + 1]) {
        for (byte, cut) in (0..=255).flat_map(|byte| [(byte, 0), (byte, 10)]) {
            let mut damaged = whole[..whole.len() - cut].to_vec();
            if std::mem::replace(&mut damaged[at], byte) == byte {
                continue;
            }
            // A changed record count may be valid. Only the last block may be reported as incomplete, and only if it
            // was cut.
            if let Ok(end) = whole_blocks_end(&MemoryFile(damaged), &info) {
                assert!(end >= ends[3] && (cut > 0 || end == ends[4]), "{at} {byte} {cut} {end}");
            }
        }
    }
}

#[test]
fn number_of_metadata_entries_is_bounded() {
    let with = |entries: usize, blocks: usize| {
        let mut out = MAGIC.to_vec();
        for _ in 0..blocks {
            let mut count = 2 * entries as u64;
            while count >= 0x80 {
                out.push(count as u8 | 0x80);
                count >>= 7;
            }
            out.push(count as u8);
            out.extend([2, b'k', 0].repeat(entries));
        }
        out.push(0);
        out.extend([7; SYNC_BYTES]);
        Header::read(&MemoryFile(out)).map(|header| header.metadata.len())
    };
    for blocks in [1, 2, MAX_METADATA_ENTRIES] {
        assert_eq!(with(MAX_METADATA_ENTRIES / blocks, blocks).unwrap(), 1);
        let error = with(MAX_METADATA_ENTRIES / blocks + 1, blocks).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
        assert!(error.location().offset.is_some(), "{error}");
    }
}

/// Without the limit, the index of a sparse file could exhaust the memory.
#[test]
fn number_of_blocks_without_records_is_bounded() {
    let block = |rows| Block {
        offset: 0,
        header: 2,
        size: 0,
        rows,
        checksum: None,
    };
    let mut counted = Counted::default();
    (0..MAX_EMPTY_BLOCKS).for_each(|_| counted.add(&block(0)).unwrap());
    counted.add(&block(1)).unwrap();
    assert_eq!(counted.add(&block(0)).unwrap_err().kind(), ErrorKind::Limit);
    let mut counted = Counted {
        blocks: MAX_BLOCKS - 1,
        empty: 0,
    };
    counted.add(&block(1)).unwrap();
    assert_eq!(counted.add(&block(1)).unwrap_err().kind(), ErrorKind::Limit);
    // The walk over a hole counts the blocks and reports where it stopped.
    let mut file = MAGIC.to_vec();
    file.push(0);
    file.extend(vec![0; SYNC_BYTES + 18 * (MAX_EMPTY_BLOCKS as usize + 1)]);
    let file = MemoryFile(file);
    let header = Header::read(&file).unwrap();
    let error = Walk::new(&file, &header).unwrap().find_map(Result::err).unwrap();
    assert_eq!(
        (error.kind(), error.location().block),
        (ErrorKind::Limit, Some(MAX_EMPTY_BLOCKS))
    );
}

#[test]
fn errors_of_wrong_markers_name_the_block() {
    let mut bytes = sample();
    let n = bytes.len();
    bytes[n - 1] ^= 1;
    let file = MemoryFile(bytes);
    let header = Header::read(&file).unwrap();
    let error = Walk::new(&file, &header).unwrap().find_map(Result::err).unwrap();
    assert_eq!(
        (error.location().block, error.location().offset),
        (Some(2), Some(header.size + 38))
    );
}

#[test]
fn impossible_block_headers_are_refused() {
    for (rows, expected) in [(i64::MAX, ErrorKind::Limit), (-1, ErrorKind::Malformed)] {
        let mut bytes = Vec::new();
        let mut n = ((rows << 1) ^ (rows >> 63)) as u64;
        while n >= 0x80 {
            bytes.push(n as u8 | 0x80);
            n >>= 7;
        }
        bytes.extend([n as u8, 0]);
        assert_eq!(Block::parse(&bytes, 0).unwrap_err().kind(), expected);
    }
}
