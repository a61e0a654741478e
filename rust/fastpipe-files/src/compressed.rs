//! Compressed files that are read as the text in them.
//!
//! Positions are those of the text: [`CompressedText`] is a [`ReadAt`](fastpipe_batch::ReadAt) whose bytes are
//! decompressed, and [`TextFiles`] are the files of a source of which some are compressed. A running
//! [`Decoder`](decoder::Decoder) decompresses on from where it is, so what is read in sequence is decompressed once. To
//! go anywhere else, one starts at a *restart point* in front of it: where a member of gzip or a frame of zstandard
//! begins, nothing in front of it is needed.
//!
//! A file with few restart points, or only the one at its start, can be read in sequence alone: see
//! [`Layout::is_framed`].
//!
//! Memory never grows with what a file declares: there are a decoder's buffers, its window (32 KiB, or up to
//! 128 MiB with zstandard), and the points that were really found.

mod decoder;
mod gzip;
mod input;
mod layout;
#[cfg(test)]
mod tests;
mod text;
mod text_files;
mod zstandard;

pub use layout::{Layout, MOST_GAP, Point};
pub use text::CompressedText;
pub use text_files::{Packed, TextFiles};

/// Bytes of text that are passed over at once.
const SCRATCH: usize = 64 << 10;

/// How a file is compressed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Compression {
    /// RFC 1952: members, one behind the other.
    Gzip,
    /// RFC 8878: frames, one behind the other.
    Zstandard,
}

impl Compression {
    /// Bytes of a file that say whether it is compressed.
    pub const MAGIC_BYTES: usize = 4;

    /// What the first bytes of a file say.
    pub fn of(start: &[u8]) -> Option<Compression> {
        match start {
            [0x1f, 0x8b, ..] => Some(Compression::Gzip),
            // A frame, or one that is passed over, as pzstd begins with.
            &[0x28, 0xb5, 0x2f, 0xfd, ..] | &[0x50..=0x5f, 0x2a, 0x4d, 0x18, ..] => Some(Compression::Zstandard),
            _ => None,
        }
    }

    /// Its name.
    pub fn name(self) -> &'static str {
        match self {
            Compression::Gzip => "gzip",
            Compression::Zstandard => "zstandard",
        }
    }

    /// What a file consists of, each of which needs nothing of the others.
    pub fn parts(self) -> &'static str {
        match self {
            Compression::Gzip => "members",
            Compression::Zstandard => "frames",
        }
    }
}
