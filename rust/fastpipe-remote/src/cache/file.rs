//! The file that caches bytes of one object.
//!
//! | bytes | content |
//! |---|---|
//! | 8 | [`MAGIC`], whose last byte is the version of this layout |
//! | 4 | length of the key |
//! | any | the key: the storage, the URL, the version and the size of the object |
//! | 8 | a number that no other file has |
//! | the rest | records, each of which has some consecutive bytes of the object |
//!
//! A record consists of
//!
//! | bytes | content |
//! |---|---|
//! | 8 | checksum of the rest of the head |
//! | 8 | offset in the object |
//! | 4 | number of bytes, at most [`RECORD_BYTES`] |
//! | 8 each | checksums of the grains: of 256 KiB each, the last one may be shorter |
//! | the rest | the bytes |
//!
//! Numbers are little-endian. Checksums are XXH3, with a seed of the key and the position. Records are only appended.
//! A file is untrusted: it may have been cut or damaged, or another process may have replaced it. Bytes that don't
//! match their checksum are not cached.

use std::collections::BTreeMap;
use std::fs::{File, OpenOptions};
use std::io::{self, Read, Seek, SeekFrom, Write};
use std::ops::Range;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::SystemTime;

use twox_hash::XxHash3_64;

/// The first bytes of a file.
const MAGIC: [u8; 8] = *b"FPBLOCK\x01";

/// Number of bytes that have one checksum.
const GRAIN: u64 = 256 << 10;

/// Most bytes of the object in one record.
const RECORD_BYTES: u64 = 8 << 20;

/// Bytes of a record's head without the checksums of grains.
const FIXED: usize = 20;

/// Most bytes of a record's head.
const HEAD: usize = FIXED + 8 * (RECORD_BYTES / GRAIN) as usize;

/// A record that has to be cut has at least this many bytes.
const LEAST: u64 = 4096;

/// Files are counted in blocks of this many bytes, as file systems do.
const BLOCK: u64 = 4096;

/// Returns the bytes that a file of `len` bytes takes on a disk.
pub(crate) fn on_disk(len: u64) -> u64 {
    len.next_multiple_of(BLOCK)
}

/// The cached bytes of one object.
#[derive(Debug)]
pub(crate) struct CacheFile {
    path: PathBuf,
    prefix: Vec<u8>,
    seed: u64,
    index: Mutex<Index>,
    /// Whether the file on the disk is of another version of the object.
    is_obsolete: AtomicBool,
}

/// The records that were found so far.
#[derive(Debug, Default)]
struct Index {
    /// The number of the file.
    number: [u8; 8],
    /// The end of the last one in the file.
    end: u64,
    records: BTreeMap<u64, Record>,
}

#[derive(Clone, Debug)]
struct Record {
    start: u64,
    end: u64,
    /// Position of its bytes in the file.
    data: u64,
    sums: Arc<[u64]>,
}

/// What a file contains of a range.
#[derive(Debug, PartialEq, Eq)]
pub(crate) enum Found {
    /// These ranges, in sequence.
    Ranges(Vec<Range<u64>>),
    /// Bytes that don't match their checksums.
    Damage,
}

/// The change that an append makes to the sizes of files.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Change {
    /// Bytes on the disk before.
    pub(crate) from: u64,
    /// Bytes on the disk after it.
    pub(crate) to: u64,
}

impl CacheFile {
    /// Returns the file at a path for the object with that key. Doesn't open it.
    pub(crate) fn new(path: PathBuf, key: &str) -> Self {
        let mut prefix = MAGIC.to_vec();
        prefix.extend((key.len() as u32).to_le_bytes());
        prefix.extend(key.as_bytes());
        Self::with_prefix(path, prefix)
    }

    fn with_prefix(path: PathBuf, prefix: Vec<u8>) -> Self {
        CacheFile {
            path,
            seed: XxHash3_64::oneshot(&prefix),
            prefix,
            index: Mutex::default(),
            is_obsolete: AtomicBool::new(false),
        }
    }

    /// Returns the same file without what is known of its records.
    pub(crate) fn unlocked(&self) -> Self {
        Self::with_prefix(self.path.clone(), self.prefix.clone())
    }

    /// Returns the path of the file.
    pub(crate) fn path(&self) -> &Path {
        &self.path
    }

    /// Returns whether the object has this key.
    pub(crate) fn is_for(&self, key: &str) -> bool {
        self.prefix.get(MAGIC.len() + 4..) == Some(key.as_bytes())
    }

    /// Returns whether the file on the disk is of another version of the object.
    pub(crate) fn is_obsolete(&self) -> bool {
        self.is_obsolete.load(Ordering::Relaxed)
    }

    /// Sets the time of the file to now, so that it counts as used.
    pub(crate) fn touch(&self) {
        let file = OpenOptions::new().write(true).open(&self.path);
        // The time only decides which files are removed first.
        _ = file.and_then(|file| file.set_modified(SystemTime::now()));
    }

    /// Reads the cached bytes of a range to their place in `out`, and returns their ranges.
    pub(crate) fn read(&self, range: &Range<u64>, out: &mut [u8]) -> io::Result<Found> {
        let mut file = match File::open(&self.path) {
            Ok(file) => file,
            Err(error) if error.kind() == io::ErrorKind::NotFound => {
                *self.index() = Index::default();
                return Ok(Found::Ranges(Vec::new()));
            }
            Err(error) => return Err(error),
        };
        if let Some(found) = self.read_records(&mut file, range, out)? {
            return Ok(Found::Ranges(found));
        }
        // Another process may have replaced the file.
        *self.index() = Index::default();
        let found = self.read_records(&mut file, range, out)?;
        Ok(found.map_or(Found::Damage, Found::Ranges))
    }

    /// Returns `None` if bytes don't match their checksum.
    fn read_records(&self, file: &mut File, range: &Range<u64>, out: &mut [u8]) -> io::Result<Option<Vec<Range<u64>>>> {
        let mut index = self.index();
        let mut records = index.overlapping(range);
        if !missing(range, records.iter().map(Record::range)).is_empty() {
            self.extend(file, &mut index)?;
            records = index.overlapping(range);
        }
        drop(index);
        for record in &records {
            if !self.read_record(file, record, range, out)? {
                return Ok(None);
            }
        }
        let clipped = |record: &Record| record.start.max(range.start)..record.end.min(range.end);
        Ok(Some(records.iter().map(clipped).collect()))
    }

    /// Reads the part of a record in a range. Returns false if it doesn't match its checksums.
    fn read_record(&self, file: &mut File, record: &Record, range: &Range<u64>, out: &mut [u8]) -> io::Result<bool> {
        let (from, to) = (record.start.max(range.start), record.end.min(range.end));
        let grains = (from - record.start) / GRAIN..(to - record.start).div_ceil(GRAIN);
        file.seek(SeekFrom::Start(record.data + grains.start * GRAIN))?;
        let mut scratch = Vec::new();
        for grain in grains {
            let start = record.start + grain * GRAIN;
            let end = record.end.min(start + GRAIN);
            let wanted = start.max(from)..end.min(to);
            let target = &mut out[(wanted.start - range.start) as usize..(wanted.end - range.start) as usize];
            let is_whole = wanted == (start..end);
            let bytes = if is_whole {
                &mut *target
            } else {
                scratch.resize((end - start) as usize, 0);
                &mut scratch
            };
            match file.read_exact(bytes) {
                Err(error) if error.kind() == io::ErrorKind::UnexpectedEof => return Ok(false),
                read => read?,
            }
            if record.sums.get(grain as usize) != Some(&self.sum(start, bytes)) {
                return Ok(false);
            }
            if !is_whole {
                target.copy_from_slice(&scratch[(wanted.start - start) as usize..(wanted.end - start) as usize]);
            }
        }
        Ok(true)
    }

    /// Appends the bytes of a range that aren't cached yet. The caller has the lock of the directory. `reserve` is
    /// called before the file grows, and again if that failed. Files may grow by `room` bytes. Returns whether all
    /// bytes had room.
    pub(crate) fn append(
        &self,
        offset: u64,
        bytes: &[u8],
        room: u64,
        reserve: &mut dyn FnMut(Change) -> io::Result<()>,
    ) -> io::Result<bool> {
        let mut options = OpenOptions::new();
        let mut file = options
            .read(true)
            .write(true)
            .create(true)
            .truncate(false)
            .open(&self.path)?;
        let before = file.metadata()?.len();
        let mut index = self.index();
        let kept = if self.extend(&mut file, &mut index)? {
            index.end
        } else {
            0
        };
        let range = offset..offset + bytes.len() as u64;
        let uncached = missing(&range, index.overlapping(&range).iter().map(Record::range));
        let first = if kept == 0 { self.prefix.len() as u64 + 8 } else { kept };
        let most = on_disk(before) + room / BLOCK * BLOCK;
        let (records, after, fits) = planned(&uncached, first, most);
        if records.is_empty() {
            drop(file);
            if before == 0 {
                std::fs::remove_file(&self.path)?;
            }
            return Ok(fits);
        }
        // Readers don't wait for the write. No other thread appends, because the directory is locked.
        drop(index);
        let from = on_disk(before);
        let to = on_disk(after).max(from);
        reserve(Change { from, to })?;
        let mut write = || -> io::Result<()> {
            file.set_len(kept)?;
            file.seek(SeekFrom::Start(kept))?;
            if kept == 0 {
                file.write_all(&self.prefix)?;
                file.write_all(&fresh_number())?;
            }
            for record in &records {
                let part = &bytes[(record.start - offset) as usize..(record.end - offset) as usize];
                let at = file.stream_position()?;
                file.write_all(&self.head(at, record.start, part))?;
                file.write_all(part)?;
            }
            Ok(())
        };
        let written = write();
        if written.is_err() {
            // Such a tail would be ignored, but it takes space.
            file.set_len(kept)?;
        }
        self.extend(&mut file, &mut self.index())?;
        let found = on_disk(file.metadata()?.len());
        reserve(Change { from: to, to: found })?;
        written.map(|()| fits)
    }

    fn index(&self) -> MutexGuard<'_, Index> {
        self.index.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Adds the records after those that are known. Returns false if the file is empty or of another version.
    fn extend(&self, file: &mut File, index: &mut Index) -> io::Result<bool> {
        let len = file.metadata()?.len();
        let (mut start, expected) = (Vec::new(), self.prefix.len());
        file.seek(SeekFrom::Start(0))?;
        Read::by_ref(file).take(expected as u64 + 8).read_to_end(&mut start)?;
        let number = start
            .strip_prefix(&*self.prefix)
            .and_then(|number| number.try_into().ok());
        self.is_obsolete.store(number.is_none() && len > 0, Ordering::Relaxed);
        let Some(number) = number else {
            *index = Index::default();
            return Ok(false);
        };
        if number != index.number || len < index.end {
            *index = Index {
                number,
                end: start.len() as u64,
                records: BTreeMap::new(),
            };
        }
        while let Some(record) = self.record_at(file, index.end, len)? {
            index.end = record.data + (record.end - record.start);
            index.insert(record);
        }
        Ok(true)
    }

    /// Returns the record at a position. `None` if it isn't complete or damaged.
    fn record_at(&self, file: &mut File, at: u64, len: u64) -> io::Result<Option<Record>> {
        let mut head = Vec::with_capacity(HEAD);
        file.seek(SeekFrom::Start(at))?;
        Read::by_ref(file).take(HEAD as u64).read_to_end(&mut head)?;
        let number = |at: usize| head.get(at..at + 8)?.try_into().ok().map(u64::from_le_bytes);
        let size = head.get(16..FIXED).and_then(|size| size.try_into().ok());
        let (Some(sum), Some(start), Some(size)) = (number(0), number(8), size.map(u32::from_le_bytes)) else {
            return Ok(None);
        };
        let size = u64::from(size);
        if size == 0 || size > RECORD_BYTES {
            return Ok(None);
        }
        let after = FIXED + 8 * size.div_ceil(GRAIN) as usize;
        let data = at + after as u64;
        let (Some(rest), Some(end)) = (head.get(8..after), start.checked_add(size)) else {
            return Ok(None);
        };
        if data + size > len || self.sum(at, rest) != sum {
            return Ok(None);
        }
        let sums = (FIXED..after).step_by(8).filter_map(number).collect();
        Ok(Some(Record { start, end, data, sums }))
    }

    /// Returns the head of a record at a position of the file.
    fn head(&self, at: u64, start: u64, bytes: &[u8]) -> Vec<u8> {
        let mut head = vec![0; 8];
        head.extend(start.to_le_bytes());
        head.extend((bytes.len() as u32).to_le_bytes());
        for (grain, bytes) in (0..).zip(bytes.chunks(GRAIN as usize)) {
            head.extend(self.sum(start + grain * GRAIN, bytes).to_le_bytes());
        }
        let sum = self.sum(at, &head[8..]);
        head[..8].copy_from_slice(&sum.to_le_bytes());
        head
    }

    fn sum(&self, position: u64, bytes: &[u8]) -> u64 {
        XxHash3_64::oneshot_with_seed(self.seed ^ position, bytes)
    }
}

impl Index {
    /// Returns the records that have bytes of a range.
    fn overlapping(&self, range: &Range<u64>) -> Vec<Record> {
        let before = self.records.range(..=range.start).next_back().map(|(_, record)| record);
        let after = self
            .records
            .range(range.start.saturating_add(1)..)
            .map(|(_, record)| record);
        let all = before
            .into_iter()
            .chain(after.take_while(|record| record.start < range.end));
        all.filter(|record| record.end > range.start).cloned().collect()
    }

    /// Adds a record, unless some of its bytes are known.
    fn insert(&mut self, record: Record) {
        if self.overlapping(&record.range()).is_empty() {
            self.records.insert(record.start, record);
        }
    }
}

impl Record {
    fn range(&self) -> Range<u64> {
        self.start..self.end
    }
}

/// Returns a number that no other file has.
fn fresh_number() -> [u8; 8] {
    static COUNT: AtomicU64 = AtomicU64::new(1);
    let now = SystemTime::now()
        .duration_since(SystemTime::UNIX_EPOCH)
        .unwrap_or_default();
    let parts = [
        COUNT.fetch_add(1, Ordering::Relaxed),
        now.as_nanos() as u64,
        u64::from(std::process::id()),
    ];
    XxHash3_64::oneshot(&parts.map(u64::to_le_bytes).concat()).to_le_bytes()
}

/// Returns the parts of a range that are in none of the others, which are in sequence.
pub(crate) fn missing(range: &Range<u64>, others: impl Iterator<Item = Range<u64>>) -> Vec<Range<u64>> {
    let mut found = Vec::new();
    let mut at = range.start;
    for other in others {
        if other.start > at {
            found.push(at..other.start.min(range.end));
        }
        at = at.max(other.end);
    }
    if at < range.end {
        found.push(at..range.end);
    }
    found
}

/// Cuts ranges into records that end before the position `most` of the file. Returns them, the end of the last one, and
/// whether they have all bytes.
fn planned(ranges: &[Range<u64>], first: u64, most: u64) -> (Vec<Range<u64>>, u64, bool) {
    let (mut records, mut at) = (Vec::new(), first);
    for range in ranges {
        let mut start = range.start;
        while start < range.end {
            let wanted = (range.end - start).min(RECORD_BYTES);
            let len = wanted.min(most.saturating_sub(at + HEAD as u64));
            if len < wanted.min(LEAST) {
                return (records, at, false);
            }
            records.push(start..start + len);
            at += FIXED as u64 + 8 * len.div_ceil(GRAIN) + len;
            start += len;
        }
    }
    (records, at, true)
}
