//! Keys of lookups, and their hash.

use twox_hash::XxHash3_64;

/// Maximum number of keys per lookup call.
pub const MOST_KEYS: usize = 32;

/// The result of [`Lookup::find`](crate::Lookup::find) for a key that has no index.
pub const UNKNOWN: i64 = -1;

/// A key as it is stored in a record.
#[derive(Clone, Copy, Debug, Default)]
pub struct Key<'a> {
    /// The text of the key, or its name if the key also has a term.
    pub text: &'a [u8],
    /// The term: the part of the key after the name and the separator.
    pub term: Option<&'a [u8]>,
}

/// Returns the 64-bit XXH3 hash of the bytes.
pub(crate) fn hash_of(bytes: &[u8], seed: u64) -> u64 {
    XxHash3_64::oneshot_with_seed(seed, bytes)
}
