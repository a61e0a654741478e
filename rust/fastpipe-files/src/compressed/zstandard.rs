//! Frames of zstandard files (RFC 8878).

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result};
use zstd::zstd_safe::{DCtx, DParameter, InBuffer, OutBuffer, ResetDirective, get_dict_id_from_frame, get_error_name};

use super::input::Input;
use super::step::{Step, cut_short, malformed};

/// Maximum window size as an exponent of 2: the limit of `zstd -d` without `--long`.
const MOST_WINDOW_LOG: u32 = 27;

/// Maximum window size of a frame in bytes.
const MOST_WINDOW_BYTES: u64 = 1 << MOST_WINDOW_LOG;

/// Maximum size of a frame header in bytes (3.1.1.1).
const MOST_HEADER: usize = 18;

const MAGIC: [u8; 4] = [0x28, 0xb5, 0x2f, 0xfd];

/// Error codes of zstd_errors.h, which are stable.
const WINDOW_TOO_LARGE: usize = 16;
const NO_MEMORY: usize = 64;

/// Decompresses a sequence of frames.
pub(super) struct Frames {
    context: DCtx<'static>,
}

impl Frames {
    pub(super) fn new() -> Result<Frames> {
        let mut context = DCtx::try_create().ok_or_else(no_memory)?;
        context
            .set_parameter(DParameter::WindowLogMax(MOST_WINDOW_LOG))
            .map_err(failed)?;
        Ok(Frames { context })
    }

    /// Moves to the next frame. Returns the start of the frame, or `None` at the end of the file.
    pub(super) fn begin(&mut self, file: &dyn ReadAt, input: &mut Input) -> Result<Option<u64>> {
        loop {
            let start = input.offset();
            if !input.fill(file, 1)? {
                return Ok(None);
            }
            input.fill(file, MOST_HEADER)?;
            let found = input.bytes();
            match *found {
                [0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => {
                    // A skippable frame (3.1.2). Its header contains its length.
                    let size = found.get(4..).and_then(|rest| rest.first_chunk());
                    let len = size.map(|&size| 8 + u64::from(u32::from_le_bytes(size)));
                    if !len.map_or(Ok(false), |len| input.skip(file, len))? {
                        return Err(cut_short("a zstandard frame"));
                    }
                }
                _ if found.starts_with(&MAGIC) => {
                    if let Some(dictionary) = get_dict_id_from_frame(found) {
                        let reason = format!(
                            "the file was compressed with the zstandard dictionary {dictionary}, which is not \
                             supported: compress it again without -D"
                        );
                        return Err(Error::new(ErrorKind::Unsupported, reason));
                    }
                    self.context.reset(ResetDirective::SessionOnly).map_err(failed)?;
                    return Ok(Some(start));
                }
                _ => {
                    let reason = "expected the end of the file or another zstandard frame, found something else";
                    return Err(malformed(reason));
                }
            }
        }
    }

    /// Continues to decompress a frame.
    pub(super) fn step(&mut self, file: &dyn ReadAt, input: &mut Input, out: &mut [u8]) -> Result<Step> {
        loop {
            let more = input.fill(file, 1)?;
            let mut source = InBuffer::around(input.bytes());
            let mut target = OutBuffer::around(&mut *out);
            // The result is 0 at the end of a frame.
            let left = self.context.decompress_stream(&mut target, &mut source);
            let (took, wrote) = (source.pos(), target.pos());
            input.used(took);
            let ended = left.map_err(failed)? == 0;
            if ended || wrote > 0 {
                return Ok(Step { wrote, ended });
            }
            if !more {
                return Err(cut_short("a zstandard frame"));
            }
            if took == 0 {
                return Err(malformed("the zstandard data is damaged"));
            }
        }
    }
}

#[cold]
fn failed(code: usize) -> Error {
    match 0usize.wrapping_sub(code) {
        WINDOW_TOO_LARGE => {
            let reason = format!(
                "a zstandard frame needs a window of more than {MOST_WINDOW_BYTES} bytes, the limit: compress it again \
                 without --long, or with at most --long={MOST_WINDOW_LOG}"
            );
            Error::new(ErrorKind::Limit, reason)
        }
        NO_MEMORY => no_memory(),
        _ => malformed(format!("the zstandard data is damaged: {}", get_error_name(code))),
    }
}

#[cold]
fn no_memory() -> Error {
    let reason = "out of memory: a decompressor for zstandard could not be allocated";
    Error::new(ErrorKind::OutOfMemory, reason)
}
