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

mod counts;

use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use fastpipe_batch::{Error, ErrorKind, Result, try_collect, try_reserve};
use fastpipe_csv::MOST_ROW_BYTES;
use fastpipe_files::{Halt, OnProgress};
use fastpipe_order::Permutation;
use fastpipe_random::{Draws, Key, Purpose};

use crate::csv_estimate::{MOST_DRAWS, UnscannedCsv};
use crate::csv_files::CsvFiles;
use crate::csv_line_buffer::counts::Counts;
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

/// Stream of the draws of cells whose rows are counted in advance, and the maximum number of these cells.
const LOOKS: u64 = 3;
const MOST_LOOKS: u64 = 8;

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
#[derive(Clone)]
struct Lap {
    /// Draws of the rows that it takes.
    takes: Range<u128>,
    order: Arc<Permutation>,
    /// Added to the permutation, so that it starts with the cell of the first row.
    shift: u64,
    /// Offset of the first row in its file.
    start: u64,
    /// Number of cells that are finished, and of rows taken from the next one.
    place: u64,
    taken: usize,
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

/// Room for further rows.
#[derive(Clone, Copy)]
struct Room {
    rows: u64,
    bytes: u64,
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
            share: draws_of(share),
            seed,
            circle,
            lap: None,
            begun: 0,
            counts: Counts::default(),
        })
    }

    /// Begins another circle with a share of the rows of each cell, above 0 and up to 1. Its rows are drawn
    /// independently of those of earlier circles.
    pub fn restart(&mut self, circle: u64, share: f64) {
        (self.circle, self.lap, self.begun) = (circle, None, 0);
        self.share = draws_of(share);
        self.counts = Counts::default();
    }

    /// Draws the next rows: `rows` of them, or as many as fit into about `bytes` of memory, at least those of one cell.
    /// Returns no row once all rows of the circle were drawn. After an error, the next call draws the same rows.
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
        let before = (self.lap.clone(), self.begun, self.counts);
        let drawn = self.cells_of(Room { rows, bytes }, on_progress);
        let drawn = drawn.and_then(|found| Ok(self.drawn(&found)?));
        if drawn.is_err() {
            (self.lap, self.begun, self.counts) = before;
        }
        drawn
    }

    /// Takes rows of the next cells, until they fill the room or no row is left.
    fn cells_of<E: Send>(
        &mut self,
        mut room: Room,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<Found>, Halt<E>> {
        let (mut found, most) = (Vec::new(), room.bytes);
        while !room.is_used_up() {
            if !self.has_cells() && !self.begin(on_progress)? {
                break;
            }
            for (cell, place, read) in self.read_cells(room, most, on_progress)? {
                let rows = self.take(place, &read, &mut room);
                try_reserve(&mut found, 1, "the drawn cells")?;
                found.push(Found { cell, read, rows });
                if room.is_used_up() {
                    break;
                }
            }
        }
        Ok(found)
    }

    /// Returns whether the current lap has cells that aren't finished.
    fn has_cells(&self) -> bool {
        self.lap.as_ref().is_some_and(|lap| lap.place <= self.cells)
    }

    /// Reads the next cells of the current lap. Returns their indices, places and rows, in the order of places.
    fn read_cells<E: Send>(
        &self,
        room: Room,
        most: u64,
        on_progress: &mut OnProgress<'_, E>,
    ) -> Result<Vec<(u64, u64, Cell)>, Halt<E>> {
        let Some(lap) = &self.lap else {
            return Ok(Vec::new());
        };
        let ahead = self.ahead(room).min(self.cells + 1 - lap.place);
        let places = lap.place..lap.place + ahead;
        let mut order: Vec<(u64, u64)> = try_collect(places.map(|p| (self.cell_at(lap, p), p)), "the drawn cells")?;
        // Files are read in sequence.
        order.sort_unstable();
        let cells = in_parallel(self.files.threads, &order, on_progress, |&(cell, place), stopped| {
            self.read(lap, (cell, place), most, stopped)
        })?;
        let read = order
            .into_iter()
            .zip(cells)
            .map(|((cell, place), read)| (cell, place, read));
        let mut read: Vec<_> = try_collect(read, "the drawn cells")?;
        read.sort_unstable_by_key(|&(_, place, _)| place);
        Ok(read)
    }

    /// Takes as many rows of a cell as there is room for. Returns their indices among the cell's taken rows.
    fn take(&mut self, place: u64, read: &Cell, room: &mut Room) -> Range<usize> {
        let Some(lap) = &mut self.lap else { return 0..0 };
        let before = lap.taken;
        let count = ((read.taken.len() - before) as u64).min(room.rows);
        let after = before + count as usize;
        room.rows -= count;
        let held = (read.end_of(after) - read.end_of(before)) as u64 + ROW_BYTES * count;
        room.bytes = room.bytes.saturating_sub(held);
        // The last cell isn't finished, so that the estimate doesn't depend on where a sample ends.
        if room.rows == 0 {
            lap.taken = after;
        } else {
            (lap.place, lap.taken) = (place + 1, 0);
            if self.begun == 1 {
                self.counts.add(place, self.cells, read.rows, read.taken.len());
            }
        }
        before..after
    }

    /// Returns the mean number of rows in a few random cells. It depends on the files and the seed only, and is
    /// independent of the draws of rows.
    ///
    /// # Errors
    /// Errors of storage or of the text; [`ErrorKind::Limit`] for a row of more than `bytes` bytes; any error of
    /// `on_progress`.
    pub fn rows_per_cell<E: Send>(&self, bytes: u64, on_progress: &mut OnProgress<'_, E>) -> Result<f64, Halt<E>> {
        let draws = Draws::new(Key { epoch: 0, ..self.key() }, Purpose::Cells, LOOKS);
        let cells: Vec<u64> = match self.cells <= MOST_LOOKS {
            true => (0..self.cells).collect(),
            false => (0..MOST_LOOKS).map(|look| draws.below(look, self.cells)).collect(),
        };
        let counts = in_parallel(self.files.threads, &cells, on_progress, |&cell, stopped| {
            let mut rows = 0u64;
            self.each_row(cell, bytes, stopped, |_, _| {
                rows += 1;
                Ok(())
            })?;
            Ok(rows)
        })?;
        Ok(counts.iter().sum::<u64>() as f64 / counts.len().max(1) as f64)
    }

    /// Returns an upper bound on the number of rows in all files: as many as fit, if each is as short as possible.
    pub fn most_rows(&self) -> u64 {
        self.files.span.div_ceil(self.files.least.max(1))
    }

    /// Returns an estimate of the number of rows in all files, and the bounds of its approximate 95 % confidence
    /// interval. After the first lap, the number is exact.
    pub fn estimate(&self) -> (f64, f64, f64) {
        self.counts.estimate(self.cells as f64, self.most_rows() as f64)
    }

    /// Returns how many cells to read at once for this many rows and bytes.
    fn ahead(&self, Room { rows, bytes }: Room) -> u64 {
        let share = self.share as f64 / 2f64.powi(64);
        let fit = bytes as f64 / (self.cell_bytes as f64 * share).max(1.0);
        let needed = match self.counts.taken_per_cell() {
            Some(each) => rows as f64 / each.max(1.0) + 1.0,
            None => self.files.threads.enough() as f64,
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
                order: Arc::new(order),
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
        // A row that contains a byte is taken only if it starts at this byte, or at most `least - 1` bytes before it.
        let wanted = |byte: u64| {
            let starts = byte.saturating_sub(self.files.least - 1)..=byte;
            starts.into_iter().any(|start| takes.contains(&self.draw_at(start)))
        };
        let (mut from, mut count) = (0, 64);
        while from < sure.min(MOST_STARTS) {
            let round = self.files.draw(draws, (from, count), 0, wanted, on_progress)?;
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
        self.draw_at(self.files.files[file].start + (offset - self.files.files[file].span.start))
    }

    /// Returns the draw of a row that starts at a byte, counted over all files.
    fn draw_at(&self, byte: u64) -> u128 {
        u128::from(Draws::new(self.key(), Purpose::Cells, LAPS).word(byte))
    }

    /// Returns the cell at a place of a lap. The last place is that of the first cell's remaining rows.
    fn cell_at(&self, lap: &Lap, place: u64) -> u64 {
        let place = if place == self.cells { 0 } else { place };
        (lap.order.at(place as usize) as u64 + lap.shift) % self.cells
    }

    /// Reads a cell, and takes rows of it.
    fn read(&self, lap: &Lap, (cell, place): (u64, u64), most: u64, stopped: &Arc<AtomicBool>) -> Result<Cell> {
        let number = self.file_of(cell);
        let mut found = Cell::default();
        self.each_row(cell, most, stopped, |offset, text| {
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
        })?;
        Ok(found)
    }

    /// Calls a function with the offset and the text of each row of a cell.
    fn each_row(
        &self,
        cell: u64,
        most: u64,
        stopped: &Arc<AtomicBool>,
        each: impl FnMut(u64, &[u8]) -> Result<()>,
    ) -> Result<()> {
        let number = self.file_of(cell);
        self.files.with_file(number, stopped, |_, around| {
            let span = around.span();
            let start = span.start + (cell - self.firsts[number]) * self.cell_bytes;
            let range = start..(start + self.cell_bytes).min(span.end);
            around.rows_in(range, most.clamp(1 << 16, MOST_ROW_BYTES), each)
        })
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

impl Room {
    fn is_used_up(self) -> bool {
        self.rows == 0 || self.bytes == 0
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

/// Returns the number of draws out of 2^64 that belong to a share of the rows.
fn draws_of(share: f64) -> u128 {
    ((share * 2f64.powi(64)) as u128).clamp(1, 1 << 64)
}
