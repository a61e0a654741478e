//! Rows in consecutive slots, written part by part.
//!
//! Where columns are finished, a part of many rows is written at once: its memory in the slots, or its stretches of an arena,
//! one for each row.

use std::ops::Range;

use crate::error::{Error, ErrorKind};
use crate::fallible::try_filled;
use crate::sink::Sink;
use crate::writer::{Element, Overflow, Writer};

/// Rows that were begun in consecutive slots. Each part is asked for once, and all of it written.
pub struct Block<'s, 'a> {
    sink: &'s mut Sink<'a>,
    slots: Range<usize>,
    /// Which parts were asked for.
    asked: Vec<bool>,
    /// The arena that was asked for last; whether it has as many rows is looked at when the next one is asked for.
    open: Option<usize>,
}

impl<'s, 'a> Block<'s, 'a> {
    pub(crate) fn new(sink: &'s mut Sink<'a>, slots: Range<usize>) -> Result<Self, Error> {
        let asked = try_filled(false, sink.parts().len(), "what is noted of a batch's parts")?;
        Ok(Block {
            sink,
            slots,
            asked,
            open: None,
        })
    }

    /// Number of rows.
    pub fn rows(&self) -> usize {
        self.slots.len()
    }

    /// The first row's slot.
    pub fn first_slot(&self) -> usize {
        self.slots.start
    }

    fn ask(&mut self, part: usize) -> Result<(), Overflow> {
        self.check_open()?;
        match self.asked.get_mut(part) {
            Some(asked) if !*asked => *asked = true,
            _ => return Err(Overflow::Row),
        }
        Ok(())
    }

    fn check_open(&mut self) -> Result<(), Overflow> {
        match self.open.take() {
            Some(part) if self.sink.arena_rows(part) != Some(self.sink.slots_begun()) => Err(Overflow::Row),
            _ => Ok(()),
        }
    }

    /// The memory of a placed part for these rows: all of it is to be written.
    pub fn placed<T: Element>(&mut self, part: usize) -> Result<&mut [T], Overflow> {
        self.ask(part)?;
        self.sink.placed_of(part, self.slots.clone())
    }

    /// The arena of a part: each row is to be begun there, in their order.
    pub fn arena(&mut self, part: usize) -> Result<ArenaRows<'_>, Overflow> {
        self.ask(part)?;
        self.open = Some(part);
        self.sink.arena_of(part)
    }

    /// Ends the rows: each part must have been asked for, and each row begun in each arena.
    pub fn end(mut self) -> Result<(), Error> {
        self.check_open()?;
        if !self.asked.iter().all(|&asked| asked) {
            return Err(Error::new(
                ErrorKind::Internal,
                "a source left a part of some rows unwritten",
            ));
        }
        self.sink.end_block(self.slots.len());
        Ok(())
    }
}

/// The arena of a part, to which rows are appended one after the other.
pub struct ArenaRows<'w> {
    pub(crate) writer: &'w mut Writer,
}

impl ArenaRows<'_> {
    /// Begins the next row.
    #[inline]
    pub fn begin_row(&mut self) -> Result<(), Overflow> {
        self.writer.begin_arena_row()
    }

    /// What the row's values are appended to.
    #[inline]
    pub fn writer(&mut self) -> &mut Writer {
        self.writer
    }
}
