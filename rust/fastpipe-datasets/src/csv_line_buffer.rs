//! Random rows of CSV files that were not scanned, read in cells.
//!
//! A grid divides the bytes of all files into cells. A row belongs to the cell in which it starts, so each row belongs
//! to exactly one cell, whatever its length. A *lap* reads the cells in random order and takes a random share of the
//! rows of each: a row is taken if its own draw is in the lap's range. So the laps of a circle have no row in common,
//! and together they take all rows.
//!
//! A lap starts with a uniformly drawn one of its rows. The order of the cells is random, and the rows before the first
//! one in its cell come last. So the lap is a circle of rows on which every row is equally likely at every place, and
//! the next `n` rows are a sample in which every row has the same probability. Without the uniform first row, cells
//! with many short rows would be less likely (H. Midzuno, On the sampling system with probability proportionate to sum
//! of sizes, 1951).

use std::ops::Range;

use fastpipe_batch::{Error, ErrorKind, Result, try_collect, try_reserve};
use fastpipe_csv::MOST_ROW_BYTES;
use fastpipe_files::{Halt, OnProgress};
use fastpipe_order::Permutation;
use fastpipe_random::{Draws, Key, Purpose};

use crate::csv_estimate::{MOST_DRAWS, NORMAL, UnscannedCsv};
use crate::csv_files::CsvFiles;
use crate::in_parallel::in_parallel;

/// Bytes of a cell: a fraction of all bytes, within these limits.
const CELLS: u64 = 1024;
const LEAST_CELL: u64 = 8 << 10;
const MOST_CELL: u64 = 256 << 10;

/// Number of random bytes among which the first row of a lap is searched.
const MOST_STARTS: u64 = 1 << 22;

/// The search ends without a row if the probability of missing one is less than `exp(-SURE)`.
const SURE: u64 = 40;

/// Cells that are read at once.
const MOST_AT_ONCE: u64 = 4096;

/// Memory of a row besides its text.
const ROW_BYTES: u64 = 64;

/// Stream of the draws that decide in which lap a row is taken. The first streams are those of the order of cells.
const LAPS: u64 = 2;

/// A line buffer: it is filled with random rows of files, again and again. No row comes twice within a circle.
pub struct CsvLineBuffer {
    files: UnscannedCsv,
    /// Index of the first cell of each file.
    firsts: Vec<u64>,
    /// Number of cells.
    cells: u64,
    cell_bytes: u64,
    /// Number of draws out of 2^64 that belong to one lap.
    share: u128,
    seed: u64,
    circle: u64,
    /// The current lap, and the number of laps that were begun.
    lap: Option<Lap>,
    begun: u64,
    counts: Counts,
}

/// One pass over the cells.
struct Lap {
    /// Draws of the rows that it takes.
    takes: Range<u128>,
    order: Permutation,
    /// Added to the permutation, so that it starts with the cell of the first row.
    shift: u64,
    /// Offset of the first row in its file.
    start: u64,
    /// Number of cells that are finished, and of rows taken from the next one.
    place: u64,
    taken: usize,
}

/// Counts of the finished cells of the first lap, for the estimate.
#[derive(Clone, Copy, Default)]
struct Counts {
    /// Number of rows in the cell of the first row.
    first: f64,
    /// Number of other cells, the sum of their rows, and the sum of squares.
    cells: f64,
    rows: f64,
    squares: f64,
    /// Number of taken rows.
    taken: f64,
    /// Whether all cells were counted.
    complete: bool,
}

/// The rows of a cell.
#[derive(Default)]
struct Cell {
    /// Number of all rows.
    rows: u64,
    text: Vec<u8>,
    /// The offset of each taken row in its file, and the end of its text.
    taken: Vec<(u64, usize)>,
}

/// Drawn rows of a cell.
struct Found {
    cell: u64,
    read: Cell,
    /// The indices of the rows among the cell's taken rows.
    rows: Range<usize>,
}

/// Rows that were drawn, in the order of their files and offsets.
pub struct DrawnLines {
    /// The rows. Each file is replaced by one in memory that contains only its drawn rows.
    pub rows: CsvFiles,
    /// Index of the file of each row.
    pub files: Vec<i64>,
    /// Position in the file where each row starts.
    pub offsets: Vec<i64>,
    /// Cell of each row.
    pub cells: Vec<i64>,
    /// Place of each row in the order of drawing.
    pub places: Vec<i64>,
}

impl CsvLineBuffer {
    /// Creates a buffer that takes a share of the rows of each cell, above 0 and up to 1.
    ///
    /// # Errors
    /// If memory is exhausted.
    pub fn new(files: UnscannedCsv, share: f64, seed: u64, circle: u64) -> Result<CsvLineBuffer> {
        let cell_bytes = (files.span / CELLS).clamp(LEAST_CELL, MOST_CELL);
        let (mut firsts, mut cells) = (Vec::new(), 0);
        try_reserve(&mut firsts, files.files.len(), "the cells of files")?;
        for number in 0..files.files.len() {
            firsts.push(cells);
            let span = &files.files[number].span;
            cells += (span.end - span.start).div_ceil(cell_bytes);
        }
        Ok(CsvLineBuffer {
            files,
            firsts,
            cells,
            cell_bytes,
            share: ((share * 2f64.powi(64)) as u128).clamp(1, 1 << 64),
            seed,
            circle,
            lap: None,
            begun: 0,
            counts: Counts::default(),
        })
    }

    /// Begins another circle. Its rows are drawn independently of those of earlier circles.
    pub fn restart(&mut self, circle: u64) {
        (self.circle, self.lap, self.begun) = (circle, None, 0);
        self.counts = Counts::default();
    }

    /// Draws the next rows: `rows` of them, or as many as fit into about `bytes` of memory, at least those of one cell.
    /// Fewer rows that fit mean that all rows of the circle were drawn.
    ///
    /// # Errors
    /// Errors of storage, of the text or of memory; [`ErrorKind::Limit`] for a row of more than `bytes` bytes; any
    /// error of `on_progress`.
    pub fn next<E: Send>(
        &mut self,
        rows: u64,
        bytes: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<DrawnLines, Halt<E>> {
        let (mut found, mut count, mut held) = (Vec::new(), 0, 0u64);
        while count < rows && held < bytes {
            let Some(lap) = self.lap.as_ref().filter(|lap| lap.place <= self.cells) else {
                if !self.begin(on_progress)? {
                    break;
                }
                continue;
            };
            let ahead = self.ahead(rows - count, bytes - held).min(self.cells + 1 - lap.place);
            // Files are read in sequence.
            let places = lap.place..lap.place + ahead;
            let mut places: Vec<(u64, u64)> =
                try_collect(places.map(|p| (self.cell_at(lap, p), p)), "the drawn cells")?;
            places.sort_unstable();
            let read = in_parallel(self.files.threads, &places, on_progress, |&(cell, place), _| {
                self.read(lap, cell, place, bytes)
            })?;
            let mut read: Vec<_> = places.into_iter().zip(read).collect();
            read.sort_unstable_by_key(|&((_, place), _)| place);
            for ((cell, place), read) in read {
                let Some(lap) = &mut self.lap else { break };
                let before = lap.taken;
                let after = before + ((read.taken.len() - before) as u64).min(rows - count) as usize;
                count += (after - before) as u64;
                held += (read.end_of(after) - read.end_of(before)) as u64 + ROW_BYTES * (after - before) as u64;
                // The last cell isn't finished, so that the estimate doesn't depend on where a sample ends.
                if count < rows {
                    (lap.place, lap.taken) = (place + 1, 0);
                    if self.begun == 1 {
                        self.counts.add(place, self.cells, &read);
                    }
                } else {
                    lap.taken = after;
                }
                try_reserve(&mut found, 1, "the drawn cells")?;
                found.push(Found {
                    cell,
                    read,
                    rows: before..after,
                });
                if count == rows || held >= bytes {
                    break;
                }
            }
        }
        Ok(self.drawn(&found)?)
    }

    /// Returns an estimate of the number of rows in all files, and the bounds of its approximate 95 % confidence
    /// interval. After the first lap, the number is exact.
    pub fn estimate(&self) -> (f64, f64, f64) {
        let Counts {
            first,
            cells,
            rows,
            squares,
            complete,
            ..
        } = self.counts;
        if complete {
            return (first + rows, first + rows, first + rows);
        }
        let most = self.files.span as f64 / self.files.least.max(1) as f64;
        if cells < 2.0 {
            return (
                first + (self.cells as f64 - 1.0) * (first + rows) / (cells + 1.0),
                first + rows,
                most,
            );
        }
        // The other cells are a simple random sample of all cells but the first.
        let others = self.cells as f64 - 1.0;
        let variance = (squares - rows * rows / cells).max(0.0) / (cells - 1.0);
        let error = others * (variance / cells * (1.0 - cells / others).max(0.0)).sqrt();
        let half = error * student(cells - 1.0);
        let estimate = first + others * rows / cells;
        (
            estimate,
            (estimate - half).max(first + rows),
            (estimate + half).min(most),
        )
    }

    /// Returns how many cells to read at once for this many rows and bytes.
    fn ahead(&self, rows: u64, bytes: u64) -> u64 {
        let share = self.share as f64 / 2f64.powi(64);
        let fit = bytes as f64 / (self.cell_bytes as f64 * share).max(1.0);
        let each = (self.counts.taken / (self.counts.cells + 1.0)).max(1.0);
        let needed = match self.counts.cells > 0.0 {
            true => rows as f64 / each + 1.0,
            false => 2.0 * self.files.threads as f64,
        };
        (fit.min(needed).ceil() as u64).clamp(1, MOST_AT_ONCE)
    }

    /// Begins the next lap that has rows. Returns `false` if there is none.
    fn begin<E: Send>(&mut self, on_progress: &mut OnProgress<'_, E>) -> Result<bool, Halt<E>> {
        self.lap = None;
        loop {
            let from = self.share * u128::from(self.begun);
            if from >= 1 << 64 || self.files.span == 0 {
                return Ok(false);
            }
            let takes = from..from + self.share;
            let number = self.begun;
            self.begun += 1;
            let Some((file, start)) = self.first(number, &takes, on_progress)? else {
                continue;
            };
            let epoch = (self.circle << 20) + number;
            let order = Permutation::of(self.cells as usize, Key { seed: self.seed, epoch }, Purpose::Cells);
            let order = order.map_err(|_| Error::out_of_memory(self.cells as usize, "the order of cells"))?;
            let cell = self.firsts[file] + (start - self.files.files[file].span.start) / self.cell_bytes;
            let shift = (cell + self.cells - order.at(0) as u64) % self.cells;
            self.lap = Some(Lap {
                takes,
                order,
                shift,
                start,
                place: 0,
                taken: 0,
            });
            return Ok(true);
        }
    }

    /// Draws a row of a lap uniformly. Returns its file and offset, or `None` if the lap has no rows.
    fn first<E: Send>(
        &self,
        lap: u64,
        takes: &Range<u128>,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Option<(usize, u64)>, Halt<E>> {
        let draws = Draws::new(self.key(), Purpose::Bytes, 1 + lap);
        let sure = (self.files.span / self.files.least.max(1) + 1).saturating_mul(SURE);
        let (mut from, mut count) = (0, 64);
        while from < sure.min(MOST_STARTS) {
            let round = self.files.draw(draws, (from, count), 0, on_progress)?;
            let taken = round.into_iter().filter_map(|draw| draw.taken);
            let mut taken = taken.map(|row| (row.file as usize, row.offset));
            if let Some(row) = taken.find(|&(file, offset)| takes.contains(&self.draw_of(file, offset))) {
                return Ok(Some(row));
            }
            (from, count) = (from + count, (2 * count).min(MOST_DRAWS));
        }
        if sure <= MOST_STARTS {
            return Ok(None);
        }
        let reason = format!("no row starts at {from} random bytes, because rows are long: use method=\"exact\"");
        Err(Error::new(ErrorKind::Limit, reason).into())
    }

    fn key(&self) -> Key {
        Key {
            seed: self.seed,
            epoch: self.circle,
        }
    }

    /// Returns the draw that decides in which lap a row is taken.
    fn draw_of(&self, file: usize, offset: u64) -> u128 {
        let place = self.files.files[file].start + (offset - self.files.files[file].span.start);
        u128::from(Draws::new(self.key(), Purpose::Cells, LAPS).word(place))
    }

    /// Returns the cell at a place of a lap. The last place is that of the first cell's remaining rows.
    fn cell_at(&self, lap: &Lap, place: u64) -> u64 {
        let place = if place == self.cells { 0 } else { place };
        (lap.order.at(place as usize) as u64 + lap.shift) % self.cells
    }

    /// Reads a cell, and takes rows of it.
    fn read(&self, lap: &Lap, cell: u64, place: u64, most: u64) -> Result<Cell> {
        let number = self.file_of(cell);
        let mut found = Cell::default();
        self.files.with_file(number, |_, around| {
            let span = around.span();
            let start = span.start + (cell - self.firsts[number]) * self.cell_bytes;
            let range = start..(start + self.cell_bytes).min(span.end);
            around.rows_in(range, most.clamp(1 << 16, MOST_ROW_BYTES), |offset, text| {
                found.rows += 1;
                let inside = match place {
                    0 => offset >= lap.start,
                    place if place == self.cells => offset < lap.start,
                    _ => true,
                };
                if inside && lap.takes.contains(&self.draw_of(number, offset)) {
                    try_reserve(&mut found.text, text.len(), "the drawn rows")?;
                    found.text.extend_from_slice(text);
                    try_reserve(&mut found.taken, 1, "the drawn rows")?;
                    found.taken.push((offset, found.text.len()));
                }
                Ok(())
            })
        })?;
        Ok(found)
    }

    /// Returns rows of cells, sorted by file and offset.
    fn drawn(&self, found: &[Found]) -> Result<DrawnLines> {
        let mut rows = Vec::new();
        try_reserve(
            &mut rows,
            found.iter().map(|found| found.rows.len()).sum(),
            "the drawn rows",
        )?;
        for (
            number,
            Found {
                cell,
                read,
                rows: drawn,
            },
        ) in found.iter().enumerate()
        {
            let file = self.file_of(*cell);
            for row in drawn.clone() {
                rows.push((file, read.taken[row].0, number, row, rows.len() as i64));
            }
        }
        rows.sort_unstable();
        let mut picked = self.files.none_picked();
        for &(file, offset, number, row, _) in &rows {
            picked[file].2.push(found[number].read.text_of(row), offset, None)?;
        }
        let what = "the places of the drawn rows";
        Ok(DrawnLines {
            rows: CsvFiles::picked(self.files.dialect.clone(), picked),
            files: try_collect(rows.iter().map(|row| row.0 as i64), what)?,
            offsets: try_collect(rows.iter().map(|row| row.1 as i64), what)?,
            cells: try_collect(rows.iter().map(|row| found[row.2].cell as i64), what)?,
            places: try_collect(rows.iter().map(|row| row.4), what)?,
        })
    }

    /// Returns the index of the file that contains a cell.
    fn file_of(&self, cell: u64) -> usize {
        self.firsts.partition_point(|&first| first <= cell) - 1
    }
}

impl Cell {
    /// Returns the text of a taken row.
    fn text_of(&self, row: usize) -> &[u8] {
        &self.text[self.end_of(row)..self.end_of(row + 1)]
    }

    /// Returns the bytes of the text of the first `rows` taken rows.
    fn end_of(&self, rows: usize) -> usize {
        rows.checked_sub(1).map_or(0, |last| self.taken[last].1)
    }
}

impl Counts {
    /// Adds a finished cell at a place of the first lap.
    fn add(&mut self, place: u64, cells: u64, cell: &Cell) {
        let rows = cell.rows as f64;
        self.taken += cell.taken.len() as f64;
        if place == 0 {
            self.first = rows;
        } else if place == cells {
            self.complete = true;
        } else {
            self.cells += 1.0;
            self.rows += rows;
            self.squares += rows * rows;
        }
    }
}

/// Returns the 97.5 % quantile of Student's t distribution, by its Cornish-Fisher expansion around the normal quantile
/// (M. Abramowitz, I. A. Stegun, Handbook of Mathematical Functions, 1964, 26.7.5).
fn student(freedom: f64) -> f64 {
    let z = NORMAL;
    let first = (z.powi(3) + z) / 4.0;
    let second = (5.0 * z.powi(5) + 16.0 * z.powi(3) + 3.0 * z) / 96.0;
    let third = (3.0 * z.powi(7) + 19.0 * z.powi(5) + 17.0 * z.powi(3) - 15.0 * z) / 384.0;
    z + first / freedom + second / freedom.powi(2) + third / freedom.powi(3)
}
