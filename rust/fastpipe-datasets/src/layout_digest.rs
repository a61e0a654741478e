//! A digest of the positions of units.

use std::hash::Hasher;

use fastpipe_batch::Chunks;
use siphasher::sip128::{Hasher128, SipHasher24};

/// Returns a 16-byte digest of the layout of chunks. SipHash is specified, so the digest is the same in all versions.
pub fn layout_digest(chunks: &Chunks) -> [u8; 16] {
    let mut hasher = SipHasher24::new();
    chunks.write_layout(|bytes| hasher.write(bytes));
    hasher.finish128().as_bytes()
}
