//! The hash table of a vocabulary, which maps keys to indices.
//!
//! All keys are stored consecutively in one buffer, each after its index and its length. An open-addressing table
//! points into the buffer. A slot consists of 24 bits of the key's hash and a 40-bit position in the buffer. So the
//! table alone is enough to reject a missing key in all but one of millions of cases. At least half of the slots are
//! free.

use crate::error::{Error, ErrorKind};
use crate::key::{Key, MOST_KEYS, UNKNOWN, hash_of};
use fastpipe_memory::{hint, prefetch_of, try_reserve_large};

/// Bits of a slot for the position of the key. The bits above contain part of its hash. A free slot is 0.
const PLACE: u64 = (1 << 40) - 1;

/// Number of bytes before a key, for its index and its length.
const HEAD: usize = 8;

const WHAT: &str = "a vocabulary";

/// A map from keys to indices.
pub struct Vocabulary {
    slots: Vec<u64>,
    buffer: Vec<u8>,
    keys: usize,
    size: u64,
    digest: u128,
}

impl std::fmt::Debug for Vocabulary {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Vocabulary({} keys, {:032x})", self.keys, self.digest)
    }
}

impl PartialEq for Vocabulary {
    fn eq(&self, other: &Vocabulary) -> bool {
        std::ptr::eq(self, other) || (self.keys, self.size, self.digest) == (other.keys, other.size, other.digest)
    }
}

impl Vocabulary {
    /// Creates an empty vocabulary with room for `keys` keys of `bytes` bytes in total.
    pub fn with_capacity(keys: usize, bytes: usize) -> Result<Vocabulary, Error> {
        let mut vocabulary = Vocabulary {
            slots: Vec::new(),
            buffer: Vec::new(),
            keys: 0,
            size: 0,
            digest: 0,
        };
        vocabulary.make_slots(keys)?;
        let bytes = bytes.saturating_add(keys.saturating_mul(HEAD));
        try_reserve_large(&mut vocabulary.buffer, bytes).map_err(|_| Error::out_of_memory(bytes, WHAT))?;
        Ok(vocabulary)
    }

    /// Creates a vocabulary from distinct keys and their indices.
    #[cfg(test)]
    pub(crate) fn of<'k>(keys: impl IntoIterator<Item = (&'k [u8], u32)>) -> Result<Vocabulary, Error> {
        let mut vocabulary = Vocabulary::with_capacity(0, 0)?;
        for (key, index) in keys {
            let before = vocabulary.push(key, index)?;
            assert_eq!(before, None, "a key is there twice");
        }
        Ok(vocabulary)
    }

    /// Allocates free slots for this many keys.
    fn make_slots(&mut self, keys: usize) -> Result<(), Error> {
        let most = keys.checked_mul(2).and_then(usize::checked_next_power_of_two);
        let slots = most.unwrap_or(usize::MAX).max(8);
        let mut table = Vec::new();
        try_reserve_large(&mut table, slots)
            .map_err(|_| Error::out_of_memory(slots.saturating_mul(size_of::<u64>()), WHAT))?;
        table.resize(slots, 0);
        self.slots = table;
        Ok(())
    }

    /// Adds a key. If the key already exists, returns its index and changes nothing.
    pub fn push(&mut self, key: &[u8], index: u32) -> Result<Option<u32>, Error> {
        if self.keys >= self.slots.len() / 2 {
            self.grow()?;
        }
        let hash = hash_of(key, 0);
        let mut slot = self.home(hash);
        while let Some(place) = self.place_of_tag(&mut slot, hash) {
            let (known, own) = self.key_at(place);
            if own == key {
                return Ok(Some(known));
            }
            slot = self.next(slot);
        }
        let place = self.buffer.len() as u64;
        let Ok(len) = u32::try_from(key.len()) else {
            return Err(Error::new(
                ErrorKind::Limit,
                "a key of a vocabulary must be smaller than 4 GiB",
            ));
        };
        if place + 1 >= PLACE {
            return Err(Error::new(ErrorKind::Limit, "a vocabulary must be smaller than 1 TiB"));
        }
        let more = HEAD + key.len();
        self.buffer
            .try_reserve(more)
            .map_err(|_| Error::out_of_memory(self.buffer.len().saturating_add(more), WHAT))?;
        self.buffer.extend_from_slice(&index.to_le_bytes());
        self.buffer.extend_from_slice(&len.to_le_bytes());
        self.buffer.extend_from_slice(key);
        self.slots[slot] = hash & !PLACE | (place + 1);
        self.keys += 1;
        self.size = self.size.max(u64::from(index) + 1);
        // The digest is a sum, which doesn't depend on the order in which keys were added.
        let seed = u64::from(index);
        let digest = u128::from(hash_of(key, seed)) << 64 | u128::from(hash_of(key, !seed));
        self.digest = self.digest.wrapping_add(digest);
        Ok(None)
    }

    /// Doubles the number of slots.
    #[cold]
    fn grow(&mut self) -> Result<(), Error> {
        self.make_slots(self.keys.saturating_mul(2))?;
        let mut place = 0;
        while place < self.buffer.len() {
            let key = self.key_at(place).1;
            let (hash, behind) = (hash_of(key, 0), place + HEAD + key.len());
            let mut slot = self.home(hash);
            while self.slots[slot] != 0 {
                slot = self.next(slot);
            }
            self.slots[slot] = hash & !PLACE | (place as u64 + 1);
            place = behind;
        }
        Ok(())
    }

    /// Returns the same vocabulary without spare memory, in large pages. Lookups access random places of the buffer, so
    /// they are slow without large pages.
    pub fn settled(mut self) -> Result<Vocabulary, Error> {
        let mut buffer = Vec::new();
        try_reserve_large(&mut buffer, self.buffer.len()).map_err(|_| Error::out_of_memory(self.buffer.len(), WHAT))?;
        buffer.extend_from_slice(&self.buffer);
        self.buffer = buffer;
        Ok(self)
    }

    /// Returns the number of keys.
    pub fn len(&self) -> usize {
        self.keys
    }

    /// Whether the vocabulary is empty.
    pub fn is_empty(&self) -> bool {
        self.keys == 0
    }

    /// Returns the largest index plus one.
    pub fn size(&self) -> u64 {
        self.size
    }

    /// Returns a digest of the keys and their indices, which doesn't depend on the order in which they were added. Used
    /// for comparisons.
    pub fn digest(&self) -> u128 {
        self.digest
    }

    /// Returns the size of its memory in bytes.
    pub fn bytes(&self) -> usize {
        self.buffer.capacity() + self.slots.capacity() * size_of::<u64>()
    }

    /// Returns the keys and indices in the format of [`Vocabulary::from_bytes`].
    pub fn as_bytes(&self) -> &[u8] {
        &self.buffer
    }

    /// Creates a vocabulary from the result of [`Vocabulary::as_bytes`].
    pub fn from_bytes(mut bytes: &[u8]) -> Result<Vocabulary, Error> {
        let damaged = || {
            Error::new(
                ErrorKind::Malformed,
                "cannot load the vocabulary: its bytes are damaged or incomplete",
            )
        };
        let mut vocabulary = Vocabulary::with_capacity(0, bytes.len())?;
        while let Some((&[a, b, c, d, len @ ..], rest)) = bytes.split_first_chunk::<HEAD>() {
            let (key, rest) = rest
                .split_at_checked(u32::from_le_bytes(len) as usize)
                .ok_or_else(damaged)?;
            if vocabulary.push(key, u32::from_le_bytes([a, b, c, d]))?.is_some() {
                return Err(damaged());
            }
            bytes = rest;
        }
        if bytes.is_empty() {
            Ok(vocabulary)
        } else {
            Err(damaged())
        }
    }

    /// Returns all keys with their indices, in the order in which they were added.
    pub fn iter(&self) -> impl Iterator<Item = (&[u8], u32)> {
        let mut place = 0;
        std::iter::from_fn(move || {
            (place < self.buffer.len()).then(|| {
                let (index, key) = self.key_at(place);
                place += HEAD + key.len();
                (key, index)
            })
        })
    }

    #[inline(always)]
    fn home(&self, hash: u64) -> usize {
        hash as usize & (self.slots.len() - 1)
    }

    #[inline(always)]
    fn next(&self, slot: usize) -> usize {
        (slot + 1) & (self.slots.len() - 1)
    }

    /// Returns the position of the next key, from this slot on, whose hash has the same upper bits. Sets `slot` to the
    /// slot of that key. If no key matches, returns `None` and sets `slot` to a free slot.
    #[inline(always)]
    fn place_of_tag(&self, slot: &mut usize, hash: u64) -> Option<usize> {
        loop {
            let found = self.slots[*slot];
            if found == 0 {
                return None;
            }
            if (found ^ hash) & !PLACE == 0 {
                return Some((found & PLACE) as usize - 1);
            }
            *slot = self.next(*slot);
        }
    }

    /// Returns the index and the bytes of the key at a position.
    #[inline(always)]
    fn key_at(&self, place: usize) -> (u32, &[u8]) {
        let [a, b, c, d, len @ ..] = *self.buffer[place..].first_chunk::<HEAD>().unwrap_or(&[0; HEAD]);
        let start = place + HEAD;
        let end = start + u32::from_le_bytes(len) as usize;
        (u32::from_le_bytes([a, b, c, d]), &self.buffer[start..end])
    }

    /// Prefetches the slot of a key with this hash, for a later lookup.
    #[inline(always)]
    pub(crate) fn ask_for(&self, hash: u64) {
        if let Some(slot) = self.slots.get(self.home(hash)) {
            prefetch_of(slot);
        }
    }

    /// Finds up to [`MOST_KEYS`] keys with these hashes.
    #[inline]
    pub(crate) fn find(&self, hashes: &[u64], keys: &[Key<'_>], separator: &[u8], found: &mut [i64]) {
        let mut slots = [0; MOST_KEYS];
        for (&hash, slot) in hashes.iter().zip(&mut slots) {
            *slot = self.home(hash);
            if let Some(place) = self.place_of_tag(slot, hash) {
                let head = self.buffer.as_ptr().wrapping_add(place);
                hint(head);
                // Many keys span two cache lines.
                hint(head.wrapping_add(HEAD + 24));
            }
        }
        for (((&hash, key), slot), found) in hashes.iter().zip(keys).zip(&mut slots).zip(found) {
            *found = UNKNOWN;
            while let Some(place) = self.place_of_tag(slot, hash) {
                let (index, own) = self.key_at(place);
                if is(own, *key, separator) {
                    *found = i64::from(index);
                    break;
                }
                *slot = self.next(*slot);
            }
        }
    }
}

/// Whether a key of the vocabulary is equal to the key of a record.
#[inline(always)]
fn is(own: &[u8], key: Key<'_>, separator: &[u8]) -> bool {
    let Some(term) = key.term else { return own == key.text };
    let rest = own.strip_prefix(key.text);
    rest.and_then(|rest| rest.strip_prefix(separator)) == Some(term)
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_key_is_added_once() {
        let mut vocabulary = Vocabulary::with_capacity(1, 1).unwrap();
        assert!(vocabulary.is_empty());
        assert_eq!(vocabulary.push(b"a", 3).unwrap(), None);
        assert_eq!(vocabulary.push(b"", 9).unwrap(), None);
        assert_eq!(vocabulary.push(b"a", 4).unwrap(), Some(3));
        assert_eq!((vocabulary.len(), vocabulary.size()), (2, 10));
        assert_eq!(vocabulary.iter().collect::<Vec<_>>(), [(&b"a"[..], 3), (b"", 9)]);
        assert!(vocabulary.bytes() >= 17 + 8 * 8);
    }

    #[test]
    fn equal_vocabularies_have_the_same_keys_and_indices_in_any_order() {
        let of = |keys: &[(&[u8], u32)]| Vocabulary::of(keys.iter().copied()).unwrap();
        let one = of(&[(b"a", 0), (b"b", 1)]);
        assert_eq!(one, of(&[(b"b", 1), (b"a", 0)]));
        for other in [&[(&b"a"[..], 1), (b"b", 0)][..], &[(b"a", 0)], &[(b"a", 0), (b"c", 1)]] {
            assert_ne!(one, of(other));
        }
    }

    #[test]
    fn vocabularies_beyond_memory_are_errors() {
        let error = Vocabulary::with_capacity(usize::MAX / 64, 0).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::OutOfMemory);
    }

    proptest! {
        #[test]
        fn it_is_a_map(
            keys in proptest::collection::vec((proptest::collection::vec(0..4u8, 0..6), any::<u32>()), 0..400),
            reserved in 0..500usize,
        ) {
            let mut vocabulary = Vocabulary::with_capacity(reserved, 0).unwrap();
            let mut map = HashMap::new();
            for (key, index) in &keys {
                let before = map.get(key).copied();
                prop_assert_eq!(vocabulary.push(key, *index).unwrap(), before);
                map.entry(key).or_insert(*index);
            }
            prop_assert_eq!(vocabulary.len(), map.len());
            let again = Vocabulary::from_bytes(vocabulary.as_bytes()).unwrap().settled().unwrap();
            prop_assert_eq!(&again, &vocabulary);
            prop_assert!(again.iter().eq(vocabulary.iter()));
            let cut = vocabulary.as_bytes().split_last().map(|(_, front)| front);
            if let Some(front) = cut {
                prop_assert!(Vocabulary::from_bytes(front).is_err());
            }
            let all: HashMap<Vec<u8>, u32> = vocabulary.iter().map(|(key, index)| (key.to_vec(), index)).collect();
            prop_assert_eq!(all.len(), map.len());
            prop_assert!(all.iter().all(|(key, index)| map.get(key) == Some(index)));
        }
    }
}
