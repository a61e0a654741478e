//! Reading the text inside compressed files.
//!
//! All positions are positions in the decompressed text. [`CompressedText`] is a [`ReadAt`](fastpipe_batch::ReadAt)
//! over it, and [`TextFiles`] are the files of a source, some of which are compressed. A running
//! [`Decoder`](decoder::Decoder) continues where it stopped, so a sequential read decompresses everything once. To read
//! elsewhere, a decoder starts at the last *restart point* before the position. Restart points are the starts of gzip
//! members and zstandard frames, which don't depend on earlier data.
//!
//! A file with few restart points, or only the one at its start, can only be read in sequence: see
//! [`Layout::is_framed`].
//!
//! Memory never grows with sizes declared in a file. It consists of a decoder's buffers, its window (32 KiB, or up to
//! 128 MiB with zstandard), and the restart points found so far.

mod compression;
mod decoder;
mod gzip;
mod input;
mod layout;
mod step;
#[cfg(test)]
mod tests;
mod text;
mod text_files;
mod zstandard;

pub use compression::Compression;
pub use layout::{Layout, MOST_GAP, Point};
pub use text::CompressedText;
pub use text_files::{Packed, TextFiles};
