//! Keys of lookups, and their hash.

use twox_hash::XxHash3_64;

/// Keys that are looked up at once at most.
pub const MOST_KEYS: usize = 32;

/// What [`Lookup::find`](crate::Lookup::find) says of a key that has no index.
pub const UNKNOWN: i64 = -1;

/// A key as a record has it.
#[derive(Clone, Copy, Debug, Default)]
pub struct Key<'a> {
    /// The text, or the name.
    pub text: &'a [u8],
    /// What follows the name and the separator.
    pub term: Option<&'a [u8]>,
}

/// XXH3 (64 bits) of bytes.
pub(crate) fn hash_of(bytes: &[u8], seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, bytes)
}
