//! Wide rows, where they came in.
//!
//! Chunks are retained until the last of their rows was drawn. Of a chunk as many rows as ever wait for long: in a
//! buffer of `n` rows, a fraction of `1 / e` of them after `n` others came in. So a few rows would keep many chunks
//! alive, and what is left of the oldest is copied to a table when too much is retained. Whatever their age, chunks
//! lose their rows at the same rate: the oldest are the emptiest.
//!
//! With twice the rows retained that the buffer may have, that is one of ten rows in the long run, and none is copied
//! more than once.

use std::collections::VecDeque;

use fastpipe_batch::{OutOfBounds, Place, Result, move_rows, try_collect, try_reserve, try_with_capacity};

use crate::chunk::Byte;
use crate::slots::{ROWS, make_room};

/// Elements of this many bytes or more stay where they came in. Narrower ones are faster copied to a table: it is in
/// large pages, and most arrays aren't, so that each row that is read from them costs a walk through the page table.
pub(crate) const WIDE: usize = 512;
/// Chunks of fewer rows are copied: to retain them would take more memory and time than the rows.
const FEW: usize = 16;
/// Rows that are retained at most, as a multiple of those that there may be.
const MOST_RETAINED: usize = 2;
/// The source that is the table.
const TABLE: u32 = 0;
/// The place of rows that were drawn.
const NOWHERE: Place = Place {
    source: u32::MAX,
    row: u32::MAX,
};

/// The elements of a chunk. They stay where they are, and are there, until it is dropped.
pub trait Array: Send + Sync {
    /// The elements.
    fn bytes(&self) -> &[Byte];
}

/// Rows in the arrays that they came in.
#[derive(Debug, Default)]
pub(crate) struct RetainedArrays {
    /// Of its parts.
    widths: Vec<usize>,
    /// Where rows are, by slot.
    places: Vec<Place>,
    /// Source `k + 1` is chunk `k`.
    chunks: Vec<RetainedChunk>,
    /// Chunks, the oldest first.
    ages: VecDeque<u32>,
    /// Numbers of chunks that were let go.
    spare: Vec<u32>,
    /// Rows of chunks that are retained, drawn ones, too.
    retained: usize,
    /// The elements of rows whose chunks were too old.
    table: Vec<Vec<Byte>>,
    /// Rows of the table that were drawn.
    free: Vec<u32>,
    /// Rows of the table.
    made: usize,
    /// Rows that there may be.
    most: usize,
}

/// A chunk.
#[derive(Default)]
struct RetainedChunk {
    arrays: Vec<Box<dyn Array>>,
    rows: usize,
    /// By row, of those that were taken in.
    slots: Vec<u32>,
    /// Rows that were taken in, and not drawn.
    live: usize,
}

impl std::fmt::Debug for RetainedChunk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "RetainedChunk({} of {} rows)", self.live, self.rows)
    }
}

impl RetainedChunk {
    /// Whether all its rows were taken in.
    fn is_whole(&self) -> bool {
        self.slots.len() == self.rows
    }
}

impl RetainedArrays {
    /// A buffer of at most this many rows of parts of these widths.
    pub(crate) fn new(widths: Vec<usize>, most: usize) -> Self {
        RetainedArrays {
            table: vec![Vec::new(); widths.len()],
            widths,
            most,
            ..RetainedArrays::default()
        }
    }

    /// Memory that it takes or keeps others from using, in bytes.
    pub(crate) fn nbytes(&self) -> usize {
        (self.retained + self.made) * self.widths.iter().sum::<usize>()
    }

    /// Retains a chunk whose rows are going to be taken in.
    ///
    /// # Errors
    ///
    /// If its arrays aren't as long as its rows say, or if rows of the one before are yet to be taken in.
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

    /// Takes in the next rows of the chunk that was retained last, at these slots, of which there are `made`.
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

    /// Where the rows at these slots are, which were drawn: nothing moves them any more, and they are yet to be
    /// [forgotten](RetainedArrays::forget).
    pub(crate) fn draw(&mut self, slots: &[u32]) -> Result<Vec<Place>> {
        let drawn = |&slot: &u32| std::mem::replace(&mut self.places[slot as usize], NOWHERE);
        try_collect(slots.iter().map(drawn), ROWS)
    }

    /// Where places of a part are looked up.
    pub(crate) fn sources(&self, part: usize) -> Result<Vec<&[Byte]>> {
        let chunks = self
            .chunks
            .iter()
            .map(|chunk| chunk.arrays.get(part).map_or(&[][..], |array| array.bytes()));
        try_collect(std::iter::once(&self.table[part][..]).chain(chunks), ROWS)
    }

    /// Forgets rows that were drawn from these places, and lets go of chunks that have no others.
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

    /// Moves rows out of the oldest chunks until no more is retained than may be.
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

    /// Moves what is left of a chunk to the table.
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
        // Each may be given back, which can't fail.
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
