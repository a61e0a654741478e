//! Maps integer ids to dense numbers: the index of each id among the sorted distinct ids.
//!
//! If the range of the ids isn't much larger than their count, the ids are marked in a bitmap. An id's number is then
//! the count of bits set before its own bit. This takes a bit and a half for each number of the range. Otherwise the
//! ids are stored in hash tables, one per thread. Each thread keeps the ids whose hash is in its share. Either way,
//! memory besides the result depends on the number of *different* ids.

use std::collections::HashMap;
use std::hash::{BuildHasherDefault, Hasher};
use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use fastpipe_batch::{Error, ErrorKind, Result, try_with_capacity};

use crate::parallel::{AT_ONCE, do_all, shares};

/// A bitmap is used if the range of the ids is at most this many times their count.
const RANGE: u64 = 8;
/// A bitmap is always used for ranges up to this size.
const SMALL: u64 = 1 << 20;

/// An id, at least 0.
pub trait Id: Copy + Send + Sync {
    /// Returns the id as `u64`.
    fn wide(self) -> u64;
}

macro_rules! ids {
    ($($t:ty, $id:ident => $wide:expr;)*) => {$(
        impl Id for $t {
            #[inline(always)]
            fn wide(self) -> u64 {
                let $id = self;
                $wide
            }
        }
    )*};
}
ids! {
    u8, id => u64::from(id);
    u16, id => u64::from(id);
    u32, id => u64::from(id);
    u64, id => id;
    i8, id => id as u64;
    i16, id => id as u64;
    i32, id => id as u64;
    i64, id => id as u64;
}

/// Ids that are mapped to dense indices.
#[derive(Debug, PartialEq, Eq)]
pub struct DenseIds {
    /// The distinct ids in ascending order.
    pub distinct: Vec<u64>,
    /// The index in `distinct` of each input id.
    pub codes: Vec<u32>,
}

/// Assigns dense indices to ids on up to this many threads. No id may be negative.
pub fn dense_ids<T: Id>(ids: &[T], threads: usize) -> Result<DenseIds> {
    let mut most = shares(ids.len(), threads).map(|share| (share, 0)).collect::<Vec<_>>();
    let tasks = most.iter_mut().collect();
    let largest = |(): &mut (), _, (share, most): &mut (std::ops::Range<usize>, u64)| {
        *most = ids[share.clone()].iter().map(|id| id.wide()).max().unwrap_or(0);
        Ok(())
    };
    do_all(tasks, threads, || (), largest)?;
    let most = most.into_iter().map(|(_, most)| most).max().unwrap_or(0);
    if most < (ids.len() as u64).saturating_mul(RANGE).max(SMALL) {
        marked(ids, most, threads)
    } else {
        hashed(ids, threads)
    }
}

/// Assigns indices to ids up to `most` with a bitmap.
fn marked<T: Id>(ids: &[T], most: u64, threads: usize) -> Result<DenseIds> {
    let count = (most / 64 + 1) as usize;
    let mut words: Vec<AtomicU64> = try_with_capacity(count, "ids")?;
    words.resize_with(count, AtomicU64::default);
    let at = |id: u64| (&words[(id / 64) as usize], 1 << (id % 64));
    do_all(
        shares(ids.len(), threads).collect(),
        threads,
        || (),
        |(), _, share| {
            for id in &ids[share] {
                let (word, bit) = at(id.wide());
                // Most bits are already set, and a load is cheaper than an update.
                if word.load(Relaxed) & bit == 0 {
                    word.fetch_or(bit, Relaxed);
                }
            }
            Ok(())
        },
    )?;
    let mut before: Vec<u32> = try_with_capacity(count, "ids")?;
    let mut total = 0;
    for word in &words {
        before.push(total);
        total = total
            .checked_add(word.load(Relaxed).count_ones())
            .ok_or_else(too_many)?;
    }
    let mut distinct = try_with_capacity(total as usize, "ids")?;
    for (place, word) in words.iter().enumerate() {
        let mut left = word.load(Relaxed);
        while left != 0 {
            distinct.push(place as u64 * 64 + u64::from(left.trailing_zeros()));
            left &= left - 1;
        }
    }
    let codes = coded(ids, threads, |id| {
        let (word, bit) = at(id);
        before[(id / 64) as usize] + (word.load(Relaxed) & (bit - 1)).count_ones()
    })?;
    Ok(DenseIds { distinct, codes })
}

type Table = HashMap<u64, u32, BuildHasherDefault<Mixed>>;

/// Assigns indices to any ids with hash tables.
fn hashed<T: Id>(ids: &[T], threads: usize) -> Result<DenseIds> {
    let count = threads.clamp(1, 1 + ids.len() / AT_ONCE);
    let share_of = |id: u64| (((mix(id) >> 32) * count as u64) >> 32) as usize;
    let mut tables: Vec<Table> = (0..count).map(|_| Table::default()).collect();
    do_all(
        tables.iter_mut().collect(),
        threads,
        || (),
        |(), own, table| {
            let mut last = None;
            for id in ids.iter().map(|id| id.wide()) {
                if last == Some(id) || share_of(id) != own || table.contains_key(&id) {
                    continue;
                }
                last = Some(id);
                if table.len() == table.capacity() {
                    let more = table.len().max(1 << 10);
                    table
                        .try_reserve(more)
                        .map_err(|_| Error::out_of_memory(more * 17, "ids"))?;
                }
                table.insert(id, 0);
            }
            Ok(())
        },
    )?;
    let total = tables.iter().map(Table::len).sum();
    let mut distinct: Vec<u64> = try_with_capacity(total, "ids")?;
    distinct.extend(tables.iter().flat_map(Table::keys));
    distinct.sort_unstable();
    u32::try_from(total).map_err(|_| too_many())?;
    do_all(
        tables.iter_mut().collect(),
        threads,
        || (),
        |(), own, table| {
            for (&id, place) in distinct.iter().zip(0..) {
                if share_of(id) == own {
                    table.insert(id, place);
                }
            }
            Ok(())
        },
    )?;
    let codes = coded(ids, threads, |id| tables[share_of(id)][&id])?;
    Ok(DenseIds { distinct, codes })
}

/// Computes the code of each id.
fn coded<T: Id>(ids: &[T], threads: usize, code: impl Fn(u64) -> u32 + Sync) -> Result<Vec<u32>> {
    let mut codes = try_with_capacity(ids.len(), "the numbers of ids")?;
    codes.resize(ids.len(), 0);
    let each = ids.len().div_ceil(threads.max(1)).max(AT_ONCE);
    let tasks: Vec<_> = ids.chunks(each).zip(codes.chunks_mut(each)).collect();
    do_all(
        tasks,
        threads,
        || (),
        |(), _, (ids, codes)| {
            for (id, out) in ids.iter().zip(codes) {
                *out = code(id.wide());
            }
            Ok(())
        },
    )?;
    Ok(codes)
}

fn too_many() -> Error {
    Error::new(ErrorKind::Limit, "there are more than 2^32 different ids")
}

/// Mixes ids, since similar ids have many bits in common: the finalizer of SplitMix64 (Steele, Lea and Flood, 2014).
#[inline(always)]
fn mix(id: u64) -> u64 {
    let id = (id ^ (id >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    let id = (id ^ (id >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    id ^ (id >> 31)
}

/// A hasher of numbers.
#[derive(Default)]
struct Mixed(u64);

impl Hasher for Mixed {
    fn finish(&self) -> u64 {
        self.0
    }

    fn write(&mut self, bytes: &[u8]) {
        for &byte in bytes {
            self.0 = mix(self.0 ^ u64::from(byte));
        }
    }

    #[inline(always)]
    fn write_u64(&mut self, id: u64) {
        self.0 = mix(id);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn naive(ids: &[u64]) -> DenseIds {
        let distinct: Vec<u64> = ids.iter().copied().collect::<BTreeSet<_>>().into_iter().collect();
        let codes = ids
            .iter()
            .map(|id| distinct.binary_search(id).unwrap() as u32)
            .collect();
        DenseIds { distinct, codes }
    }

    proptest! {
        #[test]
        fn codes_are_places_among_the_distinct(
            ids in prop_oneof![
                prop::collection::vec(0..50_u64, 0..200),
                prop::collection::vec(0..2_000_000_u64, 0..200),
                prop::collection::vec(any::<u64>(), 0..200),
                prop::collection::vec((0..20_u64).prop_map(|i| u64::MAX - i), 0..200),
            ],
            threads in 1..5_usize,
        ) {
            let wanted = naive(&ids);
            prop_assert_eq!(&dense_ids(&ids, threads).unwrap(), &wanted);
            prop_assert_eq!(&hashed(&ids, threads).unwrap(), &wanted);
        }
    }

    #[test]
    fn many_ids_are_mapped_by_several_threads() {
        for scale in [1, 1 << 40] {
            let ids: Vec<u64> = (0..5 * AT_ONCE as u64).map(|i| mix(i) % 1000 * scale).collect();
            let wanted = naive(&ids);
            for threads in [1, 3, 8] {
                assert!(dense_ids(&ids, threads).unwrap() == wanted);
                assert!(hashed(&ids, threads).unwrap() == wanted);
            }
        }
        assert_eq!(dense_ids(&[3_u8, 0, 255], 2).unwrap().codes, [1, 0, 2]);
    }
}
