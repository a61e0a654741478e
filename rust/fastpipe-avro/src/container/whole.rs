//! Where the whole blocks of a file end, if a writer was killed within the last one.
//!
//! The bytes after that are the beginning of one block: its header is cut short, or says that the block is longer than
//! the file. A damaged header further up may say the same, so those bytes must not contain the file's sync marker: the
//! blocks that follow a damaged header, and the block itself, have it.

use fastpipe_batch::{Error, ErrorKind, ReadAt};

use super::{BLOCK_HEADER_BYTES, Block, SYNC_BYTES, Walk, read_exact};
use crate::file_info::FileInfo;

/// Bytes in which the marker is looked for at once.
const WINDOW: u64 = 1 << 20;

/// Returns the offset after the last whole block of `file`: its size, unless its last block is incomplete.
///
/// # Errors
/// Malformed, if anything but an incomplete last block is wrong with the headers and sync markers.
pub fn whole_blocks_end(file: &dyn ReadAt, info: &FileInfo) -> Result<u64, Error> {
    let mut walk = Walk::new(file, &info.header)?;
    for number in 0.. {
        match walk.next() {
            Some(Ok(block)) => info.check(number, &block)?,
            Some(Err(error)) if error.kind() == ErrorKind::Malformed && walk.is_cut() => {
                if contains(file, walk.offset, walk.size, &walk.sync)? {
                    let reason = "the block's header is damaged: it says that the block ends after the file, and a sync \
                                  marker follows before that";
                    let error = Error::new(ErrorKind::Malformed, reason);
                    return Err(error.at_block(number, walk.offset).at_path(&info.path));
                }
                break;
            }
            Some(Err(error)) => return Err(error),
            None => break,
        }
    }
    Ok(walk.offset)
}

impl Walk<'_> {
    /// Whether the file ends before the block does that the walk has come to.
    fn is_cut(&self) -> bool {
        match Block::parse(&self.ahead, self.offset) {
            Ok(block) => self.offset + block.len() > self.size,
            Err(_) if self.ahead.len() == BLOCK_HEADER_BYTES => false,
            // It is a header's beginning if the last bytes of two numbers make a header of it.
            Err(_) => Block::parse(&[&self.ahead[..], &[0, 0]].concat(), self.offset).is_ok(),
        }
    }
}

/// Whether the bytes from `start` to `end` contain the marker.
fn contains(file: &dyn ReadAt, start: u64, end: u64, marker: &[u8; SYNC_BYTES]) -> Result<bool, Error> {
    let mut at = start;
    while at + SYNC_BYTES as u64 <= end {
        let bytes = read_exact(file, at, WINDOW.min(end - at) as usize, false)?;
        if bytes.windows(SYNC_BYTES).any(|window| window == marker) {
            return Ok(true);
        }
        // A marker may begin in these bytes and end in the next.
        at += (bytes.len() - SYNC_BYTES + 1) as u64;
    }
    Ok(false)
}
