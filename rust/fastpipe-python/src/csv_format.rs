//! CSV as a format that files are opened in: where `fastpipe-csv` meets `fastpipe-files`.

use std::sync::Arc;

use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, Result, try_filled};
use fastpipe_csv::{
    Cut, Dialect, Header, Joining, Lines, MOST_ROW_BYTES, STRETCH_BYTES, Stretch, decode_front, decode_index,
    encode_index, scan,
};
use fastpipe_files::{Extent, Format};

/// Bytes that are scanned at once: they stay in a cache of the processor.
const PIECE: u64 = 256 << 10;

/// Bytes behind them that are read for the end of their last line.
const SLACK: u64 = 4 << 10;

/// Bytes of a file that each thread scans before it is seen whether it began at a row.
const REGION: u64 = 8 << 20;

/// CSV files of one dialect.
pub(crate) struct CsvFormat {
    dialect: Dialect,
    tag: Vec<u8>,
    /// Threads that scan a file.
    threads: usize,
}

impl CsvFormat {
    pub(crate) fn new(dialect: Dialect, threads: usize) -> CsvFormat {
        CsvFormat {
            tag: dialect.tag(),
            dialect,
            threads: threads.max(1),
        }
    }
}

impl Format for CsvFormat {
    type Header = Header;
    type Block = Stretch;
    /// The stretches of a few megabytes.
    const BLOCKS_AT_ONCE: usize = 64;

    fn cache_tag(&self) -> &[u8] {
        &self.tag
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<Header> {
        Header::read(file, &self.dialect).map_err(|e| e.at_path(path))
    }

    fn first_block(&self, header: &Header) -> u64 {
        header.first
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Header,
    ) -> Result<impl Iterator<Item = Result<Stretch>> + 'w> {
        self.walk_from(file, header, header.first)
    }

    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w Header,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Stretch>> + 'w> {
        Ok(Walk {
            file,
            lines: Lines::new(&self.dialect, header.names.len()),
            size: header.size,
            at: from,
            threads: self.threads,
            joining: Joining::default(),
            failed: None,
        })
    }

    fn extent(&self, stretch: &Stretch) -> Extent {
        Extent {
            offset: stretch.offset,
            len: stretch.len.into(),
            rows: stretch.rows,
        }
    }

    fn check_empty(
        &self,
        header: &Header,
        number: u64,
        stretch: &Stretch,
        stored: &[u8],
        _: &BufferPool,
    ) -> Result<()> {
        let found = scan(
            stored,
            stretch.offset,
            &Lines::new(&self.dialect, header.names.len()),
            STRETCH_BYTES,
        );
        if stored.len() != stretch.len as usize || found.open.is_some() || found.cuts.iter().any(|cut| cut.rows > 0) {
            let reason = "it has a stretch without rows that isn't there";
            return Err(Error::new(ErrorKind::Malformed, reason).at_block(number, stretch.offset));
        }
        Ok(())
    }

    fn encode(&self, header: &Header, stretches: &[Stretch]) -> Result<Vec<u8>> {
        Ok(encode_index(header, stretches))
    }

    fn decode(&self, header: &Header, index: &[u8], size: u64) -> Result<Option<Vec<Stretch>>> {
        decode_index(index, header, size)
    }

    fn decode_front(&self, file: &dyn ReadAt, header: &Header, index: &[u8]) -> Result<Option<Vec<Stretch>>> {
        decode_front(index, header, file)
    }
}

/// A walk through a file: regions of it are scanned at once, and joined where one ends at the row that the next begins with.
struct Walk<'w> {
    file: &'w dyn ReadAt,
    lines: Lines,
    size: u64,
    /// The next row.
    at: u64,
    threads: usize,
    joining: Joining,
    failed: Option<Error>,
}

/// What was found in a region.
struct Region {
    start: u64,
    /// Where rows begin in the file, and how many.
    cuts: Vec<(u64, u32)>,
    /// The row behind it.
    next: u64,
}

impl Walk<'_> {
    /// Scans the next regions.
    fn scan_regions(&mut self) -> Result<()> {
        let ends: Vec<u64> = (1..=self.threads as u64)
            .map(|i| self.at.saturating_add(i * REGION).min(self.size))
            .collect();
        let mut regions: Vec<Option<Result<Region>>> = Vec::new();
        std::thread::scope(|scope| {
            let this = &*self;
            let later: Vec<_> = ends
                .windows(2)
                .filter(|pair| pair[0] < pair[1])
                .map(|pair| {
                    let &[start, end] = pair else { return None };
                    let builder = std::thread::Builder::new().name("fastpipe-scan".to_owned());
                    // Where the system has no more threads, this one does it afterwards.
                    builder.spawn_scoped(scope, move || this.guess(start, end)).ok()
                })
                .collect();
            regions.push(Some(this.region(this.at, ends[0])));
            let join = |handle: std::thread::ScopedJoinHandle<'_, Result<Region>>| {
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            regions.extend(later.into_iter().map(|handle| handle.map(join)));
        });
        for (number, (region, &end)) in regions.into_iter().zip(&ends).enumerate() {
            let region = match region {
                Some(Err(error)) if number == 0 => return Err(error),
                Some(Ok(region)) if region.start == self.at => region,
                // What was begun at another byte says nothing, not even by an error.
                _ if self.at >= end => continue,
                _ => self.region(self.at, end)?,
            };
            self.at = region.next;
            for (offset, rows) in region.cuts {
                self.joining
                    .push(offset, rows)
                    .map_err(|e| e.at_path(self.file.location()))?;
            }
        }
        Ok(())
    }

    /// What is found in a region if a row starts behind the first newline there.
    fn guess(&self, start: u64, end: u64) -> Result<Region> {
        let mut bytes = try_filled(0, PIECE as usize, "a piece of a file")?;
        // From the byte in front of it on, which may be that newline.
        let mut at = start - 1;
        while at < end {
            let want = (end - at).min(PIECE) as usize;
            let found = self.file.read_at(at, &mut bytes[..want])?;
            if let Some(newline) = memchr::memchr(b'\n', &bytes[..found]) {
                return self.region(at + newline as u64 + 1, end);
            }
            if found == 0 {
                break;
            }
            at += found as u64;
        }
        // A row that begins before it ends behind it.
        Ok(Region {
            start: end,
            cuts: Vec::new(),
            next: end,
        })
    }

    /// Finds the rows that begin from `start` on, which is the first of them, and in front of `end`.
    fn region(&self, start: u64, end: u64) -> Result<Region> {
        let mut region = Region {
            start,
            cuts: Vec::new(),
            next: start,
        };
        let (mut bytes, mut piece) = (Vec::new(), PIECE);
        while region.next < end {
            let at = region.next;
            let until = if piece > PIECE { at + piece } else { end.min(at + piece) }.min(self.size);
            let len = self.read_line(&mut bytes, at, until)?;
            let found = scan(&bytes[..len], at, &self.lines, STRETCH_BYTES);
            if found.open == Some(0) || found.open.is_some_and(|_| found.cuts.iter().all(|cut| cut.rows == 0)) {
                // One row, and no end of it.
                let whole = at + len as u64 == self.size;
                if whole || piece > MOST_ROW_BYTES {
                    return Err(unclosed(at + found.open.unwrap_or(0) as u64, whole).at_path(self.file.location()));
                }
                piece *= 2;
                continue;
            }
            let placed = |cut: &Cut| (at + cut.start as u64, cut.rows);
            region.cuts.extend(found.cuts.iter().map(placed));
            region.next = at + found.open.unwrap_or(len) as u64;
            piece = PIECE;
        }
        Ok(region)
    }

    /// Reads from `at` to the end of the line that has the byte in front of `until`. Returns how many bytes that are; a line
    /// has no more than a row may.
    fn read_line(&self, bytes: &mut Vec<u8>, at: u64, until: u64) -> Result<usize> {
        let (mut slack, last) = (SLACK, (until - at).saturating_sub(1) as usize);
        loop {
            let want = (until + slack).min(self.size) - at;
            if bytes.len() < want as usize {
                *bytes = try_filled(0, want as usize, "a piece of a file")?;
            }
            let found = self.file.read_at(at, &mut bytes[..want as usize])?;
            if found < want as usize {
                let reason =
                    "the file became shorter while its rows were looked for: start again, once nobody writes to it";
                return Err(Error::new(ErrorKind::Storage, reason).at_path(self.file.location()));
            }
            if let Some(newline) = memchr::memchr(b'\n', &bytes[last.min(found)..found]) {
                return Ok(last + newline + 1);
            }
            if want > MOST_ROW_BYTES + 2 * PIECE && slack > PIECE {
                return Err(unclosed(at, false).at_path(self.file.location()));
            }
            if at + want == self.size {
                return Ok(found);
            }
            slack *= 4;
        }
    }
}

#[cold]
fn unclosed(at: u64, whole: bool) -> Error {
    let reason = if whole {
        "a row ends within quotes: the file is cut short, or a quote isn't one; quote=None takes quotes as they stand"
            .to_owned()
    } else {
        format!(
            "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None takes quotes as they stand"
        )
    };
    Error::new(if whole { ErrorKind::Malformed } else { ErrorKind::Limit }, reason).at_offset(at)
}

impl Iterator for Walk<'_> {
    type Item = Result<Stretch>;

    fn next(&mut self) -> Option<Result<Stretch>> {
        loop {
            if let Some(stretch) = self.joining.pop() {
                return Some(Ok(stretch));
            }
            if let Some(error) = self.failed.take() {
                (self.at, self.joining) = (self.size, Joining::default());
                return Some(Err(error));
            }
            let ended = self.at >= self.size;
            let scanned = match ended {
                true => self.joining.end(self.size).map_err(|e| e.at_path(self.file.location())),
                false => self.scan_regions(),
            };
            self.failed = scanned.err();
            if ended && self.failed.is_none() {
                return self.joining.pop().map(Ok);
            }
        }
    }
}
