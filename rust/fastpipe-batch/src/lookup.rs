//! Converts text to indices without creating strings, by a vocabulary or by a hash.
//!
//! A key is either a text or a name and a term. The latter is equivalent to the text of both with a separator between
//! them, but only short keys are joined in memory. Keys are looked up in groups: first all keys are hashed, then the
//! possible cache lines of the table are prefetched, then the stored keys are compared. So the processor waits for
//! memory once per group, not twice per key.

use std::hash::Hasher;
use std::sync::Arc;

use twox_hash::XxHash3_64;
use twox_hash::xxhash3_64::{RawHasher, SecretBuffer};

use crate::buckets::Buckets;
use crate::dtype::DType;
use crate::key::{Key, MOST_KEYS, UNKNOWN};
use crate::sparse::SparseLayout;
use crate::vocabulary::Vocabulary;

/// Names, separators and terms up to this many bytes in total are joined on the stack for hashing.
const JOINED: usize = 128;

/// How to handle keys that are not in the vocabulary.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unknown {
    /// Leave them out.
    Drop,
    /// Return an error.
    Error,
    /// Distribute them by hash over this many additional indices after the vocabulary's own indices.
    Buckets(u64),
}

/// The source of the indices.
#[derive(Clone, Debug, PartialEq)]
pub enum Indices {
    /// A vocabulary, and how to handle keys that it doesn't contain.
    Vocabulary(Arc<Vocabulary>, Unknown),
    /// The XXH3 hash of the key with this seed, modulo the number of buckets.
    Hash {
        /// The number of buckets, at least 1.
        buckets: u64,
        /// The seed of the hash.
        seed: u64,
    },
    /// The bucket of a number. The field has numbers instead of text.
    Buckets(Arc<Buckets>),
}

/// How text is converted to indices.
#[derive(Clone, Debug, PartialEq)]
pub struct Lookup {
    /// The source of the indices.
    pub indices: Indices,
    /// The separator between a name and a term.
    pub separator: Box<[u8]>,
    /// The type of indices that are values. The coordinates of bags are always `int64`.
    pub dtype: DType,
    /// The type of a bag's values. `None` means the type in the file.
    pub values: Option<DType>,
    /// The layout of a bag.
    pub layout: SparseLayout,
}

impl Lookup {
    /// Returns the upper bound of the indices: the largest possible index plus one. Indices are below 2^63.
    pub fn size(&self) -> u64 {
        match &self.indices {
            Indices::Vocabulary(vocabulary, Unknown::Buckets(buckets)) => vocabulary.size().saturating_add(*buckets),
            Indices::Vocabulary(vocabulary, _) => vocabulary.size(),
            Indices::Hash { buckets, .. } => *buckets,
            Indices::Buckets(buckets) => buckets.size(),
        }
    }

    /// Returns the buckets, if the field has numbers instead of text.
    pub fn buckets(&self) -> Option<&Arc<Buckets>> {
        match &self.indices {
            Indices::Buckets(buckets) => Some(buckets),
            Indices::Vocabulary(..) | Indices::Hash { .. } => None,
        }
    }

    /// Whether keys without an index are left out.
    pub fn drops(&self) -> bool {
        matches!(self.indices, Indices::Vocabulary(_, Unknown::Drop))
    }

    /// Returns the index of a key, or [`UNKNOWN`].
    pub fn find_one(&self, key: Key<'_>) -> i64 {
        let mut found = [UNKNOWN];
        self.find(&[key], &mut found);
        found[0]
    }

    /// Finds the indices of up to [`MOST_KEYS`] keys. Further keys are ignored.
    #[inline]
    pub fn find(&self, keys: &[Key<'_>], found: &mut [i64]) {
        let keys = &keys[..keys.len().min(MOST_KEYS)];
        let mut joined = [0; JOINED];
        match &self.indices {
            // Text has no bucket.
            Indices::Buckets(_) => found.iter_mut().for_each(|found| *found = UNKNOWN),
            Indices::Hash { buckets, seed } => {
                for (key, found) in keys.iter().zip(found) {
                    *found = bucket(hash(*key, &self.separator, *seed, &mut joined), *buckets);
                }
            }
            Indices::Vocabulary(vocabulary, unknown) => {
                let mut hashes = [0; MOST_KEYS];
                for (key, to) in keys.iter().zip(&mut hashes) {
                    *to = hash(*key, &self.separator, 0, &mut joined);
                    vocabulary.ask_for(*to);
                }
                vocabulary.find(&hashes[..keys.len()], keys, &self.separator, found);
                if let Unknown::Buckets(buckets) = unknown {
                    for (found, hash) in found.iter_mut().zip(&hashes[..keys.len()]) {
                        if *found == UNKNOWN {
                            *found = vocabulary.size() as i64 + bucket(*hash, *buckets);
                        }
                    }
                }
            }
        }
    }
}

fn bucket(hash: u64, buckets: u64) -> i64 {
    (hash % buckets.max(1)) as i64
}

/// Returns the 64-bit XXH3 hash of a key. A name with a term is hashed as if name, separator and term were one string.
/// XXH3 has a specification, so hashes are the same on all versions and machines.
#[inline]
fn hash(key: Key<'_>, separator: &[u8], seed: u64, joined: &mut [u8; JOINED]) -> u64 {
    let Some(term) = key.term else {
        return XxHash3_64::oneshot_with_seed(seed, key.text);
    };
    let (name, at) = (key.text.len(), key.text.len() + separator.len());
    let Some(all) = joined.get_mut(..at.saturating_add(term.len())) else {
        return hash_of_pieces([key.text, separator, term], seed);
    };
    all[..name].copy_from_slice(key.text);
    match *separator {
        // Most separators are one byte, which needs no call.
        [byte] => all[name] = byte,
        _ => all[name..at].copy_from_slice(separator),
    }
    all[at..].copy_from_slice(term);
    XxHash3_64::oneshot_with_seed(seed, all)
}

/// Returns the same hash for long keys without joining their pieces.
#[cold]
#[inline(never)]
fn hash_of_pieces(pieces: [&[u8]; 3], seed: u64) -> u64 {
    const SECRET: usize = 192;
    match SecretBuffer::with_seed(seed, [0; SECRET]) {
        Ok(secret) => {
            let mut hasher = RawHasher::new(secret);
            pieces.iter().for_each(|piece| hasher.write(piece));
            hasher.finish()
        }
        // The secret has the length that the specification of the hash requires, so this error never occurs.
        Err(_) => XxHash3_64::oneshot_with_seed(seed, &pieces.concat()),
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;
    use crate::key::hash_of;

    fn lookup(indices: Indices, separator: &[u8]) -> Lookup {
        Lookup {
            indices,
            separator: separator.into(),
            dtype: DType::I64,
            values: None,
            layout: SparseLayout::Coo,
        }
    }

    fn hashed(buckets: u64, seed: u64) -> Lookup {
        lookup(Indices::Hash { buckets, seed }, b"\x01")
    }

    fn text(text: &[u8]) -> Key<'_> {
        Key { text, term: None }
    }

    /// Users may have stored indices that depend on these hashes. The first two are from the specification of XXH3.
    #[test]
    fn hashes_never_change() {
        assert_eq!(hash_of(b"", 0), 0x2d06_8005_38d3_94c2);
        assert_eq!(hash_of(b"", 0x9e37_79b1_85eb_ca8d), 0xa8a6_b918_b2f0_364a);
        let known = |buckets, seed, key: Key<'_>| hashed(buckets, seed).find_one(key);
        assert_eq!(
            known(1000, 0, text(b"fastpipe")),
            (hash_of(b"fastpipe", 0) % 1000) as i64
        );
        let pair = Key {
            text: b"country",
            term: Some(b"AT"),
        };
        assert_eq!(
            known(1 << 20, 7, pair),
            (hash_of(b"country\x01AT", 7) % (1 << 20)) as i64
        );
    }

    #[test]
    fn unknown_keys_follow_the_policy() {
        let vocabulary = Arc::new(Vocabulary::of([(&b"a"[..], 0), (b"b\x01c", 4)]).unwrap());
        let with = |unknown| lookup(Indices::Vocabulary(vocabulary.clone(), unknown), b"\x01");
        let keys = [
            text(b"a"),
            Key {
                text: b"b",
                term: Some(b"c"),
            },
            text(b"c"),
            Key {
                text: b"a",
                term: Some(b""),
            },
        ];
        let find = |lookup: &Lookup| {
            let mut found = [7; 4];
            lookup.find(&keys, &mut found);
            found
        };
        assert_eq!(find(&with(Unknown::Drop)), [0, 4, UNKNOWN, UNKNOWN]);
        assert_eq!(with(Unknown::Drop).size(), 5);
        assert!(with(Unknown::Drop).drops() && !with(Unknown::Error).drops());
        assert_eq!(find(&with(Unknown::Buckets(1))), [0, 4, 5, 5]);
        let third = (hash_of(b"c", 0) % 3) as i64;
        assert_eq!(find(&with(Unknown::Buckets(3)))[2], 5 + third);
        assert_eq!(with(Unknown::Buckets(3)).size(), 8);
    }

    fn piece() -> impl Strategy<Value = Vec<u8>> {
        let short = proptest::collection::vec(prop_oneof![Just(1u8), Just(b','), Just(b'a'), any::<u8>()], 0..5);
        let long = proptest::collection::vec(any::<u8>(), 40..300);
        prop_oneof![4 => short, 1 => long]
    }

    proptest! {
        #[test]
        fn pieces_hash_like_what_they_are_in_one(
            name in piece(), separator in piece(), term in piece(), seed in any::<u64>()
        ) {
            let whole = [&name[..], &separator, &term].concat();
            let key = Key { text: &name, term: Some(&term) };
            prop_assert_eq!(hash(key, &separator, seed, &mut [0; JOINED]), hash_of(&whole, seed));
            prop_assert_eq!(hash_of_pieces([&name, &separator, &term], seed), hash_of(&whole, seed));
        }

        #[test]
        fn keys_are_found_like_in_a_map(
            known in proptest::collection::hash_map(piece(), any::<u32>(), 1..200),
            names in proptest::collection::vec((piece(), piece()), 0..MOST_KEYS),
            separator in proptest::sample::select(vec![&b"\x01"[..], b",", b"", b"::"]),
        ) {
            let mut known: HashMap<Vec<u8>, u32> = known;
            for (i, (name, term)) in names.iter().enumerate().filter(|(i, _)| i % 3 == 0) {
                known.insert([&name[..], separator, term].concat(), i as u32);
                known.insert(name.clone(), i as u32);
            }
            let vocabulary = Vocabulary::of(known.iter().map(|(key, &index)| (&key[..], index))).unwrap();
            let lookup = lookup(Indices::Vocabulary(Arc::new(vocabulary), Unknown::Drop), separator);
            let expected = |key: &[u8]| known.get(key).map_or(UNKNOWN, |&index| i64::from(index));
            let pairs: Vec<Key<'_>> = names.iter().map(|(name, term)| Key { text: name, term: Some(term) }).collect();
            let texts: Vec<Key<'_>> = names.iter().map(|(name, _)| text(name)).collect();
            let mut found = vec![7; names.len()];
            lookup.find(&pairs, &mut found);
            for ((name, term), found) in names.iter().zip(&found) {
                prop_assert_eq!(*found, expected(&[&name[..], separator, term].concat()));
            }
            lookup.find(&texts, &mut found);
            for ((name, _), found) in names.iter().zip(&found) {
                prop_assert_eq!(*found, expected(name));
            }
        }
    }
}
