//! The locations of elements at levels where a row may have any number of elements.

use fastpipe_batch::{Result, Span, try_collect, try_reserve, try_with_capacity};

use crate::layout::LevelPart;
use crate::slots::{ROWS, reserve};

/// The start of a row that was drawn.
const NOWHERE: usize = usize::MAX;

/// The locations of the rows' elements at a level.
#[derive(Debug, Default)]
pub(crate) struct Arena {
    /// The range of each row, by slot.
    pub(crate) spans: Vec<Span>,
    /// Start and slot of each non-empty row, by start. Drawn rows are included: their slot has another start by now.
    rows: Vec<(usize, u32)>,
    /// Elements in the arena, including holes.
    pub(crate) filled: usize,
    /// Elements of rows that haven't been drawn.
    pub(crate) live: usize,
    /// Capacity of the arena in elements.
    pub(crate) room: usize,
}

impl Arena {
    pub(crate) fn spans_of(&self, slots: &[u32]) -> Result<Vec<Span>> {
        try_collect(slots.iter().map(|&slot| self.spans[slot as usize]), ROWS)
    }

    /// Adds rows that are appended to the arena, given their ends in a chunk. `made` is the number of slots.
    pub(crate) fn add(&mut self, slots: &[u32], ends: &[usize], made: usize) -> Result<()> {
        let new = made.saturating_sub(self.spans.len());
        try_reserve(&mut self.spans, new, ROWS)?;
        try_reserve(&mut self.rows, slots.len(), ROWS)?;
        self.spans.resize(made, Span::default());
        for (&slot, ends) in slots.iter().zip(ends.windows(2)) {
            let len = ends[1] - ends[0];
            self.spans[slot as usize] = Span {
                start: self.filled,
                len,
            };
            if len > 0 {
                self.rows.push((self.filled, slot));
                self.filled += len;
                self.live += len;
            }
        }
        Ok(())
    }

    /// Removes rows that were drawn.
    pub(crate) fn forget(&mut self, slots: &[u32]) {
        for &slot in slots {
            let span = std::mem::replace(&mut self.spans[slot as usize], Span { start: NOWHERE, len: 0 });
            self.live -= span.len;
        }
    }

    /// Closes the holes. Returns the ranges of elements to move, and their new starts.
    pub(crate) fn compact(&mut self) -> Result<Vec<(Span, usize)>> {
        let mut moves: Vec<(Span, usize)> = try_with_capacity(self.rows.len(), ROWS)?;
        let mut filled = 0;
        self.rows.retain_mut(|(start, slot)| {
            let span = &mut self.spans[*slot as usize];
            if span.start != *start || span.len == 0 {
                return false;
            }
            match moves.last_mut() {
                Some((last, _)) if last.start + last.len == *start => last.len += span.len,
                _ => moves.push((*span, filled)),
            }
            span.start = filled;
            *start = filled;
            filled += span.len;
            true
        });
        self.filled = filled;
        Ok(moves)
    }
}

/// Performs the moves of a compaction, after which `filled` elements remain, and reserves memory for `room` elements.
pub(crate) fn part_room<T: Copy>(
    part: &LevelPart,
    data: &mut Vec<T>,
    moves: &[(Span, usize)],
    filled: usize,
    room: usize,
) -> Result<()> {
    for &(from, to) in moves {
        let from = from.start * part.width..(from.start + from.len) * part.width;
        if from.start != to * part.width {
            data.copy_within(from, to * part.width);
        }
    }
    data.truncate(filled * part.width);
    reserve(data, room.saturating_mul(part.width))
}
