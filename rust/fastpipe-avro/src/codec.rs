//! Compression codecs of container files (Avro 1.12 specification, "Required Codecs" and "Optional Codecs").
//!
//! No output is allocated because a header declares it: buffers start at what the codec could make of the bytes that are
//! really there, and grow as output is written, up to [`MAX_BLOCK_BYTES`] or what the caller allows.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::catch_unwind;

use fastpipe_batch::{Buffer, BufferPool, Error, ErrorKind, try_with_capacity};
use zstd::zstd_safe::{self, DCtx, InBuffer, OutBuffer, ResetDirective};

use crate::limits::{MAX_BLOCK_BYTES, MAX_WINDOW_BYTES};

/// A codec that is read.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// Stored as it is.
    Null,
    /// RFC 1951, without a header or checksum.
    Deflate,
    /// Snappy's raw format with a CRC-32 of the uncompressed bytes behind it.
    Snappy,
    /// Zstandard frames.
    Zstandard,
}

impl Codec {
    /// Every codec.
    pub const ALL: [Codec; 4] = [Codec::Null, Codec::Deflate, Codec::Snappy, Codec::Zstandard];

    /// Its name in the metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Null => "null",
            Codec::Deflate => "deflate",
            Codec::Snappy => "snappy",
            Codec::Zstandard => "zstandard",
        }
    }

    /// Bytes that `stored` bytes can decompress to at most. What formats allow bounds it, not what compressors do, so no sound
    /// block has more.
    ///
    /// - Deflate: a match yields up to 258 bytes and takes a bit for its length and one for its distance at least (RFC 1951,
    ///   3.2.5 and 3.2.7: codes are of one bit or more), so 1032 bytes for each: zlib's "maximum compression factor"
    ///   (<https://zlib.net/zlib_tech.html>).
    /// - Snappy: behind the four bytes of Avro's checksum, a copy of up to 64 bytes takes three (format_description.txt, 2.2:
    ///   a copy with a 1-byte offset takes two bytes for up to 11, a literal more bytes than it yields).
    /// - Zstandard: a frame's blocks yield up to 128 KiB (RFC 8878, 3.1.1.2.4: Block_Maximum_Size) and take four bytes at
    ///   least: a header of three, and the byte that an RLE_Block repeats. Headers and skippable frames yield nothing.
    pub const fn most_decompressed(self, stored: u64) -> u64 {
        match self {
            Codec::Null => stored,
            Codec::Deflate => stored.saturating_mul(DEFLATE_RATIO as u64),
            Codec::Snappy => stored.saturating_sub(4).saturating_mul(64) / 3,
            Codec::Zstandard => (stored / 4).saturating_mul(128 << 10),
        }
    }

    /// The codec of that name.
    pub fn from_name(name: &str) -> Result<Codec, Error> {
        Codec::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| {
            let reason = format!(
                "codec '{name}' is not read; null, deflate, snappy and zstandard are: write the file again with one of them"
            );
            Error::new(ErrorKind::Unsupported, reason)
        })
    }
}

/// Bytes that a byte of deflated data yields at most: see [`Codec::most_decompressed`].
const DEFLATE_RATIO: usize = 1032;

impl fmt::Display for Codec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

thread_local! {
    static INFLATER: RefCell<Option<libdeflater::Decompressor>> = const { RefCell::new(None) };
    static ZSTD: RefCell<Option<DCtx<'static>>> = const { RefCell::new(None) };
}

/// Uses what a thread keeps for a codec, which is made when it is first needed. `make` returns `None` without memory.
fn with_kept<K, T>(
    kept: &RefCell<Option<K>>,
    codec: Codec,
    make: impl FnOnce() -> Option<K>,
    apply: impl FnOnce(&mut K) -> T,
) -> Result<T, Error> {
    let mut kept = kept.borrow_mut();
    if kept.is_none() {
        *kept = make();
    }
    match &mut *kept {
        Some(kept) => Ok(apply(kept)),
        // How much it takes only the codec's library knows: some ten or hundred kilobytes.
        None => Err(no_memory(codec)),
    }
}

/// libdeflater has no other way to make one, and panics without memory. So it is looked for first.
fn new_inflater() -> Option<libdeflater::Decompressor> {
    /// More than one takes.
    const ENOUGH: usize = 64 << 10;
    drop(try_with_capacity::<u8>(ENOUGH, "a decompressor").ok()?);
    catch_unwind(libdeflater::Decompressor::new).ok()
}

#[cold]
fn no_memory(codec: Codec) -> Error {
    let reason = format!("out of memory: a decompressor for {codec} blocks could not be allocated");
    Error::new(ErrorKind::OutOfMemory, reason)
}

/// Decompresses a block. `guess` is how large the output is expected to be: only a hint. `Codec::Null` copies.
pub fn decompress(codec: Codec, input: &[u8], guess: usize, pool: &BufferPool) -> Result<Buffer, Error> {
    decompress_within(codec, input, guess, MAX_BLOCK_BYTES, pool)
}

/// The same, to at most so many bytes, and in no more memory than these, or than [`MAX_BLOCK_BYTES`].
pub(crate) fn decompress_within(
    codec: Codec,
    input: &[u8],
    guess: usize,
    most: usize,
    pool: &BufferPool,
) -> Result<Buffer, Error> {
    let most = most.min(MAX_BLOCK_BYTES);
    match codec {
        Codec::Null => pool.copy(input),
        Codec::Deflate => inflate(input, guess, most, pool),
        Codec::Snappy => unsnap(input, most, pool),
        Codec::Zstandard => unzstd(input, guess, most, pool),
    }
}

#[cold]
fn malformed(codec: Codec, what: impl fmt::Display) -> Error {
    Error::new(ErrorKind::Malformed, format!("expected {codec} data: {what}"))
}

#[cold]
fn too_large(codec: Codec, most: usize) -> Error {
    let what = format!("a {codec} block decompresses to more than {most} bytes");
    if most < MAX_BLOCK_BYTES {
        Error::over_memory_limit(format!("{what}, which memory_limit doesn't allow"))
    } else {
        Error::new(ErrorKind::Limit, format!("{what}, the most that is read"))
    }
}

/// Size of the first output buffer: the guess if there is one, but no more than `ratio` times the input.
fn first_size(input: usize, guess: usize, ratio: usize, most: usize) -> usize {
    let expected = if guess > 0 { guess } else { 4 * input };
    expected
        .max(4096)
        .min(input.saturating_mul(ratio).saturating_add(1024))
        .min(most)
}

fn inflate(input: &[u8], guess: usize, allowed: usize, pool: &BufferPool) -> Result<Buffer, Error> {
    use libdeflater::DecompressionError::{BadData, InsufficientSpace};
    let most = input
        .len()
        .saturating_mul(DEFLATE_RATIO)
        .saturating_add(1024)
        .min(allowed);
    let mut size = first_size(input.len(), guess, DEFLATE_RATIO, allowed);
    loop {
        let mut out = pool.take(size)?;
        let inflated = INFLATER.with(|kept| {
            with_kept(kept, Codec::Deflate, new_inflater, |inflater| {
                inflater.deflate_decompress(input, &mut out)
            })
        });
        match inflated.inspect_err(|_| pool.put(std::mem::take(&mut out)))? {
            Ok(n) => {
                out.truncate(n);
                return Ok(out);
            }
            Err(BadData) => {
                pool.put(out);
                return Err(malformed(Codec::Deflate, "the stream is damaged or cut short"));
            }
            Err(InsufficientSpace) => {
                pool.put(out);
                if size >= allowed {
                    return Err(too_large(Codec::Deflate, allowed));
                }
                if size >= most {
                    return Err(malformed(Codec::Deflate, "the stream is damaged"));
                }
                size = size.saturating_mul(4).min(most);
            }
        }
    }
}

fn unsnap(input: &[u8], most: usize, pool: &BufferPool) -> Result<Buffer, Error> {
    // A copy of 64 bytes takes three.
    const RATIO: usize = 22;
    let Some((body, crc)) = input.split_last_chunk::<4>() else {
        return Err(malformed(
            Codec::Snappy,
            format_args!("expected a checksum of 4 bytes, found {} bytes", input.len()),
        ));
    };
    let declared = snap::raw::decompress_len(body).map_err(|e| malformed(Codec::Snappy, e))?;
    if declared > body.len().saturating_mul(RATIO) {
        let what = format_args!("{} bytes can't decompress to the {declared} declared", body.len());
        return Err(malformed(Codec::Snappy, what));
    }
    if declared > most {
        return Err(too_large(Codec::Snappy, most));
    }
    let mut out = pool.take(declared)?;
    let n = snap::raw::Decoder::new()
        .decompress(body, &mut out)
        .map_err(|e| malformed(Codec::Snappy, e))?;
    out.truncate(n);
    let (found, expected) = (crc32fast::hash(&out), u32::from_be_bytes(*crc));
    if found != expected {
        let what = format_args!("expected checksum {expected:08x}, found {found:08x}");
        return Err(malformed(Codec::Snappy, what));
    }
    Ok(out)
}

fn unzstd(input: &[u8], guess: usize, most: usize, pool: &BufferPool) -> Result<Buffer, Error> {
    let frame = Cell::new(0);
    let failed = |code| zstd_failed(code, &input[frame.get()..]);
    let mut out = pool.take(first_size(input.len(), guess, 1 << 16, most))?;
    let mut source = InBuffer::around(input);
    let mut written = 0;
    let mut read_all = |context: &mut DCtx<'static>| {
        context.reset(ResetDirective::SessionOnly).map_err(failed)?;
        loop {
            let mut target = OutBuffer::around_pos(&mut out[..], written);
            // 0 at the end of a frame; further frames may follow.
            let hint = context.decompress_stream(&mut target, &mut source).map_err(failed)?;
            written = target.pos();
            let all_read = source.pos() == input.len();
            if hint == 0 {
                frame.set(source.pos());
            }
            if hint == 0 && all_read {
                break;
            }
            if written == out.len() {
                if out.len() >= most {
                    return Err(too_large(Codec::Zstandard, most));
                }
                let larger = out.len().saturating_mul(4).max(4096).min(most);
                if most < MAX_BLOCK_BYTES {
                    // Memory is limited: what is there isn't held beside what takes its place, but made again.
                    pool.put(std::mem::take(&mut out));
                    out = pool.take(larger)?;
                    (source, written) = (InBuffer::around(input), 0);
                    context.reset(ResetDirective::SessionOnly).map_err(failed)?;
                } else {
                    let mut more = pool.take(larger)?;
                    more[..written].copy_from_slice(&out);
                    pool.put(std::mem::replace(&mut out, more));
                }
            } else if all_read {
                return Err(malformed(Codec::Zstandard, "the frame is cut short"));
            }
        }
        Ok(())
    };
    ZSTD.with(|kept| with_kept(kept, Codec::Zstandard, DCtx::try_create, &mut read_all))??;
    out.truncate(written);
    Ok(out)
}

/// What zstd said of the frame that it stopped at.
#[cold]
fn zstd_failed(code: usize, frame: &[u8]) -> Error {
    // Stable numbers out of zstd_errors.h, negated.
    const WINDOW_TOO_LARGE: usize = 16;
    const NO_MEMORY: usize = 64;
    match 0usize.wrapping_sub(code) {
        WINDOW_TOO_LARGE => {
            let window = window(frame).map_or_else(|| "a larger one".into(), |n| format!("one of {n} bytes"));
            let reason = format!(
                "a zstandard block needs a window of at most {MAX_WINDOW_BYTES} bytes to be read, found {window}: compress it \
                 again without --long or --ultra"
            );
            Error::new(ErrorKind::Limit, reason)
        }
        NO_MEMORY => Error::out_of_memory(window(frame).unwrap_or(0) as usize, "the window of a zstandard block"),
        _ => malformed(Codec::Zstandard, zstd_safe::get_error_name(code)),
    }
}

/// The window that a frame declares: how far back it may refer (RFC 8878, 3.1.1.1). Of a frame of one segment, all of it.
fn window(frame: &[u8]) -> Option<u64> {
    let (&descriptor, rest) = frame.strip_prefix(&[0x28, 0xb5, 0x2f, 0xfd])?.split_first()?;
    if descriptor & 0x20 == 0 {
        let byte = *rest.first()?;
        let base = 1 << (10 + (byte >> 3));
        return Some(base + base / 8 * u64::from(byte & 7));
    }
    let dictionary = [0, 1, 2, 4][usize::from(descriptor & 3)];
    let size = rest.get(dictionary..)?;
    match descriptor >> 6 {
        0 => size.first().map(|&n| n.into()),
        1 => Some(u64::from(u16::from_le_bytes(*size.first_chunk()?)) + 256),
        2 => Some(u32::from_le_bytes(*size.first_chunk()?).into()),
        _ => Some(u64::from_le_bytes(*size.first_chunk()?)),
    }
}

#[cfg(test)]
mod tests {
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
        }
    }

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

    /// Data as blocks store it, compressed as well as can be and in other ways.
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
        }
    }

    /// No sound block may be refused for what it declares.
    #[test]
    fn nothing_decompresses_to_more_than_the_most() {
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

    /// The densest that formats allow, by hand: bounds are no larger than they must be.
    #[test]
    fn the_most_is_nearly_reached() {
        let pool = BufferPool::default();
        let nearly = |codec: Codec, percent: u64, packed: &[u8]| {
            let found = decompress(codec, packed, 0, &pool).unwrap().len() as u64;
            let most = codec.most_decompressed(packed.len() as u64);
            assert!(
                found <= most && found * 100 >= most * percent,
                "{codec}: {found}, {most} at most"
            );
        };
        // A literal of one byte, and copies of 64 bytes from one byte before (tag 0b111111_10).
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
        // A frame without a content size and with a window of 128 KiB, of RLE blocks of as many bytes.
        let mut frame = vec![0x28, 0xb5, 0x2f, 0xfd, 0x00, 0x38];
        let blocks = 400;
        for i in 1..=blocks {
            let header = (128u32 << 10) << 3 | 1 << 1 | u32::from(i == blocks);
            frame.extend(&header.to_le_bytes()[..3]);
            frame.push(7);
        }
        nearly(Codec::Zstandard, 99, &frame);
        // A compressor begins new blocks, with new codes, again and again.
        nearly(Codec::Deflate, 80, &stored(Codec::Deflate, &vec![0; 8 << 20])[4]);
    }

    #[test]
    fn bombs_stop_at_what_memory_allows() {
        let pool = BufferPool::default();
        let data = vec![0; 8 << 20];
        for codec in [Codec::Deflate, Codec::Snappy, Codec::Zstandard] {
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
        // Without a content size, as streams are written: what is there is made again in a larger buffer.
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
        for codec in [Codec::Deflate, Codec::Snappy, Codec::Zstandard] {
            let packed = compress(codec, &data);
            let error = decompress(codec, &packed[..packed.len() / 2], 0, &pool).unwrap_err();
            assert_eq!(error.kind(), ErrorKind::Malformed, "{codec}");
        }
    }

    #[test]
    fn bombs_stop_at_the_limit() {
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
        // Snappy declares its size: nothing is allocated for a lie.
        let lie = [0xff, 0xff, 0xff, 0xff, 0x03, 0, 0, 0, 0, 0, 0];
        assert_eq!(
            decompress(Codec::Snappy, &lie, 0, &pool).unwrap_err().kind(),
            ErrorKind::Malformed
        );
    }

    #[test]
    fn windows_beyond_the_limit_are_named() {
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
            // Behind another frame, too.
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
    fn unknown_codecs_say_what_is_read() {
        let error = Codec::from_name("xz").unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Unsupported);
        assert!(error.reason().contains("zstandard"));
    }
}
