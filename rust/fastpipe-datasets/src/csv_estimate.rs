//! Random rows of CSV files that were not scanned.
//!
//! Each draw selects a byte uniformly. The row that contains the byte is taken if the byte is among its first `c`
//! bytes, where `c` is the minimum length of a row. Every row therefore has the same probability in each draw,
//! regardless of its length. The lengths of all selected rows, taken or not, yield an estimate of the number of rows
//! (M. H. Hansen, W. N. Hurwitz, On the theory of sampling from finite populations, 1943).

use std::collections::HashSet;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use fastpipe_batch::{Contents, Error, ErrorKind, FileStamp, Result, try_collect, try_filled, try_reserve};
use fastpipe_csv::{Dialect, Header, KeptRows, RowAt, Surroundings};
use fastpipe_files::{Halt, LogRecord, OnProgress, Opening, SourceFile, open_all};
use fastpipe_random::{Draws, Key, Purpose};

use crate::csv_files::CsvFiles;
use crate::csv_format::CsvFormat;
use crate::in_parallel::{Threads, in_parallel};

/// Minimum and maximum number of draws whose row lengths are used for the estimate.
const LEAST_LOOKS: u64 = 512;
const MOST_LOOKS: u64 = 8192;

/// Maximum number of draws in one round.
pub(crate) const MOST_DRAWS: u64 = 1 << 16;

/// Number of draws that a thread processes in one step.
const DRAWS: usize = 64;

/// Maximum number of draws as a multiple of the expected number. A factor of four suffices to draw nearly all rows
/// without replacement.
const PATIENCE: f64 = 4.0;

/// A standard normal variable is within this distance of 0 with a probability of 95 %.
pub(crate) const NORMAL: f64 = 1.959_963_984_540_054;

/// Number of standard errors beyond which an estimate counts as certain.
const CERTAIN: f64 = 6.0;

/// A file from which rows are drawn.
pub(crate) struct Drawn {
    path: Arc<str>,
    header: Header,
    stamp: FileStamp,
    /// Offset of its rows among the bytes of all files.
    pub(crate) start: u64,
    /// Position of its rows in the file.
    pub(crate) span: Range<u64>,
}

/// Files from which rows are drawn.
pub struct UnscannedCsv {
    pub(crate) dialect: Dialect,
    contents: Vec<Option<Contents>>,
    pub(crate) files: Vec<Drawn>,
    /// Total bytes of rows in all files.
    pub(crate) span: u64,
    /// Minimum number of bytes of a row.
    pub(crate) least: u64,
    pub(crate) threads: Threads,
}

/// The result of a draw.
#[derive(Default)]
pub(crate) struct Draw {
    /// Length of the row that contains the byte. 0 if there is none, or if the row wasn't examined.
    len: u64,
    /// The row, if it is taken.
    pub(crate) taken: Option<Taken>,
}

pub(crate) struct Taken {
    pub(crate) file: u32,
    pub(crate) offset: u64,
    text: Box<[u8]>,
}

/// An estimate of the number of rows, with its standard error.
#[derive(Clone, Copy)]
struct Estimate {
    rows: f64,
    error: f64,
}

/// Drawn rows, and an estimate of the number of rows in the files.
pub struct CsvDraw {
    /// The drawn rows. Each file is replaced by one in memory that contains only its drawn rows.
    pub rows: CsvFiles,
    /// Index of the file of each row.
    pub files: Vec<i64>,
    /// Position in the file where each row starts.
    pub offsets: Vec<i64>,
    /// Estimated number of rows in all files, and the bounds of its 95 % confidence interval.
    pub estimate: (f64, f64, f64),
}

impl UnscannedCsv {
    /// Opens files and reads only their headers. Also returns messages to log.
    ///
    /// # Errors
    /// The error of the first file that can't be opened; an error if a file is compressed; any error of `on_progress`.
    pub fn open<E: Send>(
        dialect: Dialect,
        paths: &[Arc<str>],
        how: Opening<'_>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<(UnscannedCsv, Vec<LogRecord>), Halt<E>> {
        let (found, failed) = open_all(&CsvFormat::unscanned(dialect.clone()), paths, how, on_progress)?;
        if let Some(error) = failed {
            return Err(error.into());
        }
        let mut notes = Vec::new();
        let mut all = UnscannedCsv {
            dialect,
            contents: how.contents.to_vec(),
            files: Vec::new(),
            span: 0,
            least: u64::MAX,
            threads: match how.are_remote() {
                true => Threads::Waiting,
                false => Threads::Computing(how.threads),
            },
        };
        let found: Vec<_> = found.into_iter().filter_map(|file| file.opened).enumerate().collect();
        let spans = in_parallel(all.threads, &found, on_progress, |(number, file), stopped| {
            let open = SourceFile::of(&file.path, all.contents_of(*number))?.stopped_by(stopped);
            let around = Surroundings::new(&open, &all.dialect, &file.header.header);
            Ok(around.map_err(|e| e.at_path(&file.path))?.span())
        })?;
        for ((_, file), bytes) in found.into_iter().zip(spans) {
            notes.extend(file.notes);
            all.least = all.least.min(Surroundings::least_bytes(file.header.header.names.len()));
            try_reserve(&mut all.files, 1, "the list of files")?;
            all.files.push(Drawn {
                path: file.path,
                header: file.header.header,
                stamp: file.stamp,
                start: all.span,
                span: bytes.clone(),
            });
            all.span += bytes.end - bytes.start;
        }
        Ok((all, notes))
    }

    fn contents_of(&self, number: usize) -> Option<&Contents> {
        self.contents.get(number).and_then(Option::as_ref)
    }

    /// Returns the index of the file that contains a byte, counted over all files.
    fn file(&self, byte: u64) -> usize {
        self.files.partition_point(|file| file.start <= byte) - 1
    }

    /// Returns the results of draws, in sequence. Draws before `looks` include the row lengths. Draws of bytes that
    /// `wanted` rejects, counted over all files, take no row.
    pub(crate) fn draw<E: Send>(
        &self,
        draws: Draws,
        (from, count): (u64, u64),
        looks: u64,
        wanted: impl Fn(u64) -> bool,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<Draw>, Halt<E>> {
        let drawn = (from..from + count).map(|i| (draws.below(i, self.span), i));
        let mut order: Vec<(u64, u64)> = try_collect(drawn.filter(|&(byte, _)| wanted(byte)), "the drawn bytes")?;
        order.sort_unstable();
        let mut found = Vec::new();
        try_reserve(&mut found, count as usize, "the drawn rows")?;
        found.resize_with(count as usize, Draw::default);
        let at_once = match self.threads {
            Threads::Computing(_) => DRAWS,
            Threads::Waiting => 1,
        };
        let chunks: Vec<&[(u64, u64)]> = order.chunks(at_once).collect();
        let lists = in_parallel(self.threads, &chunks, on_progress, |chunk, stopped| {
            self.look(chunk, looks, stopped)
        })?;
        for (number, draw) in lists.into_iter().flatten() {
            found[(number - from) as usize] = draw;
        }
        Ok(found)
    }

    /// Processes some draws, which are sorted by their bytes.
    fn look(&self, draws: &[(u64, u64)], looks: u64, stopped: &Arc<AtomicBool>) -> Result<Vec<(u64, Draw)>> {
        let mut found = Vec::new();
        let mut rest = draws;
        while let Some(&(byte, _)) = rest.first() {
            let number = self.file(byte);
            let (here, behind) = rest.split_at(rest.partition_point(|&(byte, _)| self.file(byte) == number));
            rest = behind;
            self.with_file(number, stopped, |file, around| {
                for &(byte, draw) in here {
                    if stopped.load(Ordering::Relaxed) {
                        break;
                    }
                    let byte = byte - file.start + file.span.start;
                    found.push((draw, self.one(around, number, byte, draw < looks)?));
                }
                Ok(())
            })?;
        }
        Ok(found)
    }

    /// Opens a file and calls `work` to find rows in it. Reads of a remote file end soon after `stopped` is set.
    ///
    /// # Errors
    /// Any error of `work`; errors of storage, also if the file was changed.
    pub(crate) fn with_file<R>(
        &self,
        number: usize,
        stopped: &Arc<AtomicBool>,
        work: impl FnOnce(&Drawn, &mut Surroundings<'_>) -> Result<R>,
    ) -> Result<R> {
        let file = &self.files[number];
        let work = || {
            let open = SourceFile::of(&file.path, self.contents_of(number))?.stopped_by(stopped);
            open.expect_random_reads();
            let around = &mut Surroundings::within(&open, &self.dialect, &file.header, file.span.clone());
            let done = work(file, around)?;
            // The rows may be a mix of old and new contents, unless rows were appended.
            let now = open.stamp()?;
            let appended = now.size > file.stamp.size && file.span.end == file.stamp.size;
            if now != file.stamp && !appended {
                let reason = "the file changed while rows were drawn: start again when no process writes to it";
                return Err(Error::new(ErrorKind::Storage, reason));
            }
            Ok(done)
        };
        work().map_err(|error| error.at_path(&file.path))
    }

    fn one(&self, around: &mut Surroundings<'_>, file: usize, byte: u64, always: bool) -> Result<Draw> {
        if !always && !around.may_start(byte, self.least)? {
            return Ok(Draw::default());
        }
        let Some(row) = around.row_at(byte)? else {
            return Ok(Draw::default());
        };
        let taken = (byte - row.offset < self.least).then(|| self.taken(around, file, row));
        Ok(Draw {
            len: row.len,
            taken: taken.transpose()?,
        })
    }

    fn taken(&self, around: &Surroundings<'_>, file: usize, row: RowAt) -> Result<Taken> {
        let text = around.text(row);
        let mut copy = try_filled(0, text.len(), "the drawn rows")?;
        copy.copy_from_slice(text);
        Ok(Taken {
            file: file as u32,
            offset: row.offset,
            text: copy.into(),
        })
    }

    /// Estimates the number of rows from the lengths of the rows at random bytes.
    fn estimate(&self, draws: &[Draw]) -> Estimate {
        let inverse = |draw: &Draw| if draw.len == 0 { 0.0 } else { 1.0 / draw.len as f64 };
        let count = draws.len() as f64;
        let mean = draws.iter().map(inverse).sum::<f64>() / count;
        let squares: f64 = draws.iter().map(|draw| (inverse(draw) - mean).powi(2)).sum();
        let span = self.span as f64;
        Estimate {
            rows: span * mean,
            error: span * (squares / (count - 1.0) / count).sqrt(),
        }
    }

    /// Draws `rows` rows, and estimates how many the files contain. The inner error is a message that says why this
    /// number of rows can't be drawn.
    ///
    /// # Errors
    /// Errors of storage, of the text or of memory; any error of `on_progress`.
    pub fn sample<E: Send>(
        &self,
        rows: u64,
        replace: bool,
        seed: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Result<CsvDraw, String>, Halt<E>> {
        if self.span == 0 {
            return Ok(Err("the dataset has no rows to draw from".to_owned()));
        }
        let key = Key { seed, epoch: 0 };
        let draws = Draws::new(key, Purpose::Bytes, 0);
        let looks = rows.clamp(LEAST_LOOKS, MOST_LOOKS);
        let mut round = self.draw(draws, (0, looks), looks, |_| true, on_progress)?;
        let estimate = self.estimate(&round);
        // Probability that a draw takes a row.
        let chance = estimate.rows * self.least as f64 / self.span as f64;
        let most = looks + 64 + (PATIENCE * rows as f64 / chance).min(1e18) as u64;
        let hopeless = !replace && rows as f64 > estimate.rows + CERTAIN * estimate.error + 1.0;
        let (mut taken, mut seen, mut drawn) = (Vec::new(), HashSet::new(), looks);
        if !hopeless {
            // Drawing so many rows that their list doesn't fit would take long before it fails.
            try_reserve(&mut taken, rows as usize, "the drawn rows")?;
        }
        loop {
            for row in round.into_iter().filter_map(|draw| draw.taken) {
                if taken.len() as u64 == rows {
                    break;
                }
                if !replace {
                    seen.try_reserve(1)
                        .map_err(|_| Error::out_of_memory(16 * seen.len(), "the drawn rows"))?;
                }
                if replace || seen.insert((row.file, row.offset)) {
                    taken.push(row);
                }
            }
            if taken.len() as u64 == rows {
                taken.sort_unstable_by_key(|row| (row.file, row.offset));
                return Ok(Ok(self.drawn(taken, estimate)?));
            }
            if drawn >= most || chance == 0.0 || hopeless {
                return Ok(Err(format!(
                    "cannot draw rows={rows}: {drawn} random bytes are in about {:.0} rows. Use method=\"exact\", which can \
                     draw all rows and reports how many there are",
                    estimate.rows
                )));
            }
            let missing = (rows - taken.len() as u64) as f64 / chance * 1.1 + 64.0;
            let count = (missing as u64).min(MOST_DRAWS).min(most - drawn);
            round = self.draw(draws, (drawn, count), looks, |_| true, on_progress)?;
            drawn += count;
        }
    }

    /// Returns the files with no rows.
    pub(crate) fn none_picked(&self) -> Vec<(Arc<str>, Header, KeptRows)> {
        let none = |file: &Drawn| (file.path.clone(), file.header.clone(), KeptRows::default());
        self.files.iter().map(none).collect()
    }

    fn drawn(&self, taken: Vec<Taken>, estimate: Estimate) -> Result<CsvDraw> {
        let files = try_collect(taken.iter().map(|row| i64::from(row.file)), "the rows' files")?;
        let offsets = try_collect(taken.iter().map(|row| row.offset as i64), "the rows' offsets")?;
        let mut picked = self.none_picked();
        for row in taken {
            picked[row.file as usize].2.push(&row.text, row.offset, None)?;
        }
        let half = NORMAL * estimate.error;
        Ok(CsvDraw {
            rows: CsvFiles::picked(self.dialect.clone(), picked),
            files,
            offsets,
            estimate: (estimate.rows, estimate.rows - half, estimate.rows + half),
        })
    }
}
