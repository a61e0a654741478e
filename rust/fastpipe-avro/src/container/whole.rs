//! Finds the end of the complete blocks of a file whose writer was killed while it wrote the last block.
//!
//! The remaining bytes are the beginning of one block: its header is incomplete or declares a block that extends past
//! the end of the file. A damaged header in the middle of the file may look the same. So the remaining bytes must not
//! contain the file's sync marker. After a damaged header they would, because its block and the following blocks end
//! with the marker.

use fastpipe_batch::{Error, ErrorKind, ReadAt};

use super::{BLOCK_HEADER_BYTES, Block, SYNC_BYTES, Walk, read_exact};
use crate::file_info::FileInfo;

/// Number of bytes that are searched for the marker at once.
const WINDOW: u64 = 1 << 20;

/// Returns the offset after the last complete block of `file`. This is the file's size, unless the last block is
/// incomplete.
///
/// # Errors
/// Malformed, if headers or sync markers are damaged in any other way.
pub fn whole_blocks_end(file: &dyn ReadAt, info: &FileInfo) -> Result<u64, Error> {
    let mut walk = Walk::new(file, &info.header)?;
    for number in 0.. {
        match walk.next() {
            Some(Ok(block)) => info.check(number, &block)?,
            Some(Err(error)) if error.kind() == ErrorKind::Malformed && walk.is_cut() => {
                if contains(file, walk.offset, walk.size, &walk.sync)? {
                    let reason = "the block's header is damaged: it declares a block that extends past the end of the \
                                  file, but contains a sync marker";
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
    /// Whether the file ends before the current block does.
    fn is_cut(&self) -> bool {
        match Block::parse(&self.ahead, self.offset) {
            Ok(block) => self.offset + block.len() > self.size,
            Err(_) if self.ahead.len() == BLOCK_HEADER_BYTES => false,
            // The bytes are the beginning of a header if two final bytes complete them to one.
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
        // A marker may extend from these bytes into the next ones.
        at += (bytes.len() - SYNC_BYTES + 1) as u64;
    }
    Ok(false)
}
