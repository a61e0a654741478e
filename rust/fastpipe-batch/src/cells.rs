//! Writes to parts that have exactly one value per row.
//!
//! A [`Writer`](crate::Writer) tracks its position, which must be set up and checked for each row. A part with one
//! value per row needs no position: the slot determines the address. If every part has one value per row, rows in
//! consecutive slots can be written column by column.
//!
//! # Why this is sound
//!
//! A cell stores the address of a part's memory, which covers all slots. A sink creates [`Cells`] for a slot that it
//! has claimed, and the borrow of the sink outlives them. Each write has exactly the cell's size. [`Columns`] is
//! created for a range of claimed slots.
#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind};
use crate::writer::{Element, Overflow};

/// A part with one value per row.
///
/// Invariant: `start` is valid for writes of `rows * size` bytes. Each sink accesses only the slots that it has
/// claimed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    start: *mut u8,
    part: u32,
    size: u32,
    rows: usize,
}

// SAFETY: a cell is only an address; code that dereferences it must have claimed the slot.
unsafe impl Send for Cell {}

impl Cell {
    pub(crate) fn new(start: *mut u8, part: u32, size: usize, rows: usize) -> Self {
        // A cell is one element, so its size is at most eight bytes.
        let size = size as u32;
        Cell {
            start,
            part,
            size,
            rows,
        }
    }

    pub(crate) fn part(&self) -> u32 {
        self.part
    }

    pub(crate) fn size(&self) -> usize {
        self.size as usize
    }

    /// Returns the address of a slot's value.
    pub(crate) fn at(&self, slot: usize) -> Option<*mut u8> {
        // SAFETY: within the part, by the invariant.
        (slot < self.rows).then(|| unsafe { self.start.add(slot * self.size()) })
    }
}

/// The cells of one row.
pub struct Cells<'s> {
    cells: &'s [Cell],
    slot: usize,
    written: &'s mut usize,
}

impl<'s> Cells<'s> {
    /// # Safety
    ///
    /// `slot` must be one of the cells' rows. The caller must have claimed it, and no other code may write to it while
    /// the returned value exists.
    #[inline(always)]
    pub(crate) unsafe fn new(cells: &'s [Cell], slot: usize, written: &'s mut usize) -> Self {
        Cells { cells, slot, written }
    }

    /// Writes the value of a cell. The caller must count it with [`Cells::written`].
    #[inline(always)]
    pub fn put<T: Element>(&self, cell: u32, value: T) -> Result<(), Overflow> {
        let Some(cell) = self.cells.get(cell as usize) else {
            return Err(Overflow::Row);
        };
        if cell.size as usize != size_of::<T>() {
            return Err(Overflow::Row);
        }
        // SAFETY: the part has `size_of::<T>()` bytes for each slot, and only this sink uses this slot (see `new`).
        unsafe { cell.start.cast::<T>().add(self.slot).write_unaligned(value) };
        Ok(())
    }

    /// Counts `n` written cells. A row is complete only after each of its cells was counted once.
    #[inline(always)]
    pub fn written(self, n: usize) {
        *self.written += n;
    }
}

/// Rows in consecutive slots that are written column by column.
pub struct Columns<'s> {
    cells: &'s [Cell],
    first: usize,
    rows: usize,
    written: usize,
    ended: &'s mut usize,
}

impl<'s> Columns<'s> {
    /// # Safety
    ///
    /// The `rows` slots that begin at `first` must be within the cells. The caller must have claimed them, and no other
    /// code may write to them while the returned value exists.
    pub(crate) unsafe fn new(cells: &'s [Cell], first: usize, rows: usize, ended: &'s mut usize) -> Self {
        Columns {
            cells,
            first,
            rows,
            written: 0,
            ended,
        }
    }

    /// Writes the values of the next cell. `values` must contain one value per row.
    #[inline(always)]
    pub fn put<T: Element>(&mut self, values: &[T]) -> Result<(), Overflow> {
        let Some(cell) = self.cells.get(self.written) else {
            return Err(Overflow::Row);
        };
        if cell.size as usize != size_of::<T>() || values.len() != self.rows {
            return Err(Overflow::Row);
        }
        // SAFETY: the part has `size_of::<T>()` bytes for each slot, and only this sink uses these slots (see `new`),
        // so no other references to them exist.
        unsafe {
            let to = cell.start.add(self.first * size_of::<T>());
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values));
        }
        self.written += 1;
        Ok(())
    }

    /// Ends the rows. Returns an error unless each cell was written.
    pub fn end(self) -> Result<(), Error> {
        if self.written != self.cells.len() {
            return Err(Error::new(
                ErrorKind::Internal,
                "a source left a part of some rows unwritten",
            ));
        }
        *self.ended += self.rows;
        Ok(())
    }
}
