//! Ranges of remote files, of which neighbors are read with one request.

use std::collections::VecDeque;
use std::sync::Arc;

use fastpipe_batch::{ByteRange, Error, ErrorKind, Fetched, Result, Source, SourceFacts};
use fastpipe_files::{Files, joined};

use crate::memory::Memory;

/// Maximum number of requests at once.
pub(crate) const REQUESTS: usize = 512;

/// Bytes of units that are requested or waiting before they are needed.
const AHEAD_BYTES: u64 = 128 << 20;

/// The units of a source, as ranges of its files.
pub(crate) struct Ranges {
    source: Arc<dyn Source>,
    files: Arc<Files>,
    memory: Arc<Memory>,
}

impl Ranges {
    /// Returns the ranges of a source, if some of its files are remote.
    pub(crate) fn of(source: &Arc<dyn Source>, files: &Arc<Files>, memory: &Arc<Memory>) -> Option<Ranges> {
        let facts = source.facts();
        facts.are_remote().then(|| Ranges {
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
        ((AHEAD_BYTES / mean) as usize).clamp(4, 1 << 16)
    }

    /// Returns the range of a unit. `None` if the source fetches it.
    fn range(&self, unit: u64) -> Option<ByteRange> {
        let is_range = !self.source.is_fetched(unit);
        is_range.then(|| self.source.describe(unit).range).flatten()
    }

    /// Returns the units around `unit` that are read with the same request, in the sequence of the file. `next` and
    /// `before` return the wanted unit after and before a unit.
    pub(crate) fn neighbors(
        &self,
        unit: u64,
        next: &dyn Fn(u64) -> Option<u64>,
        before: &dyn Fn(u64) -> Option<u64>,
    ) -> Neighbors {
        let mut units = VecDeque::from([unit]);
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
        let ranges: Vec<ByteRange> = units.iter().filter_map(|&unit| self.range(unit)).collect();
        if ranges.len() < units.len() {
            return Err(Error::new(ErrorKind::Internal, "a unit of a remote file has no range"));
        }
        let read = self.files.read_joined(&ranges, self.memory.buffers(), cancelled)?;
        Ok(read.into_iter().map(Fetched::Bytes).collect())
    }
}

/// Units that are read with one request.
pub(crate) struct Neighbors {
    /// The units, in the sequence of the file.
    pub(crate) units: VecDeque<u64>,
    /// Bytes of the request.
    pub(crate) bytes: u64,
}
