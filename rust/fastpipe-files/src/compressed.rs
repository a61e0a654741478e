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
