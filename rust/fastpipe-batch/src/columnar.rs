//! Writes rows in consecutive slots part by part.
//!
//! Sources with finished columns write one part of many rows at once. A part's memory is either a range of slots or
//! consecutive ranges of an arena, one per row.

use std::ops::Range;

use crate::error::{Error, ErrorKind};
use crate::fallible::try_filled;
use crate::key_count::KeyCount;
use crate::sink::Sink;
use crate::writer::{Element, Overflow, Writer};

/// Rows in consecutive slots that are being written. The caller must request each part once and write all of it.
pub struct ColumnarRows<'s, 'a> {
    sink: &'s mut Sink<'a>,
    slots: Range<usize>,
    /// Whether each part was requested.
    asked: Vec<bool>,
    /// The last requested arena. Its number of rows is checked when the next part is requested.
    open: Option<usize>,
    /// Whether the caller reported that some rows can't be written.
    failed: bool,
}

impl<'a> Sink<'a> {
    /// Begins rows in consecutive slots, to be written part by part.
    pub fn begin_columnar(&mut self, slots: Range<u32>) -> Result<ColumnarRows<'_, 'a>, Error> {
        self.begin_parts(slots.clone())?;
        let asked = try_filled(false, self.parts().len(), "the bookkeeping of a batch's parts")?;
        Ok(ColumnarRows {
            sink: self,
            slots: slots.start as usize..slots.end as usize,
            asked,
            open: None,
            failed: false,
        })
    }
}

impl ColumnarRows<'_, '_> {
    /// Returns the number of rows.
    pub fn rows(&self) -> usize {
        self.slots.len()
    }

    /// Returns the slot of the first row.
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

    /// Marks the rows as failed: some of them can't be written. [`ColumnarRows::end`] will return an error, and parts
    /// that are requested after this call may be incomplete.
    pub fn fail(&mut self) {
        self.failed = true;
    }

    fn check_open(&mut self) -> Result<(), Overflow> {
        match self.open.take().filter(|_| !self.failed) {
            Some(part) if self.sink.arena_rows(part) != Some(self.sink.slots_begun()) => Err(Overflow::Row),
            _ => Ok(()),
        }
    }

    /// Returns the memory of a placed part for these rows. The caller must write all of it.
    pub fn placed<T: Element>(&mut self, part: usize) -> Result<&mut [T], Overflow> {
        self.ask(part)?;
        self.sink.placed_of(part, self.slots.clone())
    }

    /// Returns the arena of a part. The caller must begin each row in it, in order.
    pub fn arena(&mut self, part: usize) -> Result<ArenaRows<'_>, Overflow> {
        self.ask(part)?;
        self.open = Some(part);
        let writer = self.sink.arena_of(part)?;
        Ok(ArenaRows { writer })
    }

    /// Counts keys, like [`Sink::count_keys`].
    pub fn count_keys(&mut self, part: usize, keys: KeyCount) -> Result<(), Overflow> {
        self.sink.count_keys(part, keys.read as usize, keys.dropped as usize)
    }

    /// Ends the rows. Returns an error unless each part was requested and each row was started in each arena.
    pub fn end(mut self) -> Result<(), Error> {
        self.check_open()?;
        if self.failed || !self.asked.iter().all(|&asked| asked) {
            return Err(Error::new(
                ErrorKind::Internal,
                "a source left a part of some rows unwritten",
            ));
        }
        self.sink.end_by_part(self.slots.len());
        Ok(())
    }
}

/// The arena of a part, to which rows are appended in order.
pub struct ArenaRows<'w> {
    writer: &'w mut Writer,
}

impl ArenaRows<'_> {
    /// Begins the next row.
    #[inline]
    pub fn begin_row(&mut self) -> Result<(), Overflow> {
        self.writer.begin_arena_row()
    }

    /// Begins rows with these lengths in bytes and returns the memory of all of them. Its contents are arbitrary, and
    /// the caller must overwrite them.
    pub fn take_rows(&mut self, lens: impl Iterator<Item = usize>) -> Result<&mut [u8], Overflow> {
        let total = self.writer.begin_arena_rows(lens)?;
        self.writer.take(total)
    }

    /// Returns the writer to which the row's values are appended.
    #[inline]
    pub fn writer(&mut self) -> &mut Writer {
        self.writer
    }
}

#[cfg(test)]
mod tests {
    use crate::{DType, Error, Fragment, Overflow, Part, PartKind, Rows, Sink, SlabPool};

    fn rows() -> Rows {
        let part = |kind, depth, width| Part { kind, depth, width };
        let parts = [
            part(PartKind::Values(DType::I32), 0, 2),
            part(PartKind::Lengths, 0, 1),
            part(PartKind::Bytes, 1, 1),
        ];
        Rows::new(parts.into(), 4, &SlabPool::new(1)).unwrap()
    }

    fn fill(sink: &mut Sink<'_>, slots: std::ops::Range<u32>) -> Result<(), Error> {
        let texts: Vec<String> = slots.clone().map(|slot| "x".repeat(slot as usize)).collect();
        let mut columnar = sink.begin_columnar(slots.clone())?;
        for (out, slot) in columnar.placed::<i32>(0)?.chunks_exact_mut(2).zip(slots) {
            out.copy_from_slice(&[slot as i32, -(slot as i32)]);
        }
        for (out, text) in columnar.placed::<i64>(1)?.iter_mut().zip(&texts) {
            *out = text.len() as i64;
        }
        let mut arena = columnar.arena(2)?;
        for text in &texts {
            arena.begin_row()?;
            arena.writer().extend(text.as_bytes())?;
        }
        columnar.end()
    }

    #[test]
    fn parts_fill_their_slots() {
        let rows = rows();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        fill(&mut sink, 2..4).unwrap();
        fill(&mut sink, 0..2).unwrap();
        let fragment = sink.finish();
        assert_eq!(fragment.slots(), [2, 3, 0, 1]);
        assert_eq!(fragment.arena(2), (&b"xxxxxx"[..], &[0, 2, 5, 5][..]));
        let filled = rows.complete().unwrap();
        let numbers: Vec<i32> = filled.bytes()[filled.place(0).unwrap()]
            .chunks_exact(4)
            .map(|bytes| i32::from_le_bytes(bytes.try_into().unwrap()))
            .collect();
        assert_eq!(numbers, [0, 0, 1, -1, 2, -2, 3, -3]);
    }

    #[test]
    fn slots_are_claimed_once() {
        let rows = rows();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        fill(&mut sink, 1..3).unwrap();
        assert!(sink.begin_columnar(2..4).is_err());
        assert!(sink.begin_columnar(3..5).is_err());
    }

    #[test]
    fn parts_are_written_completely_and_once() {
        let rows = rows();
        let mut sink = Sink::new(&rows, Fragment::default()).unwrap();
        let mut columnar = sink.begin_columnar(0..2).unwrap();
        assert_eq!(columnar.placed::<i32>(0).unwrap().len(), 4);
        assert_eq!(columnar.placed::<i32>(0).unwrap_err(), Overflow::Row);
        // A part without a fixed size isn't placed, and a placed part has no arena.
        assert_eq!(columnar.placed::<u8>(2).unwrap_err(), Overflow::Row);
        assert!(columnar.arena(1).is_err());
        // A part was never requested.
        assert!(columnar.end().is_err());
        let mut columnar = sink.begin_columnar(2..4).unwrap();
        columnar.placed::<i32>(0).unwrap();
        columnar.placed::<i64>(1).unwrap();
        columnar.arena(2).unwrap().begin_row().unwrap();
        // A row is missing.
        assert!(columnar.end().is_err());
        let more = Rows::new(rows.parts().clone(), 4, &SlabPool::new(1)).unwrap();
        let mut other = Sink::new(&more, Fragment::default()).unwrap();
        let mut columnar = other.begin_columnar(0..2).unwrap();
        columnar.fail();
        columnar.arena(2).unwrap().begin_row().unwrap();
        columnar.placed::<i32>(0).unwrap();
        columnar.placed::<i64>(1).unwrap();
        assert!(columnar.end().is_err());
        sink.finish();
        assert!(rows.complete().is_err());
    }
}
