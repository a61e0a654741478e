//! Wide rows, stored in the arrays that they came in.
//!
//! A chunk is retained until its last row is drawn. Some rows of every chunk wait long: in a buffer of `n` rows, a
//! fraction of `1 / e` is left after `n` more rows have come in. So a few rows would keep many chunks alive. If too
//! many rows are retained, the remaining rows of the oldest chunks are copied to a table. All chunks lose rows at the
//! same rate, so the oldest chunks have the fewest rows left.
//!
//! The limit is twice the capacity of the buffer. In the long run, one row in ten is then copied to the table, and no
//! row is copied there more than once.

use std::collections::VecDeque;

use fastpipe_batch::{OutOfBounds, Place, Result, move_rows, try_collect, try_reserve, try_with_capacity};

use crate::chunk::Byte;
use crate::slots::{ROWS, make_room};

/// Elements of this many bytes or more stay in their arrays. Narrower elements are faster to copy to a table: the table
/// uses large pages. Most arrays don't, so each row that is read from them costs a page table walk.
pub(crate) const WIDE: usize = 512;
/// Chunks with fewer rows are copied. Retaining them would cost more memory and time than copying the rows.
const FEW: usize = 16;
/// Maximum number of retained rows, as a multiple of the buffer's capacity.
const MOST_RETAINED: usize = 2;
/// The source number of the table.
const TABLE: u32 = 0;
/// The place of rows that were drawn.
const NOWHERE: Place = Place {
    source: u32::MAX,
    row: u32::MAX,
};

/// The elements of a chunk. They stay valid at the same address until the array is dropped.
pub trait Array: Send + Sync {
    /// The elements.
    fn bytes(&self) -> &[Byte];
}

/// Rows in the arrays that they came in.
#[derive(Debug, Default)]
pub(crate) struct RetainedArrays {
    /// Width of each part.
    widths: Vec<usize>,
    /// The places of rows, by slot.
    places: Vec<Place>,
    /// Source `k + 1` is chunk `k`.
    chunks: Vec<RetainedChunk>,
    /// Chunks, oldest first.
    ages: VecDeque<u32>,
    /// Unused indices of `chunks`.
    spare: Vec<u32>,
    /// Rows of retained chunks, including drawn rows.
    retained: usize,
    /// The elements of rows whose chunks were too old.
    table: Vec<Vec<Byte>>,
    /// Rows of the table that were drawn.
    free: Vec<u32>,
    /// Number of rows in the table.
    made: usize,
    /// Capacity of the buffer in rows.
    most: usize,
}

/// A chunk whose arrays are retained.
#[derive(Default)]
struct RetainedChunk {
    arrays: Vec<Box<dyn Array>>,
    rows: usize,
    /// The slots of the rows that were taken in, by row.
    slots: Vec<u32>,
    /// Number of rows that were taken in and haven't been drawn.
    live: usize,
}

impl std::fmt::Debug for RetainedChunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RetainedChunk({} of {} rows)", self.live, self.rows)
    }
}

impl RetainedChunk {
    /// Whether all rows were taken in.
    fn is_whole(&self) -> bool {
        self.slots.len() == self.rows
    }
}

impl RetainedArrays {
    /// Creates a buffer of at most `most` rows, with parts of these widths.
    pub(crate) fn new(widths: Vec<usize>, most: usize) -> Self {
        RetainedArrays {
            table: vec![Vec::new(); widths.len()],
            widths,
            most,
            ..RetainedArrays::default()
        }
    }

    /// Size of the table and of the retained arrays, in bytes.
    pub(crate) fn nbytes(&self) -> usize {
        (self.retained + self.made) * self.widths.iter().sum::<usize>()
    }

    /// Retains a chunk whose rows will be taken in.
    ///
    /// # Errors
    ///
    /// If its arrays don't have the length of its rows, or if the previous chunk still has rows to take in.
    pub(crate) fn retain(&mut self, rows: usize, arrays: Vec<Box<dyn Array>>) -> Result<()> {
        let fits = arrays.len() == self.widths.len()
            && arrays
                .iter()
                .zip(&self.widths)
                .all(|(array, width)| rows.checked_mul(*width) == Some(array.bytes().len()));
        let open = self
            .ages
            .back()
            .is_some_and(|&last| !self.chunks[last as usize].is_whole());
        if !fits || open || u32::try_from(rows).is_err() {
            return Err(OutOfBounds.into());
        }
        let slots = try_with_capacity(rows, ROWS)?;
        let number = self.spare.pop().unwrap_or(self.chunks.len() as u32);
        if number as usize == self.chunks.len() {
            self.chunks.push(RetainedChunk::default());
        }
        self.chunks[number as usize] = RetainedChunk {
            arrays,
            rows,
            slots,
            live: 0,
        };
        self.ages.push_back(number);
        self.retained += rows;
        Ok(())
    }

    /// Takes in the next rows of the chunk that was retained last, at these slots. `made` is the number of slots.
    pub(crate) fn take_in(&mut self, slots: &[u32], made: usize) -> Result<()> {
        let number = *self.ages.back().ok_or(OutOfBounds)?;
        let chunk = &mut self.chunks[number as usize];
        let from = chunk.slots.len();
        if slots.len() > chunk.rows - from {
            return Err(OutOfBounds.into());
        }
        let new = made.saturating_sub(self.places.len());
        try_reserve(&mut self.places, new, ROWS)?;
        self.places.resize(made, NOWHERE);
        for (&slot, row) in slots.iter().zip(from as u32..) {
            let source = number + 1;
            self.places[slot as usize] = Place { source, row };
        }
        chunk.slots.extend_from_slice(slots);
        chunk.live += slots.len();
        if chunk.is_whole() && chunk.rows < FEW {
            self.move_out(number)?;
        }
        self.settle()
    }

    /// Draws the rows at these slots and returns their places. The rows stay there until they are
    /// [forgotten](RetainedArrays::forget).
    pub(crate) fn draw(&mut self, slots: &[u32]) -> Result<Vec<Place>> {
        let drawn = |&slot: &u32| std::mem::replace(&mut self.places[slot as usize], NOWHERE);
        try_collect(slots.iter().map(drawn), ROWS)
    }

    /// Returns the sources of a part, which places refer to.
    pub(crate) fn sources(&self, part: usize) -> Result<Vec<&[Byte]>> {
        let chunks = self
            .chunks
            .iter()
            .map(|chunk| chunk.arrays.get(part).map_or(&[][..], |array| array.bytes()));
        try_collect(std::iter::once(&self.table[part][..]).chain(chunks), ROWS)
    }

    /// Forgets rows that were drawn from these places, and releases chunks without other rows.
    pub(crate) fn forget(&mut self, places: &[Place]) {
        for &place in places {
            if place.source == TABLE {
                self.free.push(place.row);
                continue;
            }
            let chunk = &mut self.chunks[place.source as usize - 1];
            chunk.live -= 1;
            if chunk.live == 0 && chunk.is_whole() {
                self.retained -= chunk.rows;
                *chunk = RetainedChunk::default();
            }
        }
    }

    /// Moves rows out of the oldest chunks until the retained rows are within the limit.
    fn settle(&mut self) -> Result<()> {
        let may = self.most.saturating_mul(MOST_RETAINED);
        while let Some(&oldest) = self.ages.front() {
            let chunk = &self.chunks[oldest as usize];
            let over = self.retained + self.made > may;
            if !chunk.is_whole() || (chunk.live > 0 && !over) {
                break;
            }
            self.move_out(oldest)?;
            self.ages.pop_front();
            self.spare.push(oldest);
        }
        Ok(())
    }

    /// Moves the remaining rows of a chunk to the table.
    fn move_out(&mut self, number: u32) -> Result<()> {
        let chunk = std::mem::take(&mut self.chunks[number as usize]);
        self.retained -= chunk.rows;
        let source = number + 1;
        let left = (0..).zip(&chunk.slots);
        let left = left.filter(|&(row, &slot)| self.places[slot as usize] == Place { source, row });
        let mut rows: Vec<u32> = try_with_capacity(chunk.live, ROWS)?;
        let mut owners: Vec<u32> = try_with_capacity(chunk.live, ROWS)?;
        for (row, &slot) in left {
            try_reserve(&mut rows, 1, ROWS)?;
            try_reserve(&mut owners, 1, ROWS)?;
            rows.push(row);
            owners.push(slot);
        }
        let mut to: Vec<u32> = try_with_capacity(rows.len(), ROWS)?;
        to.extend(self.free.drain(self.free.len().saturating_sub(rows.len())..));
        let fresh = rows.len() - to.len();
        to.extend((self.made..self.made + fresh).map(|row| row as u32));
        self.made += fresh;
        // Reserved here, so that `forget` can't fail.
        try_reserve(&mut self.free, self.made, ROWS)?;
        if self.made > self.most {
            return Err(OutOfBounds.into());
        }
        for ((array, table), &width) in chunk.arrays.iter().zip(&mut self.table).zip(&self.widths) {
            make_room(table, width, self.made, self.most, Byte::uninit())?;
            move_rows(array.bytes(), width, &rows, &to, table)?;
        }
        for (&slot, &row) in owners.iter().zip(&to) {
            self.places[slot as usize] = Place { source: TABLE, row };
        }
        Ok(())
    }
}
