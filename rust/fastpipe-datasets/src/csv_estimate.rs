//! Random rows of CSV files that were not scanned.
//!
//! Each draw selects a byte uniformly. The row that contains the byte is taken if the byte is among its first `c`
//! bytes, where `c` is the minimum length of a row. Every row therefore has the same probability in each draw,
//! regardless of its length. The lengths of all selected rows, taken or not, yield an estimate of the number of rows
//! (M. H. Hansen, W. N. Hurwitz, On the theory of sampling from finite populations, 1943).

use std::collections::HashSet;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use bytes::Bytes;
use fastpipe_batch::{Error, ErrorKind, FileStamp, Result, try_collect, try_filled, try_reserve};
use fastpipe_csv::{Dialect, Header, KeptRows, RowAt, Surroundings};
use fastpipe_files::{Halt, LocalFile, LogRecord, OnProgress, Opening, open_all};
use fastpipe_random::{Draws, Key, Purpose};

use crate::csv_files::CsvFiles;
use crate::csv_format::CsvFormat;

/// Minimum and maximum number of draws whose row lengths are used for the estimate.
const LEAST_LOOKS: u64 = 512;
const MOST_LOOKS: u64 = 8192;

/// Maximum number of draws in one round.
const MOST_DRAWS: u64 = 1 << 16;

/// Number of draws that a thread processes in one step.
const DRAWS: usize = 64;

/// Maximum number of draws as a multiple of the expected number. A factor of four suffices to draw nearly all rows
/// without replacement.
const PATIENCE: f64 = 4.0;

/// A standard normal variable is within this distance of 0 with a probability of 95 %.
const NORMAL: f64 = 1.959_963_984_540_054;

/// Number of standard errors beyond which an estimate counts as certain.
const CERTAIN: f64 = 6.0;

/// A file from which rows are drawn.
struct Drawn {
    path: Arc<str>,
    header: Header,
    stamp: FileStamp,
    /// Offset of its rows among the bytes of all files, and the position in the file where the rows begin.
    start: u64,
    first: u64,
}

/// Files from which rows are drawn.
pub struct UnscannedCsv {
    dialect: Dialect,
    contents: Vec<Option<Bytes>>,
    files: Vec<Drawn>,
    /// Total bytes of rows in all files.
    span: u64,
    /// Minimum number of bytes of a row.
    least: u64,
    threads: usize,
}

/// The result of a draw.
#[derive(Default)]
struct Draw {
    /// Length of the row that contains the byte. 0 if there is none, or if the row wasn't examined.
    len: u64,
    /// The row, if it is taken.
    taken: Option<Taken>,
}

struct Taken {
    file: u32,
    offset: u64,
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
    pub fn open<E>(
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
            threads: how.threads,
        };
        for (number, file) in found.into_iter().filter_map(|file| file.opened).enumerate() {
            notes.extend(file.notes);
            let open = LocalFile::of(&file.path, all.contents.get(number).and_then(Option::as_ref))?;
            let around = Surroundings::new(&open, &all.dialect, &file.header.header);
            let bytes = around.map_err(|e| e.at_path(&file.path))?.span();
            all.least = all.least.min(Surroundings::least_bytes(file.header.header.names.len()));
            try_reserve(&mut all.files, 1, "the list of files")?;
            all.files.push(Drawn {
                path: file.path,
                header: file.header.header,
                stamp: file.stamp,
                start: all.span,
                first: bytes.start,
            });
            all.span += bytes.end - bytes.start;
        }
        Ok((all, notes))
    }

    /// Returns the index of the file that contains a byte, counted over all files.
    fn file(&self, byte: u64) -> usize {
        self.files.partition_point(|file| file.start <= byte) - 1
    }

    /// Returns the results of draws, in sequence. Draws before `looks` include the row lengths.
    fn draw<E: Send>(
        &self,
        draws: Draws,
        (from, count): (u64, u64),
        looks: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<Draw>, Halt<E>> {
        let mut order: Vec<(u64, u64)> = try_collect(
            (from..from + count).map(|i| (draws.below(i, self.span), i)),
            "the drawn bytes",
        )?;
        order.sort_unstable();
        let mut found = Vec::new();
        try_reserve(&mut found, count as usize, "the drawn rows")?;
        found.resize_with(count as usize, Draw::default);
        let (next, stopped) = (AtomicUsize::new(0), AtomicBool::new(false));
        let failed: Mutex<Option<(u64, Error)>> = Mutex::new(None);
        let chunks: Vec<&[(u64, u64)]> = order.chunks(DRAWS).collect();
        let work = |on_progress: &mut OnProgress<'_, E>| -> Result<Vec<(u64, Draw)>, E> {
            let mut found = Vec::new();
            while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                on_progress(0).inspect_err(|_| stopped.store(true, Ordering::Relaxed))?;
                if let Err((number, error)) = self.look(chunk, looks, &stopped, &mut found) {
                    stopped.store(true, Ordering::Relaxed);
                    let mut failed = failed.lock().unwrap_or_else(PoisonError::into_inner);
                    if failed.as_ref().is_none_or(|(first, _)| number < *first) {
                        *failed = Some((number, error));
                    }
                }
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
            }
            Ok(found)
        };
        let lists = std::thread::scope(|scope| {
            let helpers: Vec<_> = (1..self.threads.min(chunks.len()))
                .filter_map(|_| {
                    let builder = std::thread::Builder::new().name("fastpipe-draw".to_owned());
                    // If the system can't start more threads, this thread does all the work.
                    builder.spawn_scoped(scope, || work(&mut |_| Ok(()))).ok()
                })
                .collect();
            let mut lists = vec![work(on_progress)];
            lists.extend(
                helpers
                    .into_iter()
                    .map(|helper| helper.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))),
            );
            lists
        });
        for list in lists {
            for (number, draw) in list.map_err(Halt::Interrupted)? {
                found[(number - from) as usize] = draw;
            }
        }
        match failed.into_inner().unwrap_or_else(PoisonError::into_inner) {
            Some((_, error)) => Err(error.into()),
            None => Ok(found),
        }
    }

    /// Processes some draws, which are sorted by their bytes.
    fn look(
        &self,
        draws: &[(u64, u64)],
        looks: u64,
        stopped: &AtomicBool,
        found: &mut Vec<(u64, Draw)>,
    ) -> Result<(), (u64, Error)> {
        let mut rest = draws;
        while let Some(&(byte, first)) = rest.first() {
            let number = self.file(byte);
            let file = &self.files[number];
            let (here, behind) = rest.split_at(rest.partition_point(|&(byte, _)| self.file(byte) == number));
            rest = behind;
            let at = |draw: u64| move |error: Error| (draw, error.at_path(&file.path));
            let contents = self.contents.get(number).and_then(Option::as_ref);
            let open = LocalFile::of(&file.path, contents).map_err(at(first))?;
            let mut around = Surroundings::new(&open, &self.dialect, &file.header).map_err(at(first))?;
            for &(byte, draw) in here {
                if stopped.load(Ordering::Relaxed) {
                    return Ok(());
                }
                let byte = byte - file.start + file.first;
                let result = self.one(&mut around, number, byte, draw < looks).map_err(at(draw))?;
                found.push((draw, result));
            }
            // The rows may be a mix of old and new contents.
            if open.stamp().map_err(at(first))? != file.stamp {
                let reason = "the file changed while rows were drawn: start again when no process writes to it";
                return Err(at(first)(Error::new(ErrorKind::Storage, reason)));
            }
        }
        Ok(())
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
        let mut round = self.draw(draws, (0, looks), looks, on_progress)?;
        let estimate = self.estimate(&round);
        // Probability that a draw takes a row.
        let chance = estimate.rows * self.least as f64 / self.span as f64;
        let most = looks + 64 + (PATIENCE * rows as f64 / chance).min(1e18) as u64;
        let (mut taken, mut seen, mut drawn) = (Vec::new(), HashSet::new(), looks);
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
                    try_reserve(&mut taken, 1, "the drawn rows")?;
                    taken.push(row);
                }
            }
            if taken.len() as u64 == rows {
                taken.sort_unstable_by_key(|row| (row.file, row.offset));
                return Ok(Ok(self.drawn(taken, estimate)?));
            }
            let hopeless = !replace && rows as f64 > estimate.rows + CERTAIN * estimate.error + 1.0;
            if drawn >= most || chance == 0.0 || hopeless {
                return Ok(Err(format!(
                    "cannot draw rows={rows}: {drawn} random bytes are in about {:.0} rows. Use method=\"exact\", which can \
                     draw all rows and reports how many there are",
                    estimate.rows
                )));
            }
            let missing = (rows - taken.len() as u64) as f64 / chance * 1.1 + 64.0;
            let count = (missing as u64).min(MOST_DRAWS).min(most - drawn);
            round = self.draw(draws, (drawn, count), looks, on_progress)?;
            drawn += count;
        }
    }

    fn drawn(&self, taken: Vec<Taken>, estimate: Estimate) -> Result<CsvDraw> {
        let files = try_collect(taken.iter().map(|row| i64::from(row.file)), "the rows' files")?;
        let offsets = try_collect(taken.iter().map(|row| row.offset as i64), "the rows' offsets")?;
        let own = |file: &Drawn| (file.path.clone(), file.header.clone(), KeptRows::default());
        let mut picked: Vec<_> = self.files.iter().map(own).collect();
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
