//! Ranges of remote files, of which neighbors are read with one request.

use std::sync::Arc;

use fastpipe_batch::{ByteRange, Error, ErrorKind, Fetched, Result, Source, SourceFacts};
use fastpipe_files::Files;

use crate::memory::Memory;

/// Number of requests at once. With 8 MiB each, this is enough for 200 ms and 1 GB/s.
pub(crate) const REQUESTS: usize = 32;

/// Bytes that one request may read. The advice of the stores is 8 to 16 MiB.
pub(crate) const REQUEST_BYTES: u64 = 8 << 20;

/// Bytes of units that are requested or waiting before they are needed.
const AHEAD_BYTES: u64 = 128 << 20;

/// A request may read a gap of at most a sixteenth of the bytes before it.
const GAP: u64 = 16;

/// The units of a source, as ranges of its files.
pub(crate) struct Ranges {
    source: Arc<dyn Source>,
    files: Arc<Files>,
    memory: Arc<Memory>,
}

impl Ranges {
    /// Returns the ranges of a source, if its units are ranges of files of which some are remote.
    pub(crate) fn of(source: &Arc<dyn Source>, files: &Arc<Files>, memory: &Arc<Memory>) -> Option<Ranges> {
        let facts = source.facts();
        (facts.fetches == 0 && facts.are_remote()).then(|| Ranges {
            source: source.clone(),
            files: files.clone(),
            memory: memory.clone(),
        })
    }

    /// Returns the number of units that may be requested in advance.
    pub(crate) fn most_ahead(&self) -> usize {
        let units = self.source.units().max(1);
        let of = |facts: &SourceFacts| facts.stamps.iter().map(|stamp| stamp.size).sum::<u64>();
        let mean = (of(self.source.facts()) / units).max(1);
        ((AHEAD_BYTES / mean) as usize).clamp(2 * REQUESTS, 1 << 16)
    }

    fn range(&self, unit: u64) -> Option<ByteRange> {
        self.source.describe(unit).range
    }

    /// Returns the units around `unit` that are read with the same request, in the sequence of the file. `next` and
    /// `before` return the wanted unit after and before a unit.
    pub(crate) fn neighbors(
        &self,
        unit: u64,
        next: &dyn Fn(u64) -> Option<u64>,
        before: &dyn Fn(u64) -> Option<u64>,
    ) -> Neighbors {
        let mut units = std::collections::VecDeque::from([unit]);
        let Some(mut all) = self.range(unit) else {
            return Neighbors { units, bytes: 0 };
        };
        let mut last = unit;
        while let Some(unit) = next(last)
            && let Some(joined) = self.range(unit).and_then(|range| joined(all, range))
        {
            (all, last) = (joined, unit);
            units.push_back(unit);
        }
        let mut first = unit;
        while let Some(unit) = before(first)
            && let Some(joined) = self.range(unit).and_then(|range| joined(range, all))
        {
            (all, first) = (joined, unit);
            units.push_front(unit);
        }
        Neighbors { units, bytes: all.len }
    }

    /// Reads units that are neighbors with one request.
    pub(crate) fn read(&self, units: &[u64], cancelled: &dyn Fn() -> bool) -> Vec<Result<Fetched>> {
        match self.read_all(units, cancelled) {
            Ok(all) => all.into_iter().map(Ok).collect(),
            Err(error) => units.iter().map(|_| Err(error.clone())).collect(),
        }
    }

    fn read_all(&self, units: &[u64], cancelled: &dyn Fn() -> bool) -> Result<Vec<Fetched>> {
        let pool = self.memory.buffers();
        let ranges: Vec<ByteRange> = units.iter().filter_map(|&unit| self.range(unit)).collect();
        let (Some(first), Some(last)) = (ranges.first(), ranges.last()) else {
            return Ok(units.iter().map(|_| Fetched::Nothing).collect());
        };
        let whole = ByteRange {
            len: last.offset + last.len - first.offset,
            ..*first
        };
        let bytes = self.files.read_until(whole, pool, cancelled)?;
        if let [_] = units {
            return Ok(vec![Fetched::Bytes(bytes)]);
        }
        let part = |range: &ByteRange| {
            let start = (range.offset - first.offset) as usize;
            let mut part = pool.take(range.len as usize)?;
            let found = bytes.get(start..start + range.len as usize);
            let found = found.ok_or_else(|| Error::new(ErrorKind::Internal, "ranges of a request aren't in sequence"))?;
            part.copy_from_slice(found);
            Ok(Fetched::Bytes(part))
        };
        let parts = ranges.iter().map(part).collect();
        pool.put(bytes);
        parts
    }
}

/// Units that are read with one request.
pub(crate) struct Neighbors {
    /// The units, in the sequence of the file.
    pub(crate) units: std::collections::VecDeque<u64>,
    /// Bytes of the request.
    pub(crate) bytes: u64,
}

/// Returns the range from the start of `first` to the end of `second` if one request should read both.
fn joined(first: ByteRange, second: ByteRange) -> Option<ByteRange> {
    let gap = second.offset.checked_sub(first.offset.checked_add(first.len)?)?;
    let len = first.len + gap + second.len;
    let fits = first.location == second.location && gap <= (first.len + second.len) / GAP && len <= REQUEST_BYTES;
    fits.then_some(ByteRange { len, ..first })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(location: u32, offset: u64, len: u64) -> ByteRange {
        ByteRange { location, offset, len }
    }

    #[test]
    fn near_ranges_of_a_file_are_joined() {
        let first = range(1, 100, 1000);
        assert_eq!(joined(first, range(1, 1100, 50)), Some(range(1, 100, 1050)));
        assert_eq!(joined(first, range(1, 1150, 50)), Some(range(1, 100, 1100)));
        assert_eq!(joined(first, range(1, 1200, 50)), None, "the gap is too large");
        assert_eq!(joined(first, range(2, 1100, 50)), None, "another file");
        assert_eq!(joined(first, range(1, 500, 50)), None, "not after the first");
        assert_eq!(joined(first, range(1, 1100, REQUEST_BYTES)), None, "too long");
    }
}
