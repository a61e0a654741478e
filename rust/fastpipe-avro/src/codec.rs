//! Compression codecs of container files (Avro 1.12 specification, "Required Codecs" and "Optional Codecs").
//!
//! The size that a header declares never decides how much memory is allocated. An output buffer starts with a size that
//! the codec could produce from the input at hand. It grows as output is written, up to [`MAX_BLOCK_BYTES`] or the
//! caller's limit.

use std::cell::{Cell, RefCell};
use std::fmt;
use std::panic::catch_unwind;

use fastpipe_batch::{Buffer, BufferPool, Error, ErrorKind, try_with_capacity};
use zstd::zstd_safe::{self, DCtx, InBuffer, OutBuffer, ResetDirective};

use crate::limits::{MAX_BLOCK_BYTES, MAX_WINDOW_BYTES};

mod members;
mod output;

use output::Output;

/// A codec of container files.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Codec {
    /// No compression.
    Null,
    /// RFC 1951, without a header or checksum.
    Deflate,
    /// Snappy's raw format, followed by a CRC-32 of the uncompressed bytes.
    Snappy,
    /// Zstandard frames.
    Zstandard,
    /// Concatenated bzip2 files.
    Bzip2,
    /// Concatenated streams of the .xz file format.
    Xz,
}

impl Codec {
    /// All codecs.
    pub const ALL: [Codec; 6] = [
        Codec::Null,
        Codec::Deflate,
        Codec::Snappy,
        Codec::Zstandard,
        Codec::Bzip2,
        Codec::Xz,
    ];

    /// Returns the codec's name in the file's metadata.
    pub const fn name(self) -> &'static str {
        match self {
            Codec::Null => "null",
            Codec::Deflate => "deflate",
            Codec::Snappy => "snappy",
            Codec::Zstandard => "zstandard",
            Codec::Bzip2 => "bzip2",
            Codec::Xz => "xz",
        }
    }

    /// Returns the maximum number of bytes that `stored` bytes can decompress to. The bound follows from the formats,
    /// not from what compressors do, so no valid block exceeds it.
    ///
    /// - Deflate: a match yields up to 258 bytes. It takes at least one bit for its length and one for its distance
    ///   (RFC 1951, 3.2.5 and 3.2.7: codes have at least one bit). So a byte yields up to 1032 bytes, which is zlib's
    ///   "maximum compression factor" (<https://zlib.net/zlib_tech.html>).
    /// - Snappy: Avro's checksum takes four bytes. A copy of up to 64 bytes takes three (format_description.txt, 2.2).
    ///   A copy with a 1-byte offset takes two bytes for up to 11, and a literal takes more bytes than it yields.
    /// - Zstandard: a block of a frame yields up to 128 KiB (RFC 8878, 3.1.1.2.4: Block_Maximum_Size). It takes at
    ///   least four bytes: a header of three, and the byte that an RLE_Block repeats. Headers and skippable frames
    ///   yield nothing.
    /// - Bzip2: a block contains up to 900,000 bytes, five of which (four equal bytes and a count up to 255) yield 259.
    ///   Its magic, CRC, origin, used bytes, two tables of three codes and a selector take 173 bits, which is at least
    ///   21 bytes.
    /// - Xz: a match yields up to 273 bytes. It takes 14 bits of the range coder (LZMA specification: `IsMatch`,
    ///   `IsRep` and two more, then two and eight bits of its length). Each of these takes at least log2(2048 / 2017)
    ///   bits of data, so a byte of data yields up to 7094 bytes.
    pub const fn most_decompressed(self, stored: u64) -> u64 {
        match self {
            Codec::Null => stored,
            Codec::Deflate => stored.saturating_mul(DEFLATE_RATIO as u64),
            Codec::Snappy => stored.saturating_sub(4).saturating_mul(64) / 3,
            Codec::Zstandard => (stored / 4).saturating_mul(128 << 10),
            Codec::Bzip2 => (stored / 21).saturating_mul(900_000 / 5 * 259),
            Codec::Xz => stored.saturating_mul(7094),
        }
    }

    /// Returns the codec with this name.
    pub fn from_name(name: &str) -> Result<Codec, Error> {
        Codec::ALL.into_iter().find(|c| c.name() == name).ok_or_else(|| {
            let reason = format!(
                "codec '{name}' is not supported: write the file again with null, deflate, snappy, zstandard, bzip2 or \
                 xz"
            );
            Error::new(ErrorKind::Unsupported, reason)
        })
    }
}

/// Maximum number of bytes that one byte of deflated data yields: see [`Codec::most_decompressed`].
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

/// Calls `apply` with the decompressor that this thread caches for a codec. `make` creates it on first use and returns
/// `None` if there is not enough memory.
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
        // Only the codec's library knows how much memory it needs: tens to hundreds of kilobytes.
        None => Err(no_memory(codec)),
    }
}

/// Creates a decompressor. libdeflater has no fallible constructor and panics if memory runs out, so an allocation of
/// sufficient size is tried first.
fn new_inflater() -> Option<libdeflater::Decompressor> {
    /// Upper bound of the bytes that a decompressor allocates.
    const ENOUGH: usize = 64 << 10;
    drop(try_with_capacity::<u8>(ENOUGH, "a decompressor").ok()?);
    catch_unwind(libdeflater::Decompressor::new).ok()
}

#[cold]
fn no_memory(codec: Codec) -> Error {
    let reason = format!("out of memory: a decompressor for {codec} blocks could not be allocated");
    Error::new(ErrorKind::OutOfMemory, reason)
}

/// Decompresses a block. `guess` is the expected size of the output, which is only a hint. `Codec::Null` copies the
/// input.
pub fn decompress(codec: Codec, input: &[u8], guess: usize, pool: &BufferPool) -> Result<Buffer, Error> {
    decompress_within(codec, input, guess, MAX_BLOCK_BYTES, pool)
}

/// Decompresses a block of at most `most` bytes, as [`decompress`] does. The output takes no more memory than the
/// smaller of `most` and [`MAX_BLOCK_BYTES`].
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
        Codec::Zstandard => unzstd(input, Output::new(Codec::Zstandard, input, guess, most, pool)?),
        Codec::Bzip2 => members::unbzip2(input, Output::new(Codec::Bzip2, input, guess, most, pool)?),
        Codec::Xz => members::unxz(input, Output::new(Codec::Xz, input, guess, most, pool)?),
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
        Error::new(ErrorKind::Limit, format!("{what}, the limit"))
    }
}

/// Returns the size of the first output buffer: the guess if there is one, but at most about `ratio` times the input.
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
    // A copy of three bytes yields up to 64 bytes.
    const RATIO: usize = 22;
    let Some((body, crc)) = input.split_last_chunk::<4>() else {
        return Err(malformed(
            Codec::Snappy,
            format_args!("expected a checksum of 4 bytes, found {} bytes", input.len()),
        ));
    };
    let declared = snap::raw::decompress_len(body).map_err(|e| malformed(Codec::Snappy, e))?;
    if declared > body.len().saturating_mul(RATIO) {
        let what = format_args!("{} bytes can't decompress to the declared {declared} bytes", body.len());
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

fn unzstd(input: &[u8], mut out: Output<'_>) -> Result<Buffer, Error> {
    let frame = Cell::new(0);
    let failed = |code| zstd_failed(code, &input[frame.get()..]);
    let mut source = InBuffer::around(input);
    let mut read_all = |context: &mut DCtx<'static>| {
        context.reset(ResetDirective::SessionOnly).map_err(failed)?;
        loop {
            let mut target = OutBuffer::around(out.room());
            // The hint is 0 at the end of a frame. More frames may follow.
            let hint = context.decompress_stream(&mut target, &mut source).map_err(failed)?;
            let written = target.pos();
            out.wrote(written)?;
            let all_read = source.pos() == input.len();
            if hint == 0 {
                frame.set(source.pos());
            }
            if hint == 0 && all_read {
                return Ok(());
            }
            if out.is_full() {
                if out.grow()? {
                    source = InBuffer::around(input);
                    context.reset(ResetDirective::SessionOnly).map_err(failed)?;
                }
            } else if all_read {
                return Err(malformed(Codec::Zstandard, "the frame is cut short"));
            }
        }
    };
    ZSTD.with(|kept| with_kept(kept, Codec::Zstandard, DCtx::try_create, &mut read_all))??;
    Ok(out.finish())
}

/// Returns the error for an error code of zstd. `frame` is the frame at which decompression stopped.
#[cold]
fn zstd_failed(code: usize, frame: &[u8]) -> Error {
    // Stable error codes of zstd_errors.h. zstd returns them negated.
    const WINDOW_TOO_LARGE: usize = 16;
    const WRONG_DICTIONARY: usize = 32;
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
        WRONG_DICTIONARY => {
            let which = zstd_safe::get_dict_id_from_frame(frame).map_or(0, |id| id.get());
            let what = format_args!(
                "the frame was compressed with dictionary {which}, and container files have no dictionaries: write the file \
                 again without one"
            );
            malformed(Codec::Zstandard, what)
        }
        _ => malformed(Codec::Zstandard, zstd_safe::get_error_name(code)),
    }
}

/// Returns the size of the window that a frame declares: how far back it may refer (RFC 8878, 3.1.1.1). The window of a
/// frame with a single segment is the whole content.
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
mod tests;
