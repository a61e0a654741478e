//! Files that are read through a block cache, beside their bytes.

use std::collections::HashSet;
use std::fs::OpenOptions;
use std::io::{Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, SystemTime};

use bytes::Bytes;
use fastpipe_batch::{ErrorKind, FileStamp, Result, Stored};
use fastpipe_remote::{BlockCache, CachedObject, Identity, Origin};
use proptest::prelude::*;

const MIB: u64 = 1 << 20;

/// An object in memory that counts what is read of it.
#[derive(Debug, Default)]
struct Object {
    name: String,
    version: String,
    bytes: Vec<u8>,
    first: Mutex<Option<Bytes>>,
    read: AtomicU64,
    requests: AtomicU64,
}

impl Object {
    fn new(name: &str, version: &str, len: usize) -> Arc<Self> {
        let mut state = version
            .bytes()
            .chain(name.bytes())
            .fold(len as u64, |state, byte| state * 31 + u64::from(byte));
        let mut next = || {
            state = state
                .wrapping_mul(6_364_136_223_846_793_005)
                .wrapping_add(1_442_695_040_888_963_407);
            (state >> 56) as u8
        };
        Arc::new(Object {
            name: name.to_owned(),
            version: version.to_owned(),
            bytes: (0..len).map(|_| next()).collect(),
            ..Object::default()
        })
    }

    /// Returns the bytes and requests since the last call.
    fn counts(&self) -> (u64, u64) {
        (
            self.read.swap(0, Ordering::Relaxed),
            self.requests.swap(0, Ordering::Relaxed),
        )
    }
}

impl Stored for Object {
    fn location(&self) -> &str {
        &self.name
    }

    fn stamp(&self) -> FileStamp {
        let size = self.bytes.len() as u64;
        FileStamp { size, modified: 0 }
    }

    fn version(&self) -> &str {
        &self.version
    }

    fn read_at(&self, _: u64, _: &mut [u8], _: &dyn Fn() -> bool) -> Result<usize> {
        unreachable!("the cache reads parts")
    }
}

impl Origin for Object {
    fn identity(&self) -> Option<Identity> {
        (!self.version.is_empty()).then(|| Identity {
            object: self.name.clone(),
            key: format!("{} {}", self.name, self.version),
        })
    }

    fn take_first(&self, range: &Range<u64>) -> Option<Bytes> {
        let mut first = self.first.lock().unwrap();
        let has_all = first.as_ref().is_some_and(|first| first.len() as u64 >= range.end);
        let first = if has_all { first.take() } else { None };
        first.map(|first| first.slice(range.start as usize..range.end as usize))
    }

    fn read_parts(&self, parts: Vec<(u64, &mut [u8])>, _: &dyn Fn() -> bool) -> Result<()> {
        for (offset, out) in parts {
            assert!(!out.is_empty());
            out.copy_from_slice(&self.bytes[offset as usize..offset as usize + out.len()]);
            self.read.fetch_add(out.len() as u64, Ordering::Relaxed);
            self.requests.fetch_add(1, Ordering::Relaxed);
        }
        Ok(())
    }
}

fn ignore(_: &str) {}

fn open(folder: &Path, size: u64) -> Arc<BlockCache> {
    BlockCache::open(folder, size, ignore).unwrap()
}

/// Reads a range, and compares it with the object.
fn check(object: &Object, cached: &CachedObject<Object>, range: Range<usize>) {
    let mut out = vec![0xAA; range.len()];
    let read = cached.read_at(range.start as u64, &mut out, &|| false).unwrap();
    let expected = &object.bytes[range.start.min(object.bytes.len())..range.end.min(object.bytes.len())];
    assert!(read == expected.len() && &out[..read] == expected, "{range:?} differs");
}

/// Reads all of an object in ranges of `step` bytes.
fn epoch(object: &Arc<Object>, cache: &Arc<BlockCache>, step: usize) {
    let cached = CachedObject::new(object.clone(), cache).unwrap();
    for start in (0..object.bytes.len()).step_by(step) {
        check(object, &cached, start..start + step);
        cache.wait();
    }
}

/// Returns the bytes of all files of a folder, in blocks of 4 KiB.
fn used(folder: &Path) -> u64 {
    let files = std::fs::read_dir(folder)
        .unwrap()
        .map(|entry| entry.unwrap().metadata().unwrap().len());
    files.map(|len| len.next_multiple_of(4096)).sum()
}

fn cached_files(folder: &Path) -> Vec<PathBuf> {
    let files = std::fs::read_dir(folder).unwrap().map(|entry| entry.unwrap().path());
    let mut found: Vec<_> = files
        .filter(|path| path.extension().is_some_and(|suffix| suffix == "blocks"))
        .collect();
    found.sort();
    found
}

fn age(path: &Path, hours: u64) {
    let time = SystemTime::now() - Duration::from_secs(hours * 3600);
    OpenOptions::new()
        .write(true)
        .open(path)
        .unwrap()
        .set_modified(time)
        .unwrap();
}

#[derive(Clone, Debug)]
enum Step {
    Read(usize, usize, usize),
    /// Opens the cache again, with another size.
    Open(u64),
    /// Cuts a file of the cache.
    Cut(usize, u64),
    /// Changes bytes of a file of the cache.
    Garble(usize, u64, u8),
    Remove(usize),
    Append(usize),
}

fn steps() -> impl Strategy<Value = Vec<Step>> {
    let read = (
        0..2_usize,
        0..1_000_000_usize,
        prop_oneof![1..5000_usize, 1..900_000_usize],
    );
    let step = prop_oneof![
        12 => read.prop_map(|(object, start, len)| Step::Read(object, start, len)),
        1 => (MIB..2 * MIB).prop_map(Step::Open),
        1 => (0..3_usize, 0..1_200_000_u64).prop_map(|(file, at)| Step::Cut(file, at)),
        1 => (0..3_usize, 0..1_200_000_u64, 1..255_u8).prop_map(|(file, at, by)| Step::Garble(file, at, by)),
        1 => (0..3_usize).prop_map(Step::Remove),
        1 => (0..3_usize).prop_map(Step::Append),
    ];
    prop::collection::vec(step, 1..40)
}

proptest! {
    #![proptest_config(ProptestConfig { failure_persistence: None, ..ProptestConfig::with_cases(64) })]

    #[test]
    fn no_byte_is_ever_wrong_and_the_size_is_kept(steps in steps()) {
        let folder = tempfile::tempdir().unwrap();
        let objects = [Object::new("a", "1", 1_000_000), Object::new("b", "1", 700_001)];
        let mut size = 2 * MIB;
        let mut cache = open(folder.path(), size);
        for step in steps {
            let files = cached_files(folder.path());
            let named = |file: usize| files.get(file % files.len().max(1));
            match step {
                Step::Read(object, start, len) => {
                    let object = &objects[object];
                    let cached = CachedObject::new(object.clone(), &cache).unwrap();
                    check(object, &cached, start..start + len);
                    cache.wait();
                    prop_assert!(used(folder.path()) <= size);
                }
                Step::Open(next) => {
                    size = next;
                    cache = open(folder.path(), size);
                    prop_assert!(used(folder.path()) <= size);
                }
                Step::Cut(file, at) => {
                    if let Some(path) = named(file) {
                        let len = path.metadata().unwrap().len();
                        OpenOptions::new().write(true).open(path).unwrap().set_len(at.min(len)).unwrap();
                    }
                }
                Step::Garble(file, at, by) => {
                    if let Some(path) = named(file) {
                        let mut bytes = std::fs::read(path).unwrap();
                        let at = at as usize % bytes.len().max(1);
                        bytes.iter_mut().skip(at).take(3).for_each(|byte| *byte ^= by);
                        std::fs::write(path, bytes).unwrap();
                    }
                }
                Step::Remove(file) => {
                    named(file).map(std::fs::remove_file).transpose().unwrap();
                }
                Step::Append(file) => {
                    // A record whose end was not written.
                    if let Some(path) = named(file) {
                        OpenOptions::new().append(true).open(path).unwrap().write_all(&[7; 50]).unwrap();
                    }
                }
            }
        }
    }
}

#[test]
fn half_of_an_epoch_comes_from_a_cache_of_half_the_size() {
    for step in [100_000, 1_000_000, 20_000_000] {
        let folder = tempfile::tempdir().unwrap();
        let objects: Vec<_> = (0..4).map(|i| Object::new(&format!("{i}"), "1", 6_000_000)).collect();
        let cache = open(folder.path(), 12_000_000);
        for epochs in 0..3 {
            objects.iter().for_each(|object| epoch(object, &cache, step));
            let read: u64 = objects.iter().map(|object| object.counts().0).sum();
            assert!(used(folder.path()) <= 12_000_000);
            match epochs {
                0 => assert_eq!(read, 24_000_000),
                _ => assert!(read <= 24_000_000 * 51 / 100, "{read} bytes with steps of {step}"),
            }
        }
        let (cached, fetched) = cache.counts();
        assert_eq!(cached + fetched, 3 * 24_000_000);
    }
}

#[test]
fn only_missing_bytes_are_requested() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 10 * MIB);
    let object = Object::new("a", "1", 3_000_000);
    let cached = CachedObject::new(object.clone(), &cache).unwrap();
    let read = |range: Range<usize>| {
        check(&object, &cached, range);
        cache.wait();
        object.counts()
    };
    assert_eq!(read(500_000..900_000), (400_000, 1));
    assert_eq!(read(510_000..890_000), (0, 0));
    assert_eq!(read(400_000..1_000_000), (200_000, 2));
    assert_eq!(read(400_000..1_000_000), (0, 0));
    // A few cached bytes between missing ones are requested again: one request is cheaper than two.
    assert_eq!(read(2_000_000..2_010_000), (10_000, 1));
    assert_eq!(read(1_500_000..2_500_000), (1_000_000, 1));
    assert_eq!(read(0..3_000_000), (3_000_000 - 600_000 - 1_000_000, 3));
    assert_eq!(read(0..4_000_000), (0, 0));
    assert_eq!(read(3_000_000..3_000_001), (0, 0));
    assert_eq!(read(7..7), (0, 0));
}

#[test]
fn bytes_that_opening_has_read_are_kept() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), 10 * MIB);
    let object = Object::new("a", "1", 100_000);
    *object.first.lock().unwrap() = Some(object.bytes[..65_536].to_vec().into());
    let cached = CachedObject::new(object.clone(), &cache).unwrap();
    check(&object, &cached, 0..5000);
    cache.wait();
    assert!(object.first.lock().unwrap().is_none());
    check(&object, &cached, 0..5000);
    assert_eq!(object.counts(), (0, 0));
}

#[test]
fn threads_and_caches_share_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let objects: Vec<_> = (0..3).map(|i| Object::new(&format!("{i}"), "1", 1_500_000)).collect();
    // Caches of different sizes share nothing but the folder, as processes do.
    let caches: Vec<_> = (0..3).map(|i| open(folder.path(), 3 * MIB + i)).collect();
    let run = |seed: usize| {
        let mut at = seed;
        for round in 0..60 {
            at = at.wrapping_mul(48_271).wrapping_add(11) % 1_400_000;
            let (object, cache) = (&objects[(seed + round) % 3], &caches[seed % 3]);
            let cached = CachedObject::new(object.clone(), cache).unwrap();
            check(object, &cached, at..at + 90_000 % (at + 1) + 1);
            assert!(used(folder.path()) <= 3 * MIB + 2);
        }
    };
    std::thread::scope(|scope| (0..6).for_each(|seed| _ = scope.spawn(move || run(seed))));
    caches.iter().for_each(|cache| cache.wait());
    objects.iter().for_each(|object| _ = object.counts());
    for object in &objects {
        epoch(object, &caches[0], 500_000);
    }
    // What one cache has stored, the others use.
    objects.iter().for_each(|object| _ = object.counts());
    for object in &objects {
        epoch(object, &caches[1], 700_000);
    }
    let read: u64 = objects.iter().map(|object| object.counts().0).sum();
    assert!(read <= 4_500_000 * 2 / 5, "{read}");
}

#[test]
fn another_version_replaces_the_first() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), MIB);
    let (old, new) = (Object::new("a", "1", 3_000_000), Object::new("a", "2", 3_000_000));
    epoch(&old, &cache, 100_000);
    assert!(used(folder.path()) > MIB - 20_000);
    // The cache is full, but the first version is obsolete.
    for _ in 0..2 {
        epoch(&new, &cache, 100_000);
    }
    assert!(new.counts().0 < 6_000_000 - 900_000);
    assert_eq!(cached_files(folder.path()).len(), 1);
}

#[test]
fn files_that_were_not_used_for_a_day_make_room() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), MIB);
    let [first, second, third] = ["a", "b", "c"].map(|name| Object::new(name, "1", 600_000));
    epoch(&first, &cache, 100_000);
    let idle = cached_files(folder.path());
    epoch(&second, &cache, 100_000);
    age(&idle[0], 25);
    drop(cache);
    // It isn't used by an open reader of this cache.
    let cache = open(folder.path(), MIB);
    epoch(&third, &cache, 100_000);
    assert!(!cached_files(folder.path()).contains(&idle[0]));
    third.counts();
    epoch(&third, &cache, 100_000);
    assert_eq!(third.counts().0, 0);
    second.counts();
    epoch(&second, &cache, 100_000);
    assert!(second.counts().0 < 300_000);
}

#[test]
fn a_smaller_size_removes_what_was_not_used_for_the_longest_time() {
    let folder = tempfile::tempdir().unwrap();
    let objects = ["a", "b", "c"].map(|name| Object::new(name, "1", 600_000));
    let mut files = HashSet::new();
    for (object, hours) in objects.iter().zip([1, 3, 2]) {
        epoch(object, &open(folder.path(), 4 * MIB), 100_000);
        let new = cached_files(folder.path())
            .into_iter()
            .find(|path| files.insert(path.clone()))
            .unwrap();
        age(&new, hours);
    }
    let cache = open(folder.path(), MIB + 400_000);
    assert!(used(folder.path()) <= MIB + 400_000);
    let read = objects.each_ref().map(|object| {
        object.counts();
        epoch(object, &cache, 100_000);
        object.counts().0
    });
    assert_eq!((read[0], read[2]), (0, 0));
    assert!(read[1] > 0);
}

#[test]
fn a_full_disk_or_a_lost_folder_only_warns() {
    static WARNINGS: AtomicUsize = AtomicUsize::new(0);
    let count: fn(&str) = |text| {
        assert!(text.contains("block cache"), "{text}");
        WARNINGS.fetch_add(1, Ordering::Relaxed);
    };
    let parent = tempfile::tempdir().unwrap();
    let folder = parent.path().join("cache");
    let cache = BlockCache::open(&folder, MIB, count).unwrap();
    let object = Object::new("a", "1", 500_000);
    epoch(&object, &cache, 100_000);
    std::fs::remove_dir_all(&folder).unwrap();
    for _ in 0..3 {
        object.counts();
        epoch(&object, &cache, 100_000);
        assert_eq!(object.counts().0, 500_000);
    }
    assert_eq!(WARNINGS.load(Ordering::Relaxed), 1);
    assert!(!folder.exists(), "another disk may have been mounted there");
}

#[test]
fn a_folder_that_is_unusable_is_an_error() {
    let parent = tempfile::tempdir().unwrap();
    let file = parent.path().join("file");
    std::fs::write(&file, "x").unwrap();
    for path in [file.clone(), file.join("below"), parent.path().join("missing/below")] {
        let error = BlockCache::open(&path, MIB, ignore).unwrap_err();
        assert_eq!(error.kind(), ErrorKind::Storage, "{error}");
        assert_eq!(error.location().path.as_deref(), path.to_str());
    }
    let error = BlockCache::open(parent.path(), MIB - 1, ignore).unwrap_err();
    assert_eq!(error.kind(), ErrorKind::Limit);
}

#[test]
fn objects_without_versions_are_not_cached() {
    static WARNINGS: AtomicUsize = AtomicUsize::new(0);
    let folder = tempfile::tempdir().unwrap();
    let cache = BlockCache::open(folder.path(), MIB, |_| _ = WARNINGS.fetch_add(1, Ordering::Relaxed)).unwrap();
    for _ in 0..2 {
        assert!(CachedObject::new(Object::new("a", "", 10), &cache).is_none());
    }
    assert_eq!(WARNINGS.load(Ordering::Relaxed), 1);
}

#[test]
fn a_damaged_ledger_is_counted_again() {
    let folder = tempfile::tempdir().unwrap();
    let cache = open(folder.path(), MIB);
    let object = Object::new("a", "1", 3_000_000);
    for number in 0..5 {
        epoch(&object, &cache, 150_000);
        let path = folder.path().join("fastpipe-blocks.lock");
        let mut ledger = OpenOptions::new().write(true).open(path).unwrap();
        ledger.seek(SeekFrom::Start(number)).unwrap();
        ledger.write_all(b"damage").unwrap();
        assert!(used(folder.path()) <= MIB);
    }
}
