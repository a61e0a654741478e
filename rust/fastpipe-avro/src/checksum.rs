//! Checksums of blocks. A flipped bit in an uncompressed value may yield another valid value, which no decoder notices.

use std::fmt;
use std::hash::Hasher;
use std::num::NonZeroU64;

use twox_hash::XxHash3_64;

/// The XXH3 hash of a block's data as stored, that is, compressed. It never is 0, so an `Option` of it takes 8 bytes: 1
/// replaces 0.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Checksum(NonZeroU64);

impl Checksum {
    /// Bytes of a stored checksum.
    pub const BYTES: usize = 8;

    /// Returns the checksum of data.
    pub fn of(data: &[u8]) -> Checksum {
        Self::of_hash(XxHash3_64::oneshot(data))
    }

    fn of_hash(hash: u64) -> Checksum {
        Checksum(NonZeroU64::new(hash).unwrap_or(NonZeroU64::MIN))
    }

    /// Returns the bytes to store.
    pub fn to_bytes(self) -> [u8; Self::BYTES] {
        self.0.get().to_le_bytes()
    }

    /// Returns the checksum that was stored. Returns `None` if no checksum has these bytes.
    pub fn from_bytes(bytes: [u8; Self::BYTES]) -> Option<Checksum> {
        NonZeroU64::new(u64::from_le_bytes(bytes)).map(Checksum)
    }
}

impl fmt::Display for Checksum {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{:016x}", self.0)
    }
}

/// Computes the checksum of data that arrives in pieces.
#[derive(Default)]
pub(crate) struct Checksummer(XxHash3_64);

impl Checksummer {
    pub(crate) fn add(&mut self, piece: &[u8]) {
        self.0.write(piece);
    }

    pub(crate) fn finish(&self) -> Checksum {
        Checksum::of_hash(self.0.finish())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn checksums_never_change() {
        // The specification's test vector for no bytes.
        assert_eq!(Checksum::of(b"").to_string(), "2d06800538d394c2");
        assert_eq!(Checksum::of_hash(0).to_string(), "0000000000000001");
        assert_eq!(Checksum::from_bytes([0; 8]), None);
    }

    proptest! {
        #[test]
        fn pieces_have_the_checksum_of_the_whole(data: Vec<u8>, piece in 1usize..100) {
            let mut sum = Checksummer::default();
            data.chunks(piece).for_each(|piece| sum.add(piece));
            prop_assert_eq!(sum.finish(), Checksum::of(&data));
            prop_assert_eq!(Checksum::from_bytes(sum.finish().to_bytes()), Some(Checksum::of(&data)));
        }
    }
}
