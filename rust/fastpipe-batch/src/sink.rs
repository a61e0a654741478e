//! The destination of decoded values.
//!
//! [`Rows`] is the batch that is being filled (`rows.rs`): one slab with the placed parts of all columns. A [`Sink`]
//! gives one task access to it. The sink also has the task's arenas for all data whose size isn't known in advance.
//! Several threads may fill the same batch at once, each with its own sink.
//!
//! # Why this is sound
//!
//! - A sink *claims* a slot before it writes to it, by an atomic test-and-set in a bitmap. It may claim one slot or
//!   a range. Claiming a slot twice is an error, and a claim is valid for one row. So at most one sink holds pointers
//!   into a slot.
//! - Writers check each write against the space left in their slot or arena, so every write stays inside. Cells have a
//!   fixed size.
//! - Slabs are initialized memory, and every element type accepts any bit pattern, so uninitialized memory is never
//!   read.
//! - [`Rows::complete`] returns the slab only if all rows of the batch were filled completely. Sinks borrow `Rows`, so
//!   no sink exists at that time.
#![allow(unsafe_code)]

mod lost;

use std::ops::Range;
use std::sync::Arc;

use crate::cells::{Cell, Cells, Columns};
use crate::error::{Error, ErrorKind};
use crate::fallible::{try_collect, try_filled};
use crate::key_count::KeyCount;
use crate::parts::{Part, TextParts};
use crate::rows::{BOOKKEEPING, Placed, Rows};
use crate::slab::Slab;
use crate::writer::{Element, Overflow, Writer};

pub use self::lost::{LostRow, SinkPosition};

/// The output of a task, from which the batch is joined: the slots of its rows, and its arenas. [`Fragment::clear`]
/// keeps the memory.
#[derive(Debug, Default)]
pub struct Fragment {
    slots: Vec<u32>,
    writers: Vec<Writer>,
    /// The keys that were read, by part. Empty if none were counted.
    keys: Vec<KeyCount>,
    lost: Vec<LostRow>,
}

impl Fragment {
    /// Returns the rows whose data is damaged, in decoding order. Their slots are zero or empty.
    pub fn lost(&self) -> &[LostRow] {
        &self.lost
    }

    /// Returns the slots that were filled, in decoding order.
    pub fn slots(&self) -> &[u32] {
        &self.slots
    }

    /// Returns the keys that were counted, by part. Empty if no column counts its keys.
    pub fn keys(&self) -> &[KeyCount] {
        &self.keys
    }

    /// Returns the bytes that were appended to part `part`, and the byte at which each row of [`Fragment::slots`]
    /// starts. Both are empty for placed parts.
    pub fn arena(&self, part: usize) -> (&[u8], &[usize]) {
        let Some(writer) = self.writers.get(part) else {
            return (&[], &[]);
        };
        match &writer.arena {
            Some(arena) if writer.len > arena.lead => {
                // SAFETY: by the invariant of `Writer`, these are `len` initialized bytes that only `self` accesses.
                let bytes = unsafe { std::slice::from_raw_parts(writer.start, writer.len) };
                (&bytes[arena.lead..], &arena.starts)
            }
            Some(arena) => (&[], &arena.starts),
            None => (&[], &[]),
        }
    }

    /// Removes and returns the memory that was appended to part `part`. Lengths begin with an additional zero, which is
    /// the first offset. Returns `None` for placed parts and if nothing was appended.
    pub fn take_arena(&mut self, part: usize) -> Option<Slab> {
        let writer = self.writers.get_mut(part)?;
        let arena = writer.arena.as_mut()?;
        let mut slab = arena.slab.take()?;
        slab.truncate(writer.len);
        // Reserve a little more next time because batches vary in size.
        arena.guess = writer.len + writer.len / 8;
        arena.starts.clear();
        (writer.start, writer.len, writer.capacity) = (std::ptr::null_mut(), 0, 0);
        Some(slab)
    }

    /// Returns the capacity of the arenas in bytes.
    pub fn held_bytes(&self) -> usize {
        self.writers
            .iter()
            .filter(|w| w.arena.is_some())
            .map(|w| w.capacity)
            .sum()
    }

    /// Returns the number of bytes that were appended to the arenas.
    pub fn arena_bytes(&self) -> usize {
        self.writers.iter().filter(|w| w.arena.is_some()).map(|w| w.len).sum()
    }

    /// Removes all rows and keeps the memory.
    pub fn clear(&mut self) {
        self.slots.clear();
        self.keys.clear();
        self.lost.clear();
        self.writers.iter_mut().for_each(Writer::clear);
    }
}

/// Appends an element, or returns an error if memory is exhausted.
#[inline(always)]
fn push<T>(table: &mut Vec<T>, element: T) -> Result<(), Overflow> {
    if table.len() == table.capacity() {
        make_room(table, 1)?;
    }
    table.push(element);
    Ok(())
}

/// Reserves room for more elements.
#[cold]
#[inline(never)]
fn make_room<T>(table: &mut Vec<T>, more: usize) -> Result<(), Overflow> {
    table.try_reserve(more).map_err(|_| Overflow::Memory)
}

/// The access of one task to a batch.
pub struct Sink<'a> {
    rows: &'a Rows,
    fragment: Fragment,
    slot: u32,
    /// Whether `slot` is claimed and its row hasn't ended.
    begun: bool,
    /// Claimed slots whose rows begin next.
    coming: Range<u32>,
    ended: usize,
    /// The parts that every row appends to.
    parts: Parts,
    /// The parts with one value per row that are written without a writer.
    cells: Vec<Cell>,
    chosen: Option<Arc<[u32]>>,
    /// Number of cells of the current row that were written.
    written: usize,
}

/// With this many parts or more, the processor no longer predicts the memory that is written next.
const MANY_PARTS: usize = 4;

/// Parts, grouped by the work at the beginning and the end of each row.
#[derive(Default)]
struct Parts {
    placed: Vec<(u32, Placed)>,
    arenas: Vec<u32>,
}

impl<'a> Sink<'a> {
    /// Creates a sink for `rows`. It reuses the arenas of `fragment` if it comes from a batch of the same columns.
    /// Otherwise it creates new ones.
    pub fn new(rows: &'a Rows, mut fragment: Fragment) -> Result<Self, Error> {
        let fits = |(writer, part): (&Writer, &Part)| writer.arena.is_none() == part.per_row().is_some();
        if fragment.writers.len() != rows.parts.len() || !fragment.writers.iter().zip(rows.parts.iter()).all(fits) {
            let writer = |p: &Part| {
                if p.per_row().is_some() {
                    Writer::placed()
                } else {
                    Writer::arena(p, &rows.pool)
                }
            };
            fragment.writers = try_collect(rows.parts.iter().map(writer), BOOKKEEPING)?;
        }
        fragment.clear();
        for writer in &mut fragment.writers {
            writer.asks_ahead = false;
            if writer.arena.as_ref().is_some_and(|a| a.lead > 0) {
                writer.push(0i64)?;
            }
        }
        let mut sink = Sink {
            rows,
            fragment,
            slot: 0,
            begun: false,
            coming: 0..0,
            ended: 0,
            parts: Parts::default(),
            cells: Vec::new(),
            chosen: None,
            written: 0,
        };
        sink.sort_parts(&[])?;
        Ok(sink)
    }

    fn sort_parts(&mut self, cells: &[u32]) -> Result<(), Overflow> {
        let count = self.rows.placed.len();
        let mut appended = try_filled(true, count, BOOKKEEPING).map_err(|_| Overflow::Memory)?;
        cells.iter().for_each(|&part| appended[part as usize] = false);
        self.parts.placed.clear();
        self.parts.arenas.clear();
        make_room(&mut self.parts.placed, count)?;
        make_room(&mut self.parts.arenas, count)?;
        for (i, (placed, appended)) in (0..).zip(self.rows.placed.iter().zip(appended)) {
            match placed {
                Some(placed) if appended => self.parts.placed.push((i, *placed)),
                Some(_) => {}
                None => self.parts.arenas.push(i),
            }
        }
        Ok(())
    }

    /// Writes these parts, which have one value per row, by [`Sink::cells`] from the next row on. The cells are in this
    /// order.
    pub fn choose_cells(&mut self, parts: &Arc<[u32]>) -> Result<(), Overflow> {
        if self
            .chosen
            .as_ref()
            .is_some_and(|c| Arc::ptr_eq(c, parts) || c == parts)
        {
            return Ok(());
        }
        let mut cells = Vec::new();
        make_room(&mut cells, parts.len())?;
        for &part in parts.iter() {
            let spec = self.rows.parts.get(part as usize).ok_or(Overflow::Row)?;
            let placed = self.rows.placed[part as usize].ok_or(Overflow::Row)?;
            if placed.stride != spec.size() {
                return Err(Overflow::Row);
            }
            // SAFETY: the part is within the slab, so its start is also within the slab.
            let start = unsafe { self.rows.slab.as_ptr().add(placed.offset) };
            cells.push(Cell::new(start, part, placed.stride, self.rows.rows()));
        }
        self.begun = false;
        self.sort_parts(parts)?;
        self.cells = cells;
        self.chosen = Some(parts.clone());
        Ok(())
    }

    /// Returns the cells of the current row.
    #[inline(always)]
    pub fn cells(&mut self) -> Result<Cells<'_>, Overflow> {
        if !self.begun {
            return Err(Overflow::Row);
        }
        // SAFETY: this sink has claimed the slot and is borrowed exclusively; the cells belong to `rows`.
        Ok(unsafe { Cells::new(&self.cells, self.slot as usize, &mut self.written) })
    }

    /// Begins rows in consecutive slots, to be written column by column. All parts of the batch must be cells.
    #[inline]
    pub fn begin_rows(&mut self, slots: Range<u32>) -> Result<Columns<'_>, Overflow> {
        self.begun = false;
        if !(self.parts.placed.is_empty() && self.parts.arenas.is_empty()) {
            return Err(Overflow::Row);
        }
        let (first, end) = (slots.start as usize, slots.end as usize);
        make_room(&mut self.fragment.slots, end.saturating_sub(first))?;
        self.rows.claim_all(first..end)?;
        self.fragment.slots.extend(slots);
        // SAFETY: this sink has claimed the slots and is borrowed exclusively; the cells belong to `rows`.
        Ok(unsafe { Columns::new(&self.cells, first, end - first, &mut self.ended) })
    }

    /// Begins rows in consecutive slots. The caller requests their parts one by one.
    pub(crate) fn begin_parts(&mut self, slots: Range<u32>) -> Result<(), Overflow> {
        self.begun = false;
        self.make_room(slots.len())?;
        self.rows.claim_all(slots.start as usize..slots.end as usize)?;
        self.fragment.slots.extend(slots);
        Ok(())
    }

    /// Returns the number of rows that were started by any method.
    pub(crate) fn slots_begun(&self) -> usize {
        self.fragment.slots.len()
    }

    /// Returns the number of rows that were started in an arena.
    pub(crate) fn arena_rows(&self, part: usize) -> Option<usize> {
        let arena = self.fragment.writers.get(part)?.arena.as_ref()?;
        Some(arena.starts.len())
    }

    /// Returns the memory of a placed part in slots that this sink has claimed.
    pub(crate) fn placed_of<T: Element>(&mut self, part: usize, slots: Range<usize>) -> Result<&mut [T], Overflow> {
        let placed = self.rows.placed.get(part).copied().flatten().ok_or(Overflow::Row)?;
        if slots.end > self.rows.rows() || slots.start > slots.end || placed.stride % size_of::<T>() != 0 {
            return Err(Overflow::Row);
        }
        // SAFETY: the slots are within the batch (checked above), so the part's bytes for them are within the slab.
        let start = unsafe { self.rows.slab.as_ptr().add(placed.offset + slots.start * placed.stride) }.cast::<T>();
        if !start.is_aligned() {
            return Err(Overflow::Row);
        }
        // SAFETY: the slice covers initialized, aligned bytes (checked above). This sink has claimed the slots and is
        // borrowed exclusively while the slice exists. Any bit pattern is a valid element.
        Ok(unsafe { std::slice::from_raw_parts_mut(start, slots.len() * (placed.stride / size_of::<T>())) })
    }

    /// Returns the arena of a part.
    pub(crate) fn arena_of(&mut self, part: usize) -> Result<&mut Writer, Overflow> {
        let writer = self.fragment.writers.get_mut(part).ok_or(Overflow::Row)?;
        if writer.arena.is_none() {
            return Err(Overflow::Row);
        }
        Ok(writer)
    }

    /// Counts rows that were written part by part.
    pub(crate) fn end_by_part(&mut self, rows: usize) {
        self.ended += rows;
    }

    /// Makes the writer of a cell's part write to the cell.
    #[cold]
    pub fn begin_cell(&mut self, cell: u32) -> Result<(), Overflow> {
        if !self.begun {
            return Err(Overflow::Row);
        }
        let cell = self.cells.get(cell as usize).ok_or(Overflow::Row)?;
        let writer = &mut self.fragment.writers[cell.part() as usize];
        writer.start = cell.at(self.slot as usize).ok_or(Overflow::Row)?;
        (writer.len, writer.capacity) = (0, cell.size());
        Ok(())
    }

    /// Ends a write that [`Sink::begin_cell`] began. The cell must be full.
    #[cold]
    pub fn end_cell(&mut self, cell: u32) -> Result<(), Overflow> {
        let cell = self.cells.get(cell as usize).ok_or(Overflow::Row)?;
        let writer = &self.fragment.writers[cell.part() as usize];
        if writer.len != cell.size() {
            return Err(Overflow::Row);
        }
        self.written += 1;
        Ok(())
    }

    /// Claims consecutive slots whose rows begin next, in this order. This replaces one claim per row, which could
    /// contend with threads that fill other slots of the batch.
    pub fn claim(&mut self, slots: Range<u32>) -> Result<(), Overflow> {
        self.rows.claim_all(slots.start as usize..slots.end as usize)?;
        self.make_room(slots.len())?;
        self.coming = slots;
        Ok(())
    }

    /// Reserves the bookkeeping memory for this many additional rows.
    fn make_room(&mut self, rows: usize) -> Result<(), Overflow> {
        make_room(&mut self.fragment.slots, rows)?;
        let mut arenas = self
            .fragment
            .writers
            .iter_mut()
            .filter_map(|writer| writer.arena.as_mut());
        arenas.try_for_each(|arena| make_room(&mut arena.starts, rows))
    }

    /// From now on, prefetches memory one row before it is written. This pays off if records come from all over the
    /// memory and evict the batch from the caches, and if there are too many parts for the processor to predict the
    /// writes.
    pub fn ask_ahead(&mut self) {
        let many = self.fragment.writers.len() >= MANY_PARTS;
        let writers = self.fragment.writers.iter_mut();
        writers.for_each(|writer| writer.asks_ahead = many);
    }

    /// Begins the row in `slot`.
    #[inline]
    pub fn begin_row(&mut self, slot: u32) -> Result<(), Overflow> {
        self.begun = false;
        if slot == self.coming.start && slot < self.coming.end {
            self.coming.start += 1;
        } else {
            self.rows.claim(slot)?;
        }
        (self.slot, self.begun, self.written) = (slot, true, 0);
        push(&mut self.fragment.slots, slot)?;
        let slab = self.rows.slab.as_ptr();
        for &(part, p) in &self.parts.placed {
            let writer = &mut self.fragment.writers[part as usize];
            // SAFETY: `slot < rows` (claimed), so the row's `stride` bytes are within the slab. They are initialized,
            // and only this sink uses them until the batch is complete.
            writer.start = unsafe { slab.add(p.offset + slot as usize * p.stride) };
            (writer.len, writer.capacity) = (0, p.stride);
        }
        for &part in &self.parts.arenas {
            let writer = &mut self.fragment.writers[part as usize];
            if let Some(arena) = &mut writer.arena {
                push(&mut arena.starts, writer.len - arena.lead)?;
            }
        }
        Ok(())
    }

    /// Ends the row. Every placed part must be full.
    #[inline]
    pub fn end_row(&mut self) -> Result<(), Error> {
        let mut full = self.written == self.cells.len();
        for &(part, _) in &self.parts.placed {
            let writer = &self.fragment.writers[part as usize];
            full &= writer.len == writer.capacity;
        }
        if !(full && self.begun) {
            return Err(Error::new(
                ErrorKind::Internal,
                "a source left a part of a row unwritten",
            ));
        }
        self.begun = false;
        self.ended += 1;
        Ok(())
    }

    /// Returns the parts of all columns.
    pub fn parts(&self) -> &Arc<[Part]> {
        self.rows.parts()
    }

    /// Returns the slot of the current row.
    #[inline]
    pub fn slot(&self) -> u32 {
        self.slot
    }

    /// Returns the writer of a part, by its index among the parts of all columns.
    #[inline(always)]
    pub fn writer(&mut self, part: usize) -> &mut Writer {
        &mut self.fragment.writers[part]
    }

    /// Returns the writers of a text's lengths and of its bytes.
    #[inline(always)]
    pub fn text_writers(&mut self, to: TextParts) -> Result<(&mut Writer, &mut Writer), Overflow> {
        let both = [to.lengths as usize, to.bytes as usize];
        let [lengths, bytes] = self
            .fragment
            .writers
            .get_disjoint_mut(both)
            .map_err(|_| Overflow::Row)?;
        Ok((lengths, bytes))
    }

    /// Counts keys of the column with this part that were read, and how many of these were left out. All parts of a
    /// column have one count.
    #[inline]
    pub fn count_keys(&mut self, part: usize, read: usize, dropped: usize) -> Result<(), Overflow> {
        if self.fragment.keys.is_empty() {
            self.begin_key_counts()?;
        }
        let count = self.fragment.keys.get_mut(part).ok_or(Overflow::Row)?;
        *count += KeyCount {
            read: read as u64,
            dropped: dropped as u64,
        };
        Ok(())
    }

    #[cold]
    fn begin_key_counts(&mut self) -> Result<(), Overflow> {
        let parts = self.rows.parts.len();
        make_room(&mut self.fragment.keys, parts)?;
        self.fragment.keys.resize(parts, KeyCount::default());
        Ok(())
    }

    /// Ends the task. Rows that were started but not ended don't count as filled, so their batch can't be completed.
    pub fn finish(self) -> Fragment {
        self.rows.add_filled(self.ended);
        self.fragment
    }
}

#[cfg(test)]
mod tests;
