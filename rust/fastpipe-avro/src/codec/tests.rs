use proptest::prelude::*;

use super::*;

fn compress(codec: Codec, data: &[u8]) -> Vec<u8> {
    match codec {
        Codec::Null => data.to_vec(),
        Codec::Deflate => {
            let mut c = libdeflater::Compressor::new(libdeflater::CompressionLvl::new(6).unwrap());
            let mut out = vec![0; c.deflate_compress_bound(data.len())];
            let n = c.deflate_compress(data, &mut out).unwrap();
            out.truncate(n);
            out
        }
        Codec::Snappy => {
            let mut out = snap::raw::Encoder::new().compress_vec(data).unwrap();
            out.extend(crc32fast::hash(data).to_be_bytes());
            out
        }
        Codec::Zstandard => zstd::bulk::compress(data, 3).unwrap(),
        Codec::Bzip2 => bzipped(data, 9),
        Codec::Xz => xzipped(data, 1),
    }
}

fn bzipped(data: &[u8], level: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = bzip2::read::BzEncoder::new(data, bzip2::Compression::new(level));
    std::io::Read::read_to_end(&mut encoder, &mut out).unwrap();
    out
}

fn xzipped(data: &[u8], preset: u32) -> Vec<u8> {
    let mut out = Vec::new();
    let mut encoder = liblzma::read::XzEncoder::new(data, preset);
    std::io::Read::read_to_end(&mut encoder, &mut out).unwrap();
    out
}

/// Codecs whose blocks may contain several members.
const CONCATENATED: [Codec; 3] = [Codec::Zstandard, Codec::Bzip2, Codec::Xz];

proptest! {
    #[test]
    fn every_codec_round_trips(
        seed in proptest::collection::vec(any::<u8>(), 0..200),
        repeat in 1..2000usize,
        guess in 0..10_000usize,
    ) {
        let pool = BufferPool::default();
        let data = seed.repeat(repeat);
        for codec in Codec::ALL {
            let packed = compress(codec, &data);
            prop_assert!(decompress(codec, &packed, guess, &pool).unwrap()[..] == data[..], "{}", codec);
        }
    }

    #[test]
    fn damage_never_panics(
        data in proptest::collection::vec(any::<u8>(), 0..300),
        at in any::<prop::sample::Index>(),
        byte: u8,
        cut in any::<prop::sample::Index>(),
    ) {
        let pool = BufferPool::default();
        for codec in Codec::ALL {
            let mut packed = compress(codec, &data.repeat(5));
            if packed.is_empty() {
                continue;
            }
            let i = at.index(packed.len());
            packed[i] = byte;
            let _ = decompress(codec, &packed, 0, &pool);
            packed.truncate(cut.index(packed.len()));
            let _ = decompress(codec, &packed, 0, &pool);
        }
    }
}

/// Returns data as blocks may store it, with the best compression and with other settings.
fn stored(codec: Codec, data: &[u8]) -> Vec<Vec<u8>> {
    let deflated = |level| {
        let mut c = libdeflater::Compressor::new(libdeflater::CompressionLvl::new(level).unwrap());
        let mut out = vec![0; c.deflate_compress_bound(data.len())];
        let n = c.deflate_compress(data, &mut out).unwrap();
        out.truncate(n);
        out
    };
    match codec {
        Codec::Null | Codec::Snappy => vec![compress(codec, data)],
        Codec::Deflate => [0, 1, 6, 9, 12].map(deflated).to_vec(),
        Codec::Zstandard => {
            let frame = |level| zstd::bulk::compress(data, level).unwrap();
            let mut all = [-5, 1, 3, 19].map(frame).to_vec();
            all.push([frame(1), frame(3)].concat());
            all
        }
        Codec::Bzip2 => vec![bzipped(data, 1), bzipped(data, 9), bzipped(data, 5).repeat(2)],
        Codec::Xz => vec![xzipped(data, 0), xzipped(data, 6), xzipped(data, 1).repeat(2)],
    }
}

/// A valid block must never be rejected for its declared size.
#[test]
fn decompressed_size_is_bounded() {
    let pool = BufferPool::default();
    for len in [0, 1, 2, 3, 100, 4096, 65_535, 131_072, 131_073, 1 << 20, (3 << 20) + 7] {
        let patterns = [vec![0; len], b"ab".iter().copied().cycle().take(len).collect(), {
            let mut varied: Vec<u8> = (0..len as u32)
                .map(|i| (i.wrapping_mul(0x9e37_79b9) >> 13) as u8)
                .collect();
            varied[..len / 2].fill(7);
            varied
        }];
        for data in patterns {
            for codec in Codec::ALL {
                for packed in stored(codec, &data) {
                    let found = decompress(codec, &packed, 0, &pool).unwrap().len() as u64;
                    let most = codec.most_decompressed(packed.len() as u64);
                    assert!(
                        found <= most,
                        "{codec}: {} bytes to {found}, {most} at most",
                        packed.len()
                    );
                }
            }
        }
    }
}

/// Checks that the bounds are tight, with hand-made data of the highest density that the formats allow.
#[test]
fn the_size_bound_is_tight() {
    let pool = BufferPool::default();
    let nearly = |codec: Codec, percent: u64, packed: &[u8]| {
        let found = decompress(codec, packed, 0, &pool).unwrap().len() as u64;
        let most = codec.most_decompressed(packed.len() as u64);
        assert!(
            found <= most && found * 100 >= most * percent,
            "{codec}: {found}, {most} at most"
        );
    };
    // A literal of one byte, and copies of 64 bytes from an offset of 1 (tag 0b111111_10).
    let copies = 20_000usize;
    let mut snappy = Vec::new();
    let mut n = 1 + 64 * copies;
    while n >= 0x80 {
        snappy.push(n as u8 | 0x80);
        n >>= 7;
    }
    snappy.extend([n as u8, 0, 7]);
    snappy.extend([0xfe, 1, 0].repeat(copies));
    snappy.extend(crc32fast::hash(&vec![7; 1 + 64 * copies]).to_be_bytes());
    nearly(Codec::Snappy, 99, &snappy);
    // A frame with a window of 128 KiB and no content size, made of RLE blocks of 128 KiB each.
    let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
    let blocks = 400;
    for i in 1..=blocks {
        let header = (128u32 << 10) << 3 | 1 << 1 | u32::from(i == blocks);
        frame.extend(&header.to_le_bytes()[..3]);
        frame.push(7);
    }
    nearly(Codec::Zstandard, 99, &frame);
    // The compressor regularly starts new blocks with new codes.
    nearly(Codec::Deflate, 80, &stored(Codec::Deflate, &vec![0; 8 << 20])[4]);
    // The compressor doesn't produce the longest runs, and adds larger tables than necessary, a header and a trailer.
    nearly(Codec::Bzip2, 40, &bzipped(&vec![255; 45_000_000], 9));
    // Matches of the maximum length. Headers and the first literal are negligible.
    nearly(Codec::Xz, 90, &xzipped(&vec![0; 64 << 20], 1));
}

proptest! {
    #[test]
    fn members_follow_one_another(
        members in proptest::collection::vec(proptest::collection::vec(any::<u8>(), 0..300), 1..6),
        repeat in 1..200usize,
        guess in 0..10_000usize,
        spare in prop_oneof![Just(0), 0..100_000usize],
    ) {
        let pool = BufferPool::default();
        let members: Vec<Vec<u8>> = members.iter().map(|m| m.repeat(repeat)).collect();
        let whole = members.concat();
        for codec in CONCATENATED {
            let packed: Vec<u8> = members.iter().flat_map(|m| compress(codec, m)).collect();
            prop_assert!(decompress(codec, &packed, guess, &pool).unwrap()[..] == whole[..], "{}", codec);
            // A limit of exactly the size, or more.
            let found = decompress_within(codec, &packed, guess, whole.len() + spare, &pool).unwrap();
            prop_assert!(found[..] == whole[..], "{}", codec);
            if !whole.is_empty() {
                let error = decompress_within(codec, &packed, guess, whole.len() - 1, &pool).unwrap_err();
                prop_assert!(error.is_over_memory_limit(), "{}: {}", codec, error);
            }
            // Wherever it is cut, the last member is incomplete.
            let last = compress(codec, members.last().unwrap()).len();
            for cut in [1, 2, last / 2, last - 1] {
                let error = decompress(codec, &packed[..packed.len() - cut], guess, &pool).unwrap_err();
                prop_assert_eq!(error.kind(), ErrorKind::Malformed, "{}", codec);
            }
            let behind = [&packed[..], b"!"].concat();
            let error = decompress(codec, &behind, guess, &pool).unwrap_err();
            prop_assert_eq!(error.kind(), ErrorKind::Malformed, "{}", codec);
        }
    }
}

#[test]
fn checksums_detect_changed_bits() {
    let pool = BufferPool::default();
    let data: Vec<u8> = (0..3000u32).flat_map(|i| (i * i).to_le_bytes()).collect();
    for codec in [Codec::Bzip2, Codec::Xz] {
        let packed = compress(codec, &data);
        for at in (0..packed.len()).step_by(7) {
            let mut damaged = packed.clone();
            damaged[at] ^= 4;
            // The level of bzip2 determines only the maximum memory of a block.
            if let Ok(found) = decompress(codec, &damaged, 0, &pool) {
                assert!(
                    codec == Codec::Bzip2 && at == 3 && found[..] == data[..],
                    "{codec} at {at}"
                );
            }
        }
    }
}

#[test]
fn errors_name_dictionaries_beyond_the_limit() {
    use liblzma::stream::{Check, Filters, LzmaOptions, Stream};
    let pool = BufferPool::default();
    let packed = |bytes: u32| {
        let mut options = LzmaOptions::new_preset(0).unwrap();
        options.dict_size(bytes);
        let stream = Stream::new_stream_encoder(Filters::new().lzma2(&options), Check::Crc32).unwrap();
        let mut out = Vec::new();
        let mut encoder = liblzma::read::XzEncoder::new_stream(&b"hello"[..], stream);
        std::io::Read::read_to_end(&mut encoder, &mut out).unwrap();
        out
    };
    let read = |bytes| decompress(Codec::Xz, &packed(bytes), 0, &pool);
    assert_eq!(&read(1 << 27).unwrap()[..], b"hello");
    let error = read((1 << 27) + (1 << 26)).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
    assert!(
        error.reason().contains("a dictionary of more than 134217728 bytes"),
        "{error}"
    );
}

#[test]
fn errors_name_frames_with_dictionaries() {
    let pool = BufferPool::default();
    // A frame with a single segment, one byte of content, a dictionary ID of one byte, and an empty last block.
    let frame = [0x28, 0xb5, 0x2f, 0xfd, 0x21, 77, 1, 1, 0, 0];
    for packed in [
        frame.to_vec(),
        [compress(Codec::Zstandard, b"hello"), frame.to_vec()].concat(),
    ] {
        let error = decompress(Codec::Zstandard, &packed, 0, &pool).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{error}");
        assert!(error.reason().contains("compressed with dictionary 77"), "{error}");
    }
}

#[test]
fn decompression_bombs_stop_at_the_available_memory() {
    let pool = BufferPool::default();
    let data = vec![0; 8 << 20];
    for codec in Codec::ALL.into_iter().filter(|&codec| codec != Codec::Null) {
        let packed = compress(codec, &data);
        for guess in [0, 1 << 20, 64 << 20] {
            let within = |most| decompress_within(codec, &packed, guess, most, &pool);
            assert_eq!(within(8 << 20).unwrap().len(), 8 << 20, "{codec}");
            let error = within((8 << 20) - 1).unwrap_err();
            assert!(
                error.is_over_memory_limit() && error.kind() == ErrorKind::Limit,
                "{error}"
            );
            assert!(
                error
                    .reason()
                    .contains("8388607 bytes, which memory_limit doesn't allow"),
                "{error}"
            );
        }
    }
    // Streams have no content size, so the output is produced again in a larger buffer.
    let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
    std::io::Write::write_all(&mut encoder, &data).unwrap();
    let streamed = encoder.finish().unwrap();
    let found = decompress_within(Codec::Zstandard, &streamed, 0, 8 << 20, &pool).unwrap();
    assert_eq!(&found[..], &data[..]);
    assert!(
        decompress_within(Codec::Zstandard, &streamed, 0, 5 << 20, &pool)
            .unwrap_err()
            .is_over_memory_limit()
    );
}

#[test]
fn snappy_checksums_are_checked() {
    let pool = BufferPool::default();
    let mut packed = compress(Codec::Snappy, b"hello hello hello");
    *packed.last_mut().unwrap() ^= 1;
    let error = decompress(Codec::Snappy, &packed, 0, &pool).unwrap_err();
    assert!(error.reason().contains("checksum"), "{error}");
}

#[test]
fn truncated_streams_are_errors() {
    let pool = BufferPool::default();
    let data: Vec<u8> = (0..50_000u32).flat_map(|i| (i * i).to_le_bytes()).collect();
    for codec in Codec::ALL.into_iter().filter(|&codec| codec != Codec::Null) {
        let packed = compress(codec, &data);
        let error = decompress(codec, &packed[..packed.len() / 2], 0, &pool).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Malformed, "{codec}");
    }
}

#[test]
fn decompression_bombs_stop_at_the_limit() {
    let pool = BufferPool::default();
    let bomb = {
        use std::io::Write;
        let mut encoder = zstd::stream::Encoder::new(Vec::new(), 1).unwrap();
        let zeros = vec![0; 1 << 20];
        for _ in 0..(MAX_BLOCK_BYTES >> 20) + 1 {
            encoder.write_all(&zeros).unwrap();
        }
        encoder.finish().unwrap()
    };
    assert_eq!(
        decompress(Codec::Zstandard, &bomb, 0, &pool).unwrap_err().kind(),
        ErrorKind::Limit
    );
    // Each member is below the limit.
    let member = vec![0; 64 << 20];
    for codec in [Codec::Bzip2, Codec::Xz] {
        let bomb = compress(codec, &member).repeat((MAX_BLOCK_BYTES >> 26) + 1);
        let error = decompress(codec, &bomb, 0, &pool).unwrap_err();
        assert_eq!(
            (error.kind(), error.is_over_memory_limit()),
            (ErrorKind::Limit, false),
            "{error}"
        );
    }
    // Snappy data declares its size. A false size must not cause an allocation.
    let lie = [0xff, 0xff, 0xff, 0xff, 0x03, 0, 0, 0, 0, 0, 0];
    assert_eq!(
        decompress(Codec::Snappy, &lie, 0, &pool).unwrap_err().kind(),
        ErrorKind::Malformed
    );
}

#[test]
fn errors_name_windows_beyond_the_limit() {
    let pool = BufferPool::default();
    let frame = |head: &[u8]| [&[0x28, 0xb5, 0x2f, 0xfd], head, &[0x01, 0, 0]].concat();
    let size = |n: u64| frame(&[&[0xe0], &n.to_le_bytes()[..]].concat());
    let largest = frame(&[0, (27 - 10) << 3]);
    assert!(decompress(Codec::Zstandard, &largest, 0, &pool).unwrap().is_empty());
    for (window, bad) in [
        ((1u64 << 27) + (1 << 24), frame(&[0, (27 - 10) << 3 | 1])),
        (1 << 28, frame(&[0, (28 - 10) << 3])),
        (15 << 38, frame(&[0, 0xff])),
        (1 << 40, size(1 << 40)),
    ] {
        // The frame by itself, and after another frame.
        for stored in [bad.clone(), [largest.clone(), bad.clone()].concat()] {
            let error = decompress(Codec::Zstandard, &stored, 0, &pool).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Limit, "{error}");
            assert!(
                error.reason().contains(&format!("found one of {window} bytes")),
                "{error}"
            );
            assert!(error.reason().contains("at most 134217728 bytes"), "{error}");
        }
    }
}

#[test]
fn errors_of_unknown_codecs_list_supported_ones() {
    let error = Codec::from_name("lzo").unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Unsupported);
    assert!(error.reason().contains("zstandard"));
}
