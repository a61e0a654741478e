//! Rows that are lost because their data is damaged, and going back to an earlier position of a sink.

use super::Sink;
use crate::error::Error;
use crate::fallible::try_collect;
use crate::key_count::KeyCount;
use crate::rows::BOOKKEEPING;
use crate::writer::Overflow;

/// A row of a batch whose record is damaged.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub struct LostRow {
    /// The row of the batch.
    pub slot: u32,
    /// The index of the unit in the source.
    pub unit: u64,
    /// The index of the record in the unit.
    pub record: u32,
}

/// A position of a sink, to which [`Sink::undo`] returns.
pub struct SinkPosition {
    slots: usize,
    ended: usize,
    lost: usize,
    /// The length of each writer in bytes, and its number of rows.
    lens: Vec<(usize, usize)>,
    keys: Vec<KeyCount>,
}

impl Sink<'_> {
    /// Fills a slot with zeros and empty values, and marks its row as lost.
    #[cold]
    pub fn lose(&mut self, row: LostRow) -> Result<(), Error> {
        self.fragment.lost.try_reserve(1).map_err(|_| Overflow::Memory)?;
        self.begin_row(row.slot)?;
        for &(part, placed) in &self.parts.placed {
            self.fragment.writers[part as usize].repeat(&[0], placed.stride)?;
        }
        for cell in 0..self.cells.len() {
            self.begin_cell(cell as u32)?;
            let (part, size) = (self.cells[cell].part() as usize, self.cells[cell].size());
            self.fragment.writers[part].repeat(&[0], size)?;
            self.end_cell(cell as u32)?;
        }
        self.end_row()?;
        self.fragment.lost.push(row);
        Ok(())
    }

    /// Returns the current position. All slots that were claimed must be filled.
    pub fn position(&self) -> Result<SinkPosition, Error> {
        let len = |writer: &crate::writer::Writer| match &writer.arena {
            Some(arena) => (writer.len, arena.starts.len()),
            None => (0, 0),
        };
        Ok(SinkPosition {
            slots: self.fragment.slots.len(),
            ended: self.ended,
            lost: self.fragment.lost.len(),
            lens: try_collect(self.fragment.writers.iter().map(len), BOOKKEEPING)?,
            keys: try_collect(self.fragment.keys.iter().copied(), BOOKKEEPING)?,
        })
    }

    /// Removes the rows that were begun after a position of this sink. Their slots can be filled again.
    #[cold]
    pub fn undo(&mut self, to: &SinkPosition) {
        self.begun = false;
        let kept = to.slots.min(self.fragment.slots.len());
        for slot in self.fragment.slots.drain(kept..) {
            self.rows.release(slot);
        }
        for slot in std::mem::take(&mut self.coming) {
            self.rows.release(slot);
        }
        self.ended = to.ended;
        self.fragment.lost.truncate(to.lost);
        self.fragment.keys.clone_from(&to.keys);
        for (writer, &(len, rows)) in self.fragment.writers.iter_mut().zip(&to.lens) {
            if let Some(arena) = &mut writer.arena {
                arena.starts.truncate(rows);
                writer.len = len.min(writer.len);
            }
        }
    }
}
