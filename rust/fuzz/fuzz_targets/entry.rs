//! Reads arbitrary bytes as an entry of the index cache. A lookup must find the stored index or no index. Panics and
//! hangs are bugs.
#![no_main]

use std::path::PathBuf;
use std::sync::OnceLock;

use fastpipe_files::{IndexCache, Key, Lookup};
use libfuzzer_sys::fuzz_target;

const INDEX: &[u8] = b"an index";

struct Kept {
    cache: IndexCache,
    key: Key,
    path: PathBuf,
    /// A valid entry.
    entry: Vec<u8>,
}

fn kept() -> &'static Kept {
    static KEPT: OnceLock<Kept> = OnceLock::new();
    KEPT.get_or_init(|| {
        let folder = std::env::temp_dir().join(format!("fastpipe-fuzz-entry-{}", std::process::id()));
        let cache = IndexCache::open(&folder).unwrap();
        let key = Key::Local {
            path: b"/data/x.avro".to_vec(),
            size: 1000,
            modified: -3,
        };
        cache.store(&key, INDEX).unwrap();
        let path = cache.path(&key);
        let entry = std::fs::read(&path).unwrap();
        Kept {
            cache,
            key,
            path,
            entry,
        }
    })
}

/// The range of the checksum, which follows the magic bytes. The key after it is checked only if the checksum is valid.
const CHECKSUM: std::ops::Range<usize> = 8..12;

fuzz_target!(|input: (bool, bool, u16, &[u8])| {
    let (whole, sealed, at, bytes) = input;
    let kept = kept();
    let mut entry = kept.entry.clone();
    if whole {
        entry = bytes.to_vec();
    } else {
        let at = usize::from(at) % (entry.len() + 1);
        let end = entry.len().min(at + bytes.len());
        entry.splice(at..end, bytes.iter().copied());
    }
    if sealed && entry.len() >= CHECKSUM.end {
        let checksum = crc32fast::hash(&entry[CHECKSUM.end..]);
        entry[CHECKSUM].copy_from_slice(&checksum.to_le_bytes());
    }
    std::fs::write(&kept.path, &entry).unwrap();
    match kept.cache.load(&kept.key) {
        Lookup::Found(index, size) => {
            assert_eq!(size, entry.len() as u64);
            assert!(entry.ends_with(&index));
            assert!(sealed || whole || index == INDEX, "a change went unnoticed");
        }
        Lookup::Smaller(index, _) => assert!((sealed || whole) && entry.ends_with(&index)),
        Lookup::Missing => {}
        Lookup::Damaged(reason) => assert!(!reason.is_empty()),
    }
});
