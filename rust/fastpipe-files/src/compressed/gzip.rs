//! Members of gzip files (RFC 1952).

use crc32fast::Hasher;
use fastpipe_batch::{ReadAt, Result};
use flate2::{Decompress, FlushDecompress, Status};

use super::input::Input;
use super::step::{Step, cut_short, malformed};

/// Bytes of the fixed part of a member's header (RFC 1952, 2.3).
const FIXED_HEADER: usize = 10;

/// Flags of the optional header fields (2.3.1). The flag with value 1 only says that the data is probably text.
const HEADER_CHECKSUM: u8 = 1 << 1;
const EXTRA: u8 = 1 << 2;
const NAME: u8 = 1 << 3;
const COMMENT: u8 = 1 << 4;
const RESERVED: u8 = 0xe0;

/// Decompresses a sequence of members.
pub(super) struct Members {
    inflater: Decompress,
    checksum: Hasher,
    /// Size of the member's text, modulo 2^32.
    size: u32,
}

impl Members {
    pub(super) fn new() -> Members {
        Members {
            inflater: Decompress::new(false),
            checksum: Hasher::new(),
            size: 0,
        }
    }

    /// Moves to the data of the next member. Returns the start of the member, or `None` at the end of the file.
    pub(super) fn begin(&mut self, file: &dyn ReadAt, input: &mut Input) -> Result<Option<u64>> {
        // Zeros may pad the blocks of a tape. gzip and Python's module also skip them.
        if input.offset() > 0 {
            while input.fill(file, 1)? && input.bytes()[0] == 0 {
                let zeros = input.bytes().iter().take_while(|&&byte| byte == 0).count();
                input.used(zeros);
            }
        }
        let start = input.offset();
        if !input.fill(file, 1)? {
            return Ok(None);
        }
        let whole = input.fill(file, FIXED_HEADER)?;
        let found = &input.bytes()[..input.bytes().len().min(3)];
        if !found
            .iter()
            .zip([0x1f, 0x8b, 8])
            .all(|(&byte, expected)| byte == expected)
        {
            let reason = match found {
                [0x1f, 0x8b, method] => format!("expected a gzip member of method 8, found method {method}"),
                _ => "expected the end of the file or another gzip member, found something else".to_owned(),
            };
            return Err(malformed(reason).at_offset(start));
        }
        if !whole {
            return Err(cut_short("the header of a gzip member"));
        }
        let flags = input.bytes()[3];
        if flags & RESERVED != 0 {
            return Err(malformed("a gzip member has reserved flags set").at_offset(start));
        }
        input.used(FIXED_HEADER);
        self.skip_fields(file, input, flags)?;
        self.inflater.reset(false);
        self.checksum = Hasher::new();
        self.size = 0;
        Ok(Some(start))
    }

    /// Skips the optional fields of a header.
    fn skip_fields(&self, file: &dyn ReadAt, input: &mut Input, flags: u8) -> Result<()> {
        let mut there = true;
        if flags & EXTRA != 0 {
            there = input.fill(file, 2)?;
            let len = input.bytes().first_chunk().map_or(0, |&len| u16::from_le_bytes(len));
            there = there && input.skip(file, 2 + u64::from(len))?;
        }
        for flag in [NAME, COMMENT] {
            while there && flags & flag != 0 {
                there = input.fill(file, 1)?;
                let end = input.bytes().iter().position(|&byte| byte == 0);
                input.used(end.map_or(input.bytes().len(), |end| end + 1));
                if end.is_some() {
                    break;
                }
            }
        }
        if there && flags & HEADER_CHECKSUM != 0 {
            there = input.skip(file, 2)?;
        }
        match there {
            true => Ok(()),
            false => Err(cut_short("the header of a gzip member")),
        }
    }

    /// Continues to decompress a member.
    pub(super) fn step(&mut self, file: &dyn ReadAt, input: &mut Input, out: &mut [u8]) -> Result<Step> {
        loop {
            let more = input.fill(file, 1)?;
            let before = (self.inflater.total_in(), self.inflater.total_out());
            let status = self.inflater.decompress(input.bytes(), out, FlushDecompress::None);
            let took = (self.inflater.total_in() - before.0) as usize;
            let wrote = (self.inflater.total_out() - before.1) as usize;
            input.used(took);
            let Ok(status) = status else {
                return Err(malformed("the gzip data is damaged"));
            };
            self.checksum.update(&out[..wrote]);
            self.size = self.size.wrapping_add(wrote as u32);
            let ended = status == Status::StreamEnd;
            if ended {
                self.end(file, input)?;
            }
            if ended || wrote > 0 {
                return Ok(Step { wrote, ended });
            }
            if !more {
                return Err(cut_short("a gzip member"));
            }
            if took == 0 {
                return Err(malformed("the gzip data is damaged"));
            }
        }
    }

    /// Verifies the checksum and size of the member (2.3.1).
    fn end(&mut self, file: &dyn ReadAt, input: &mut Input) -> Result<()> {
        input.fill(file, 8)?;
        let Some(&[a, b, c, d, size @ ..]) = input.bytes().first_chunk::<8>() else {
            return Err(cut_short("the checksum of a gzip member"));
        };
        let (expected, found) = (u32::from_le_bytes([a, b, c, d]), self.checksum.clone().finalize());
        if expected != found {
            return Err(malformed(format!(
                "the gzip data is damaged: expected checksum {expected:08x}, found {found:08x}"
            )));
        }
        let expected = u32::from_le_bytes(size);
        if expected != self.size {
            let found = self.size;
            return Err(malformed(format!(
                "the gzip data is damaged: expected {expected} bytes in a member, found {found}"
            )));
        }
        input.used(8);
        Ok(())
    }
}
