//! A remote file of which some bytes are in a cache on a local disk.

use std::ops::Range;
use std::sync::Arc;

use bytes::Bytes;
use fastpipe_batch::{FileStamp, Result, Stored};

use crate::cache::{BlockCache, CachedBytes, missing};

/// One request may read again cached bytes between others: a sixteenth of what is missing.
const GAP: u64 = 16;

/// The name of an object, and what only one of its versions has.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Identity {
    /// The storage and the name of the object in it.
    pub object: String,
    /// The same with the version.
    pub key: String,
}

/// A remote file that can be cached.
pub trait Origin: Stored {
    /// Returns the identity of the file. `None` if its storage doesn't tell its versions apart.
    fn identity(&self) -> Option<Identity>;

    /// Takes the bytes that opening the file has read, if they contain the range.
    fn take_first(&self, range: &Range<u64>) -> Option<Bytes>;

    /// Fills buffers with the bytes from their offsets, which the file must have.
    ///
    /// # Errors
    /// As for [`Stored::read_at`].
    fn read_parts(&self, parts: Vec<(u64, &mut [u8])>, cancelled: &dyn Fn() -> bool) -> Result<()>;
}

/// A remote file with cached bytes.
#[derive(Debug)]
pub struct CachedObject<T> {
    origin: Arc<T>,
    bytes: CachedBytes,
}

impl<T: Origin> CachedObject<T> {
    /// Returns a file with its cached bytes. `None`, with a warning, if its storage doesn't tell its versions apart.
    pub fn new(origin: Arc<T>, cache: &Arc<BlockCache>) -> Option<Self> {
        let Some(Identity { object, key }) = origin.identity() else {
            cache.warn_of_versions(origin.location());
            return None;
        };
        let bytes = cache.bytes_of(&object, &key);
        Some(CachedObject { origin, bytes })
    }
}

impl<T: Origin> Stored for CachedObject<T> {
    fn location(&self) -> &str {
        self.origin.location()
    }

    fn stamp(&self) -> FileStamp {
        self.origin.stamp()
    }

    fn version(&self) -> &str {
        self.origin.version()
    }

    fn read_at(&self, offset: u64, out: &mut [u8], cancelled: &dyn Fn() -> bool) -> Result<usize> {
        let len = self.stamp().size.saturating_sub(offset).min(out.len() as u64);
        if len == 0 {
            return Ok(0);
        }
        let (range, out) = (offset..offset + len, &mut out[..len as usize]);
        if let Some(first) = self.origin.take_first(&range) {
            out.copy_from_slice(&first);
            self.bytes.count(0, len);
            self.bytes.add(offset, out);
            return Ok(out.len());
        }
        let cached = self.bytes.read(&range, out);
        let wanted = joined(missing(&range, cached.into_iter()));
        let fetched: u64 = wanted.iter().map(|part| part.end - part.start).sum();
        if !wanted.is_empty() {
            self.origin.read_parts(parts_of(out, offset, &wanted), cancelled)?;
        }
        self.bytes.count(len - fetched, fetched);
        for part in wanted {
            self.bytes.add(
                part.start,
                &out[(part.start - offset) as usize..(part.end - offset) as usize],
            );
        }
        Ok(out.len())
    }
}

/// Joins ranges between which there are few bytes.
fn joined(ranges: Vec<Range<u64>>) -> Vec<Range<u64>> {
    let mut found: Vec<Range<u64>> = Vec::with_capacity(ranges.len());
    for next in ranges {
        match found.last_mut() {
            Some(last) if next.start - last.end <= (last.end - last.start + next.end - next.start) / GAP => {
                last.end = next.end;
            }
            _ => found.push(next),
        }
    }
    found
}

/// Returns the parts of a buffer for ranges in sequence. The buffer begins with the byte at `offset`.
fn parts_of<'a>(mut out: &'a mut [u8], mut offset: u64, ranges: &[Range<u64>]) -> Vec<(u64, &'a mut [u8])> {
    let mut parts = Vec::with_capacity(ranges.len());
    for range in ranges {
        let (_, rest) = out.split_at_mut((range.start - offset) as usize);
        let (part, rest) = rest.split_at_mut((range.end - range.start) as usize);
        parts.push((range.start, part));
        (out, offset) = (rest, range.end);
    }
    parts
}
