//! Parts of one value a row, written where they belong.
//!
//! A [`Writer`](crate::Writer) knows how far it has come, which has to be set up and checked for each row. Where a row
//! has one value of a part, there is nothing to know: its place follows from the slot. Rows in consecutive slots, of
//! which every part has one value, can be written column by column.
//!
//! # Why this is sound
//!
//! A cell knows the memory of a part for all slots. [`Cells`] is made for a slot that a sink has claimed, and lives no
//! longer than the sink is borrowed; a write is of exactly the cell's size. [`Columns`] is made for a stretch of such
//! slots.
#![allow(unsafe_code)]

use crate::error::{Error, ErrorKind};
use crate::writer::{Element, Overflow};

/// A part of one value a row.
///
/// Invariant: `start` is valid for writes of `rows * size` bytes, of which each sink accesses those of slots it
/// claimed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Cell {
    start: *mut u8,
    part: u32,
    size: u32,
    rows: usize,
}

// SAFETY: it is an address; whoever dereferences it has claimed the slot.
unsafe impl Send for Cell {}

impl Cell {
    pub(crate) fn new(start: *mut u8, part: u32, size: usize, rows: usize) -> Self {
        // One element: eight bytes at most.
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

    /// Where the value of a slot is.
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
    /// `slot` is one of the cells' rows, claimed by whoever calls, and written by nobody else meanwhile.
    #[inline(always)]
    pub(crate) unsafe fn new(cells: &'s [Cell], slot: usize, written: &'s mut usize) -> Self {
        Cells { cells, slot, written }
    }

    /// Writes the value of a cell. [`Cells::written`] must be told.
    #[inline(always)]
    pub fn put<T: Element>(&self, cell: u32, value: T) -> Result<(), Overflow> {
        let Some(cell) = self.cells.get(cell as usize) else {
            return Err(Overflow::Row);
        };
        if cell.size as usize != size_of::<T>() {
            return Err(Overflow::Row);
        }
        // SAFETY: the part has `size_of::<T>()` bytes for each slot, and this one is ours alone (see `new`).
        unsafe { cell.start.cast::<T>().add(self.slot).write_unaligned(value) };
        Ok(())
    }

    /// Counts cells that were written. Unless it counts each cell of a row once, the row is not complete.
    #[inline(always)]
    pub fn written(self, n: usize) {
        *self.written += n;
    }
}

/// Rows in consecutive slots, column by column.
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
    /// The slots from `first` on, `rows` many, are the cells', claimed by whoever calls, and written by nobody else
    /// meanwhile.
    pub(crate) unsafe fn new(cells: &'s [Cell], first: usize, rows: usize, ended: &'s mut usize) -> Self {
        Columns {
            cells,
            first,
            rows,
            written: 0,
            ended,
        }
    }

    /// Writes the values of the next cell, one for each row.
    #[inline(always)]
    pub fn put<T: Element>(&mut self, values: &[T]) -> Result<(), Overflow> {
        let Some(cell) = self.cells.get(self.written) else {
            return Err(Overflow::Row);
        };
        if cell.size as usize != size_of::<T>() || values.len() != self.rows {
            return Err(Overflow::Row);
        }
        // SAFETY: the part has `size_of::<T>()` bytes for each slot, and these are ours alone (see `new`), so nobody
        // has a reference to them.
        unsafe {
            let to = cell.start.add(self.first * size_of::<T>());
            std::ptr::copy_nonoverlapping(values.as_ptr().cast::<u8>(), to, size_of_val(values));
        }
        self.written += 1;
        Ok(())
    }

    /// Ends the rows: each cell must have been written.
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
