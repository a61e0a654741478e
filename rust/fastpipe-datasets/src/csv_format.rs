//! CSV as a format that files are opened in: where `fastpipe-csv` meets `fastpipe-files`.

mod file_window;

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};

use fastpipe_batch::{BufferPool, Error, ErrorKind, ReadAt, Result, try_filled};
use fastpipe_csv::{
    Cut, Dialect, FirstNulls, Header, Indexed, Joining, Lines, MOST_ROW_BYTES, NullSearch, STRETCH_BYTES, Stretch,
    decode_front, decode_index, encode_index, scan,
};
use fastpipe_files::{CompressedText, Compression, Extent, Format, Layout, Packed};

use self::file_window::FileWindow;

/// What positions of compressed files count, but for those of damage.
pub(crate) const TEXT: &str = "decompressed text";

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
    /// Whether its rows are looked for.
    scans: bool,
    /// Whether nulls are, too.
    seeks_nulls: bool,
}

impl CsvFormat {
    /// Files whose rows are found by this many threads each, and which of their columns have nulls, if that is asked.
    pub(crate) fn new(dialect: Dialect, threads: usize, seeks_nulls: bool) -> CsvFormat {
        CsvFormat {
            tag: dialect.tag(),
            dialect,
            threads: threads.max(1),
            scans: true,
            seeks_nulls,
        }
    }

    /// Files of which the headers are read, and no rows are looked for.
    pub(crate) fn unscanned(dialect: Dialect) -> CsvFormat {
        CsvFormat {
            scans: false,
            ..CsvFormat::new(dialect, 1, false)
        }
    }
}

/// What is known of a file before its rows are found. Once they are: which columns have nulls, if that was asked; and
/// of a compressed file where decompressing can begin.
pub(crate) struct CsvHeader {
    pub(crate) header: Header,
    compression: Option<Compression>,
    layout: OnceLock<Arc<Layout>>,
    nulls: Mutex<Option<FirstNulls>>,
}

impl CsvHeader {
    /// How a file whose rows were found is compressed, if it is.
    pub(crate) fn packed(&self) -> Option<Packed> {
        let layout = self.layout.get()?.clone();
        self.compression.map(|compression| Packed { compression, layout })
    }

    /// Where the columns have nulls, if these were searched for.
    pub(crate) fn nulls(&self) -> MutexGuard<'_, Option<FirstNulls>> {
        // Nobody panics while it is held.
        self.nulls.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The stretches out of an index, whose nulls are kept; `None` if they are asked for, and the index lacks them.
    fn take(&self, found: Option<Indexed>, seeks_nulls: bool) -> Option<Vec<Stretch>> {
        let (stretches, nulls) = found?;
        if seeks_nulls && nulls.is_none() {
            return None;
        }
        *self.nulls() = nulls;
        Some(stretches)
    }
}

impl Format for CsvFormat {
    type Header = CsvHeader;
    type Block = Stretch;
    /// The stretches of a few megabytes.
    const BLOCKS_AT_ONCE: usize = 64;
    const WALK_READS_ALL: bool = true;

    fn cache_tag(&self) -> &[u8] {
        &self.tag
    }

    fn read_header(&self, path: &Arc<str>, file: &dyn ReadAt) -> Result<CsvHeader> {
        let mut start = [0; Compression::MAGIC_BYTES];
        let found = file.read_at(0, &mut start)?;
        let compression = Compression::of(&start[..found]);
        if compression.is_some() && !self.scans {
            let reason = "a row that stands at some byte can't be found in a compressed file: method=\"exact\" finds all rows \
                          first, and method=\"stream\" takes what `gunzip -c` or `zstd -dc` writes";
            return Err(Error::new(ErrorKind::Unsupported, reason).at_path(path));
        }
        let header = match compression {
            None => Header::read(file, &self.dialect),
            Some(compression) => {
                let text = CompressedText::new(file, compression);
                Header::read_compressed(file, &text, &self.dialect).map_err(of_text)
            }
        };
        Ok(CsvHeader {
            header: header.map_err(|e| e.at_path(path))?,
            compression,
            layout: OnceLock::new(),
            nulls: Mutex::default(),
        })
    }

    fn first_block(&self, header: &CsvHeader) -> u64 {
        header.header.first
    }

    fn walk<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w CsvHeader,
    ) -> Result<impl Iterator<Item = Result<Stretch>> + 'w> {
        self.walk_from(file, header, header.header.first)
    }

    fn walk_from<'w>(
        &'w self,
        file: &'w dyn ReadAt,
        header: &'w CsvHeader,
        from: u64,
    ) -> Result<impl Iterator<Item = Result<Stretch>> + 'w> {
        let compressed = header.compression.map(|how| CompressedText::new(file, how));
        // An index that has nulls keeps them, whoever makes it longer. Those of one that was dismissed are nobody's.
        let known = header.nulls().take().filter(|_| from > header.header.first);
        let front = known.or(self.seeks_nulls.then(FirstNulls::new));
        Ok(Walk {
            // How much text there is shows at its end.
            size: AtomicU64::new(if compressed.is_some() {
                u64::MAX
            } else {
                header.header.size
            }),
            // It is decompressed in sequence.
            threads: if compressed.is_some() { 1 } else { self.threads },
            compressed,
            file,
            lines: Lines::new(&self.dialect, header.header.names.len()),
            nulls: front.map(|front| NullSearch::new(&self.dialect, header.header.names.len(), front)),
            at: if self.scans { from } else { header.header.size },
            window: FileWindow::default(),
            joining: Joining::default(),
            failed: None,
            header,
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
        header: &CsvHeader,
        number: u64,
        stretch: &Stretch,
        stored: &[u8],
        _: &BufferPool,
    ) -> Result<()> {
        let found = scan(
            stored,
            stretch.offset,
            &Lines::new(&self.dialect, header.header.names.len()),
            STRETCH_BYTES,
            None,
        );
        if stored.len() != stretch.len as usize || found.open.is_some() || found.cuts.iter().any(|cut| cut.rows > 0) {
            let reason = "it has a stretch without rows that isn't there";
            return Err(Error::new(ErrorKind::Malformed, reason).at_block(number, stretch.offset));
        }
        Ok(())
    }

    fn encode(&self, header: &CsvHeader, stretches: &[Stretch]) -> Result<Vec<u8>> {
        let index = encode_index(&header.header, stretches, header.nulls().as_ref());
        match header.layout.get() {
            None => Ok(index),
            Some(layout) => Ok([layout.encode()?, index].concat()),
        }
    }

    fn decode(&self, header: &CsvHeader, index: &[u8], size: u64) -> Result<Option<Vec<Stretch>>> {
        if header.compression.is_none() {
            return Ok(header.take(decode_index(index, &header.header, size)?, self.seeks_nulls));
        }
        let (layout, index) = Layout::decode(index, size)?;
        let stretches = header.take(decode_index(index, &header.header, layout.size())?, self.seeks_nulls);
        // To see that there are no rows in a stretch, all in front of it would have to be decompressed: then the rows
        // can be looked for as well. Hardly any file has a megabyte without one.
        let stretches = stretches.filter(|stretches| stretches.iter().all(|stretch| stretch.rows > 0));
        if stretches.is_some() {
            header.layout.get_or_init(|| Arc::new(layout));
        }
        Ok(stretches)
    }

    fn decode_front(&self, file: &dyn ReadAt, header: &CsvHeader, index: &[u8]) -> Result<Option<Vec<Stretch>>> {
        match header.compression {
            None => Ok(header.take(decode_front(index, &header.header, file)?, self.seeks_nulls)),
            // What was appended to it may be anything, and isn't looked at.
            Some(_) => Ok(None),
        }
    }
}

/// An error that was met in the text of a compressed file, or in decompressing it: that names the file, and a byte of
/// it.
pub(crate) fn of_text(error: Error) -> Error {
    match error.location().path {
        Some(_) => error,
        None => error.with_offset_within(TEXT),
    }
}

/// A walk through a file: regions of it are scanned at once, and joined where one ends at the row that the next begins
/// with.
struct Walk<'w> {
    file: &'w dyn ReadAt,
    /// What is in it, if it is compressed.
    compressed: Option<CompressedText<'w>>,
    /// That of the file, which what is found is noted in.
    header: &'w CsvHeader,
    lines: Lines,
    /// What was found in front of the next row, if nulls are searched for.
    nulls: Option<NullSearch>,
    /// Bytes of text; the largest number until its end is met.
    size: AtomicU64,
    window: FileWindow,
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
    nulls: Option<NullSearch>,
}

impl Walk<'_> {
    /// The bytes that rows are looked for in.
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
        // What was read behind the last region.
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
                    // Where the system has no more threads, this one does it afterwards.
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
                // What was begun at another byte says nothing, not even by an error.
                _ if self.at >= end => continue,
                _ => self.region(&mut window, self.at, end)?,
            };
            self.at = region.next;
            if let (Some(nulls), Some(behind)) = (&mut self.nulls, &region.nulls) {
                nulls.add(behind);
            }
            for (offset, rows) in region.cuts {
                let pushed = self.joining.push(offset, rows);
                pushed.map_err(|e| self.located(e))?;
            }
        }
        self.window = window;
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
                return self.region(&mut FileWindow::default(), at + newline as u64 + 1, end);
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
            nulls: None,
        })
    }

    /// Finds the rows that begin from `start` on, which is the first of them, and in front of `end`.
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
                STRETCH_BYTES,
                region.nulls.as_mut(),
            );
            if found.open == Some(0) || found.open.is_some_and(|_| found.cuts.iter().all(|cut| cut.rows == 0)) {
                // One row, and no end of it.
                let whole = at + len as u64 == self.size();
                if whole || piece > MOST_ROW_BYTES {
                    return Err(self.unclosed(at + found.open.unwrap_or(0) as u64, whole));
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

    /// Reads from `at` to the end of the line that has the byte in front of `until`. Returns how many bytes that are; a
    /// line has no more than a row may.
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
                    "the file became shorter while its rows were looked for: start again, once nobody writes to it";
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

    /// The error for a row that doesn't end, where the text does or where it is too long.
    #[cold]
    fn unclosed(&self, at: u64, whole: bool) -> Error {
        let reason = if whole {
            "a row ends within quotes: the file is cut short, or a quote isn't one; quote=None takes quotes as they stand"
                .to_owned()
        } else {
            format!(
                "a row has more than {MOST_ROW_BYTES} bytes: is a quote never closed? quote=None takes quotes as they stand"
            )
        };
        let error = Error::new(if whole { ErrorKind::Malformed } else { ErrorKind::Limit }, reason).at_offset(at);
        self.located(error)
    }

    /// An error at a byte of the text.
    fn located(&self, error: Error) -> Error {
        let error = if self.compressed.is_some() {
            of_text(error)
        } else {
            error
        };
        error.at_path(self.file.location())
    }

    /// Ends the last stretch.
    fn end(&mut self) -> Result<()> {
        if let Some(layout) = self.compressed.as_ref().and_then(CompressedText::take_layout) {
            self.header.layout.get_or_init(|| Arc::new(layout));
        }
        *self.header.nulls() = self.nulls.as_ref().map(|nulls| nulls.found().clone());
        self.joining.end(self.size()).map_err(|e| self.located(e))
    }
}

impl Iterator for Walk<'_> {
    type Item = Result<Stretch>;

    fn next(&mut self) -> Option<Result<Stretch>> {
        loop {
            if let Some(stretch) = self.joining.pop() {
                return Some(Ok(stretch));
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
