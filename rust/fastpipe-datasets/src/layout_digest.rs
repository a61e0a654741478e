//! A digest of the positions of units.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

/// Returns a 16-byte digest of the bytes that `write` writes. SipHash is specified, so the digest is the same in all
/// versions.
pub fn layout_digest(write: impl FnOnce(&mut dyn FnMut(&[u8]))) -> [u8; 16] {
    let mut hasher = SipHasher24::new();
    write(&mut |bytes| hasher.write(bytes));
    hasher.finish128().as_bytes()
}
