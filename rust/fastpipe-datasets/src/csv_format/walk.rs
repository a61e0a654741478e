//! The walk through a CSV file that finds its rows.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use fastpipe_batch::{Error, ErrorKind, ReadAt, Result, try_filled};
use fastpipe_csv::{CHUNK_BYTES, CsvChunk, Cut, Joining, Lines, MOST_ROW_BYTES, NullSearch, scan};
use fastpipe_files::CompressedText;

use super::file_window::FileWindow;
use super::{CsvHeader, of_text};

/// Bytes that are scanned at once, few enough to stay in the processor's cache.
const PIECE: u64 = 256 << 10;

/// Initial number of bytes to read after them to find the end of the last line.
const SLACK: u64 = 4 << 10;

/// Bytes of a file that each thread scans before the scan checks whether it began at the start of a row.
const REGION: u64 = 8 << 20;

/// A walk through a file. Regions of the file are scanned in parallel, and joined if one ends at the row with which the
/// next begins.
pub(super) struct Walk<'w> {
    pub(super) file: &'w dyn ReadAt,
    /// The text of the file, if it is compressed.
    pub(super) compressed: Option<CompressedText<'w>>,
    /// The file's header, which receives the results.
    pub(super) header: &'w CsvHeader,
    pub(super) lines: Lines,
    /// Nulls found before the next row, if nulls are searched for.
    pub(super) nulls: Option<NullSearch>,
    /// Size of the text in bytes, or `u64::MAX` until its end has been reached.
    pub(super) size: AtomicU64,
    pub(super) window: FileWindow,
    /// Position of the next row.
    pub(super) at: u64,
    pub(super) threads: usize,
    pub(super) joining: Joining,
    pub(super) failed: Option<Error>,
}

/// The result of scanning a region.
struct Region {
    start: u64,
    /// Starts of groups of rows in the file, and the numbers of rows and skipped rows of each.
    cuts: Vec<(u64, u32, u32)>,
    /// Position of the row after the region.
    next: u64,
    nulls: Option<NullSearch>,
}

impl Walk<'_> {
    /// Returns the text to scan.
    fn text(&self) -> &dyn ReadAt {
        match &self.compressed {
            Some(text) => text,
            None => self.file,
        }
    }

    fn size(&self) -> u64 {
        self.size.load(Ordering::Relaxed)
    }

    /// Scans the next regions.
    fn scan_regions(&mut self) -> Result<()> {
        let ends: Vec<u64> = (1..=self.threads as u64)
            .map(|i| self.at.saturating_add(i * REGION).min(self.size()))
            .collect();
        // Contains bytes read past the end of the last region.
        let mut window = std::mem::take(&mut self.window);
        let mut regions: Vec<Option<Result<Region>>> = Vec::new();
        std::thread::scope(|scope| {
            let this = &*self;
            let later: Vec<_> = ends
                .windows(2)
                .filter(|pair| pair[0] < pair[1])
                .map(|pair| {
                    let &[start, end] = pair else { return None };
                    let builder = std::thread::Builder::new().name("fastpipe-scan".to_owned());
                    // If the system can't start more threads, this thread scans the region later.
                    builder.spawn_scoped(scope, move || this.guess(start, end)).ok()
                })
                .collect();
            regions.push(Some(this.region(&mut window, this.at, ends[0])));
            let join = |handle: std::thread::ScopedJoinHandle<'_, Result<Region>>| {
                handle.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))
            };
            regions.extend(later.into_iter().map(|handle| handle.map(join)));
        });
        for (number, (region, &end)) in regions.into_iter().zip(&ends).enumerate() {
            let region = match region {
                Some(Err(error)) if number == 0 => return Err(error),
                Some(Ok(region)) if region.start == self.at => region,
                // A region that began at a wrong position is discarded, even if its scan failed.
                _ if self.at >= end => continue,
                _ => self.region(&mut window, self.at, end)?,
            };
            self.at = region.next;
            if let (Some(nulls), Some(behind)) = (&mut self.nulls, &region.nulls) {
                nulls.add(behind);
            }
            for (offset, rows, skipped) in region.cuts {
                let pushed = self.joining.push(offset, rows, skipped);
                pushed.map_err(|e| self.located(e))?;
            }
        }
        self.window = window;
        Ok(())
    }

    /// Scans a region under the assumption that a row starts after its first newline.
    fn guess(&self, start: u64, end: u64) -> Result<Region> {
        let mut bytes = try_filled(0, PIECE as usize, "a part of a file")?;
        // Start one byte earlier, because that byte may be the newline.
        let mut at = start - 1;
        while at < end {
            let want = (end - at).min(PIECE) as usize;
            let found = self.file.read_at(at, &mut bytes[..want])?;
            if let Some(newline) = memchr::memchr(b'\n', &bytes[..found]) {
                return self.region(&mut FileWindow::default(), at + newline as u64 + 1, end);
            }
            if found == 0 {
                break;
            }
            at += found as u64;
        }
        // A row that began before the region extends past its end.
        Ok(Region {
            start: end,
            cuts: Vec::new(),
            next: end,
            nulls: None,
        })
    }

    /// Finds the rows that start within `start..end`. The first row must start at `start`.
    fn region(&self, window: &mut FileWindow, start: u64, end: u64) -> Result<Region> {
        let mut region = Region {
            start,
            cuts: Vec::new(),
            next: start,
            nulls: self.nulls.clone(),
        };
        let mut piece = PIECE;
        while region.next < end.min(self.size()) {
            let at = region.next;
            let until = if piece > PIECE { at + piece } else { end.min(at + piece) }.min(self.size());
            let len = self.read_line(window, at, until)?;
            let found = scan(
                &window.bytes()[..len],
                at,
                &self.lines,
                CHUNK_BYTES,
                region.nulls.as_mut(),
            );
            if found.open == Some(0) || found.open.is_some_and(|_| found.cuts.iter().all(|cut| cut.rows == 0)) {
                // The buffer contains only one row, and its end is missing.
                let whole = at + len as u64 == self.size();
                if whole || piece > MOST_ROW_BYTES {
                    return Err(self.unclosed(at + found.open.unwrap_or(0) as u64, whole));
                }
                piece *= 2;
                continue;
            }
            let placed = |cut: &Cut| (at + cut.start as u64, cut.rows, cut.skipped);
            region.cuts.extend(found.cuts.iter().map(placed));
            region.next = at + found.open.unwrap_or(len) as u64;
            piece = PIECE;
        }
        Ok(region)
    }

    /// Reads from `at` to the end of the line that contains the byte before `until`. Returns the number of bytes. A
    /// line may be as long as a row, but not longer.
    fn read_line(&self, window: &mut FileWindow, at: u64, until: u64) -> Result<usize> {
        let (mut slack, last) = (SLACK, (until - at).saturating_sub(1) as usize);
        loop {
            let want = ((until + slack).min(self.size()) - at) as usize;
            let found = window.read(self.text(), at, want)?;
            if found < want && self.size() == u64::MAX {
                self.size.store(at + found as u64, Ordering::Relaxed);
                continue;
            }
            if found < want {
                let reason =
                    "the file became shorter while its rows were located: start again when no process writes to it";
                return Err(Error::new(ErrorKind::Storage, reason).at_path(self.file.location()));
            }
            if let Some(newline) = memchr::memchr(b'\n', &window.bytes()[last.min(found)..found]) {
                return Ok(last + newline + 1);
            }
            if want as u64 > MOST_ROW_BYTES + 2 * PIECE && slack > PIECE {
                return Err(self.unclosed(at, false));
            }
            if at + want as u64 == self.size() {
                return Ok(found);
            }
            slack *= 4;
        }
    }

    /// Returns the error for a row without an end, either at the end of the text or because the row is too long.
    #[cold]
    fn unclosed(&self, at: u64, whole: bool) -> Error {
        let reason = if whole {
            "a row ends within quotes: the file is cut short, or has a stray quote. quote=None reads quotes as ordinary characters"
                .to_owned()
        } else {
            format!(
                "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None reads quotes as ordinary characters"
            )
        };
        let error = Error::new(if whole { ErrorKind::Malformed } else { ErrorKind::Limit }, reason).at_offset(at);
        self.located(error)
    }

    /// Adds the file's path, and the context of the text if it is compressed.
    fn located(&self, error: Error) -> Error {
        let error = if self.compressed.is_some() {
            of_text(error)
        } else {
            error
        };
        error.at_path(self.file.location())
    }

    /// Finishes the last chunk and stores the results.
    fn end(&mut self) -> Result<()> {
        if let Some(layout) = self.compressed.as_ref().and_then(CompressedText::take_layout) {
            self.header.layout.get_or_init(|| Arc::new(layout));
        }
        *self.header.nulls() = self.nulls.as_ref().map(|nulls| nulls.found().clone());
        self.joining.end(self.size()).map_err(|e| self.located(e))
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<CsvChunk>;

    fn next(&mut self) -> Option<Result<CsvChunk>> {
        loop {
            if let Some(chunk) = self.joining.pop() {
                return Some(Ok(chunk));
            }
            if let Some(error) = self.failed.take() {
                (self.at, self.size) = (0, AtomicU64::new(0));
                (self.joining, self.compressed) = (Joining::default(), None);
                return Some(Err(error));
            }
            let ended = self.at >= self.size();
            self.failed = if ended { self.end() } else { self.scan_regions() }.err();
            if ended && self.failed.is_none() {
                return self.joining.pop().map(Ok);
            }
        }
    }
}
