//! CSV files, compressed or not, as a source whose units are fetched. Separate threads decompress the text.

use std::ops::Range;
use std::sync::Arc;

use fastpipe_batch::{
    BufferPool, Error, ErrorKind, Fetched, Pass, Result, Row, Sink, Source, SourceFacts, Unit, UnitInfo, Unpicked,
};
use fastpipe_csv::{CHUNK_BYTES, CsvChunk, CsvSource};
use fastpipe_files::{Layout, MOST_GAP, Packed, TextFiles};

use crate::csv_format::TEXT;

/// Maximum average number of chunks between two restart points. A random read of a chunk decompresses and discards half
/// of that distance on average.
const IN_A_GAP: u64 = 16;

/// A set of CSV files that may be compressed. Each pass needs its own decoders: see [`CompressedCsv::again`].
pub struct CompressedCsv {
    source: Arc<CsvSource>,
    packed: Arc<[Option<Packed>]>,
    texts: TextFiles,
    facts: SourceFacts,
    threads: usize,
}

impl CompressedCsv {
    /// Creates the source. `packed` has an entry for each file, and up to `threads` threads decompress text.
    pub(crate) fn new(source: Arc<CsvSource>, packed: Arc<[Option<Packed>]>, threads: usize) -> CompressedCsv {
        let mut made = CompressedCsv {
            texts: TextFiles::of(source.facts(), packed.clone()),
            facts: source.facts().clone(),
            source,
            packed,
            threads,
        };
        // If a file has no restart points, its units are fetched one by one. Two concurrent fetches would each
        // decompress all of the text before.
        made.facts.fetches = match made.in_one_piece() {
            Some(_) => 1,
            None => threads.max(1),
        };
        made
    }

    /// Returns a source of the same files with separate decoders.
    pub fn again(&self) -> CompressedCsv {
        CompressedCsv::new(self.source.clone(), self.packed.clone(), self.threads)
    }

    /// Returns the compression of a unit's file, or `None` if it isn't compressed.
    fn packed(&self, unit: u64) -> Option<&Packed> {
        let range = self.source.describe(unit).range?;
        self.packed.get(range.location as usize)?.as_ref()
    }

    /// Returns a file that can only be read in sequence, if there is one.
    fn in_one_piece(&self) -> Option<(&Arc<str>, &Packed)> {
        let files = self.facts.locations.iter().zip(&*self.packed);
        let mut packed = files.filter_map(|(path, packed)| Some((path, packed.as_ref()?)));
        packed.find(|(_, packed)| !packed.layout.is_framed())
    }

    /// Returns the units to examine when inferring types. In a file that can only be read in sequence, these are the
    /// units at its start.
    pub(crate) fn at_hand(&self, most_bytes: u64) -> Vec<u64> {
        let packed = self.packed.iter().flatten();
        let in_one_piece = packed.filter(|packed| !packed.layout.is_framed()).count() as u64;
        let most = most_bytes / in_one_piece.max(1);
        let near = |unit: &u64| {
            let end = self
                .source
                .describe(*unit)
                .range
                .map_or(0, |range| range.offset + range.len);
            let is_first = self.source.place_of(*unit, 0).1 == 0;
            let framed = self.packed(*unit).is_none_or(|packed| packed.layout.is_framed());
            framed || end <= most || is_first
        };
        (0..self.source.units()).filter(near).collect()
    }
}

/// Merges adjacent chunks of a file, so that few chunks are between two restart points. The text before each chunk must
/// be decompressed when the chunk is read at random. If a file can only be read in sequence, its chunks stay the same.
pub(crate) fn joined(chunks: Vec<CsvChunk>, layout: &Layout) -> Vec<CsvChunk> {
    if !layout.is_framed() {
        return chunks;
    }
    let mut out: Vec<CsvChunk> = Vec::new();
    let (mut goal, mut full) = (0, true);
    for chunk in chunks {
        match out.last_mut() {
            Some(last) if !full && chunk.rows > 0 && last.rows > 0 => {
                last.len += chunk.len;
                last.rows += chunk.rows;
                last.skipped += chunk.skipped;
            }
            _ => {
                goal = (layout.gap(chunk.offset) / IN_A_GAP).max(CHUNK_BYTES as u64 / 2);
                out.push(chunk);
            }
        }
        full = out.last().is_some_and(|last| u64::from(last.len) >= goal);
    }
    out.shrink_to_fit();
    out
}

impl Source for CompressedCsv {
    fn facts(&self) -> &SourceFacts {
        &self.facts
    }

    fn units(&self) -> u64 {
        self.source.units()
    }

    fn describe(&self, unit: u64) -> UnitInfo {
        self.source.describe(unit)
    }

    fn check_random(&self) -> Result<()> {
        let Some((path, packed)) = self.in_one_piece() else {
            return Ok(());
        };
        let (how, parts) = (packed.compression.name(), packed.compression.parts());
        let reason = format!(
            "cannot read rows at random from a {how} file with {} bytes of text in one piece: shuffle=\"buffer\", \
             shuffle=False and samples read it in sequence. Or compress it in {parts} of at most {MOST_GAP} bytes with \
             `bgzip` or `pzstd`",
            packed.layout.widest_gap()
        );
        Err(Error::new(ErrorKind::Unsupported, reason).at_path(path))
    }

    fn follows(&self, unit: u64) -> bool {
        let location = |unit: u64| self.source.describe(unit).range.map(|range| range.location);
        self.packed(unit).is_some()
            && unit
                .checked_sub(1)
                .is_some_and(|before| location(before) == location(unit))
    }

    fn fetch(&self, unit: u64, cancelled: &dyn Fn() -> bool) -> Result<Fetched> {
        let range = self.source.describe(unit).range;
        let range = range.ok_or_else(|| Error::new(ErrorKind::Internal, "a chunk without bytes"))?;
        self.texts.read(range, cancelled).map(Fetched::Bytes)
    }

    fn open(&self, unit: u64, pass: Pass, fetched: Fetched, pool: &BufferPool) -> Result<Box<dyn Unit>> {
        self.source.open(unit, pass, fetched, pool)
    }

    fn pick(
        &self,
        units: &[&dyn Unit],
        rows: &[Row],
        slots: Range<usize>,
        out: &mut Sink<'_>,
    ) -> std::result::Result<(), Unpicked> {
        self.source.pick(units, rows, slots, out)
    }

    fn locate(&self, unit: u64, error: Error) -> Error {
        match self.packed(unit) {
            None => self.source.locate(unit, error),
            // The error refers to the compressed file, not to its text.
            Some(_) if error.location().path.is_some() => error.at_unit(unit),
            Some(_) => self.source.locate(unit, error).with_offset_within(TEXT),
        }
    }
}
