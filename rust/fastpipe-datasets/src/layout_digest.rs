//! A digest of where units are.

use std::hash::Hasher;

use siphasher::sip128::{Hasher128, SipHasher24};

/// A digest of what `write` writes, in 16 bytes. SipHash has a specification, so it stays the same over versions.
pub fn layout_digest(write: impl FnOnce(&mut dyn FnMut(&[u8]))) -> [u8; 16] {
    let mut hasher = SipHasher24::new();
    write(&mut |bytes| hasher.write(bytes));
    hasher.finish128().as_bytes()
}
