//! Rows at random bytes of CSV files that were not scanned.
//!
//! A byte is drawn uniformly. The row that it lies in is taken if the byte is among its first `c`, where each row has
//! at least that many: so every row is taken with the same probability at each draw, whatever its length. The lengths
//! of the rows that the first bytes lie in, taken or not, say how many rows there are (M. H. Hansen, W. N. Hurwitz, On
//! the theory of sampling from finite alls, 1943).

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

/// Draws of which the rows' lengths are looked at, at least and at most.
const LEAST_LOOKS: u64 = 512;
const MOST_LOOKS: u64 = 8192;

/// Draws at once.
const MOST_DRAWS: u64 = 1 << 16;

/// Draws that a thread takes at once.
const DRAWS: usize = 64;

/// Draws for each that is expected to take a row: four allow for nearly all rows to be drawn without replacement.
const PATIENCE: f64 = 4.0;

/// A standard normal variable is within this with a probability of 95 %.
const NORMAL: f64 = 1.959_963_984_540_054;

/// Standard errors beyond which an estimate is taken for a certainty.
const CERTAIN: f64 = 6.0;

/// A file that rows are drawn from.
struct Drawn {
    path: Arc<str>,
    header: Header,
    stamp: FileStamp,
    /// The first of its bytes among those of all files, and the byte of the file that this is.
    start: u64,
    first: u64,
}

/// Files that rows are drawn from.
pub struct UnscannedCsv {
    dialect: Dialect,
    contents: Vec<Option<Bytes>>,
    files: Vec<Drawn>,
    /// The bytes of all.
    span: u64,
    /// Bytes that each row has at least.
    least: u64,
    threads: usize,
}

/// What a draw came to.
#[derive(Default)]
struct Draw {
    /// Bytes of the row that the byte lies in; none if it is in no row, or wasn't looked at.
    len: u64,
    /// The file, the row and its text, if it is taken.
    taken: Option<Taken>,
}

struct Taken {
    file: u32,
    offset: u64,
    text: Box<[u8]>,
}

/// An estimate of the number of rows: of its mean, with a standard error.
#[derive(Clone, Copy)]
struct Estimate {
    rows: f64,
    error: f64,
}

/// Rows that were drawn, and an estimate of how many there are.
pub struct CsvDraw {
    /// The rows. Each file is replaced by one in memory that contains only its drawn rows.
    pub rows: CsvFiles,
    /// The file of each row.
    pub files: Vec<i64>,
    /// The byte of its file at which each row starts.
    pub offsets: Vec<i64>,
    /// The estimated number of rows in all files, and its confidence interval of 95 %.
    pub estimate: (f64, f64, f64),
}

impl UnscannedCsv {
    /// Opens files and reads only their headers. Also returns records for the log.
    ///
    /// # Errors
    /// That of the first file that can't be opened; of compressed files; the error of `on_progress`.
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

    /// The file that a byte of all is in.
    fn file(&self, byte: u64) -> usize {
        self.files.partition_point(|file| file.start <= byte) - 1
    }

    /// What draws come to, in their order; of those before `looks` the lengths too.
    fn draw<E: Send>(
        &self,
        draws: Draws,
        (from, count): (u64, u64),
        looks: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<Draw>, Halt<E>> {
        let mut order: Vec<(u64, u64)> = try_collect(
            (from..from + count).map(|i| (draws.below(i, self.span), i)),
            "the bytes that are drawn",
        )?;
        order.sort_unstable();
        let mut found = Vec::new();
        try_reserve(&mut found, count as usize, "the rows that are drawn")?;
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
                    // Where the system has no more threads, this one does it alone.
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

    /// Looks at some draws, which are sorted by their bytes.
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
            // What was read may be of two contents.
            if open.stamp().map_err(at(first))? != file.stamp {
                let reason = "the file changed while rows were drawn: start again, once nobody writes to it";
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
        let mut copy = try_filled(0, text.len(), "the rows that are drawn")?;
        copy.copy_from_slice(text);
        Ok(Taken {
            file: file as u32,
            offset: row.offset,
            text: copy.into(),
        })
    }

    /// What the lengths of rows at random bytes say.
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

    /// Draws this many rows, and estimates how many there are. The inner error says why this many can't be drawn.
    ///
    /// # Errors
    /// Of storage, of the text or of memory; the error of `on_progress`.
    pub fn sample<E: Send>(
        &self,
        rows: u64,
        replace: bool,
        seed: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Result<CsvDraw, String>, Halt<E>> {
        if self.span == 0 {
            return Ok(Err("there are no rows to draw from".to_owned()));
        }
        let key = Key { seed, epoch: 0 };
        let draws = Draws::new(key, Purpose::Bytes, 0);
        let looks = rows.clamp(LEAST_LOOKS, MOST_LOOKS);
        let mut round = self.draw(draws, (0, looks), looks, on_progress)?;
        let estimate = self.estimate(&round);
        // Of each draw, to take a row.
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
                        .map_err(|_| Error::out_of_memory(16 * seen.len(), "the rows that are drawn"))?;
                }
                if replace || seen.insert((row.file, row.offset)) {
                    try_reserve(&mut taken, 1, "the rows that are drawn")?;
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
                    "rows={rows}, and {drawn} random bytes are in about {:.0} rows: method=\"exact\" draws all rows, or nearly \
                     all, and says how many there are",
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
