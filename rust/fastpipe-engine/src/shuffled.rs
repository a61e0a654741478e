//! Rows in batches of another size, shuffled through a buffer.
//!
//! A row that comes in gets a slot, which it keeps until it is drawn: what is shuffled are slots. Elements of level 0 lie at
//! their slots. The elements of other levels, of which rows have any number, are appended to an arena; what was drawn leaves
//! a hole there, and when the arena is full it is compacted, in place, or grown if that frees less than half. So a row is
//! moved in once and out once, its variable part about once more, and the memory is at most about twice that of the rows.

use fastpipe_batch::{OutOfBounds, Span, reserve_large};
use fastpipe_order::{FisherYates, Key};

use crate::copies::{Copies, Which, copy_all};
use crate::rows::{Byte, Chunk, Part, Ready, RowLayout, Targets, elements};
use crate::slots::Slots;

/// The row buffer of a shuffle: a Fisher-Yates draw over a window, see [`FisherYates`].
#[derive(Debug)]
pub struct Shuffled {
    layout: RowLayout,
    batch_size: usize,
    /// Rows that a whole batch is drawn from.
    needed: usize,
    threads: usize,
    order: FisherYates<u32>,
    slots: Slots,
    /// The slots of the batch that is about to be copied.
    drawn: Vec<u32>,
    /// Levels from 1.
    levels: Vec<Level>,
    lengths: Vec<Vec<i64>>,
    values: Vec<Vec<Byte>>,
}

/// Where the rows have their elements, at a level.
#[derive(Debug, Default)]
struct Level {
    /// By slot.
    spans: Vec<Span>,
    /// The rows that have any, by where they start: drawn ones, too, whose slot has another start by now.
    rows: Vec<(usize, u32)>,
    /// Elements in the arena, with holes.
    filled: usize,
    /// Elements of rows that weren't drawn.
    live: usize,
    /// Elements for which there is memory.
    room: usize,
}

/// The buffer may take in this fraction of a batch's needs beyond them: the more at once, the closer together the slots.
const SLACK: u32 = 4;
/// Up to so many bytes of a part are asked for at once.
const AT_ONCE: usize = 64 << 20;
/// The start of no row.
const NOWHERE: usize = usize::MAX;

impl Shuffled {
    /// Shuffles rows of this layout through a window of `span`, into batches of `batch_size`, and copies them with at most
    /// so many threads. The window and the batch together have at most 2^32 - 1 rows.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if they have more.
    pub fn new(layout: RowLayout, batch_size: usize, span: u64, key: Key, threads: usize) -> Result<Self, OutOfBounds> {
        let batch_size = batch_size.max(1);
        let needed = span.max(1).checked_add(batch_size as u64 - 1).ok_or(OutOfBounds)?;
        let most = u32::try_from(needed).map_err(|_| OutOfBounds)?;
        Ok(Shuffled {
            levels: layout.lengths.iter().map(|_| Level::default()).collect(),
            lengths: vec![Vec::new(); layout.lengths.len()],
            values: vec![Vec::new(); layout.values.len()],
            layout,
            batch_size,
            needed: needed as usize,
            threads,
            order: FisherYates::new(key, span),
            slots: Slots::new(most.saturating_add((batch_size as u32).max(most / SLACK))),
            drawn: Vec::new(),
        })
    }

    /// Memory for rows, in bytes.
    pub fn nbytes(&self) -> usize {
        let lengths: usize = self.lengths.iter().map(|data| data.capacity() * size_of::<i64>()).sum();
        lengths + self.values.iter().map(Vec::capacity).sum::<usize>()
    }

    /// What the next batch takes, if the buffer, with rows of the chunk from row `from` on, is full enough to draw from, or
    /// if no more come. Moves `from` behind the rows that were taken in.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`]: none that a caller could make.
    pub fn advance(
        &mut self,
        chunk: Option<&Chunk<'_>>,
        from: &mut usize,
        ended: bool,
    ) -> Result<Option<Ready>, OutOfBounds> {
        if let Some(chunk) = chunk
            && self.order.len() < self.needed
        {
            while *from < chunk.rows && self.slots.available() > 0 {
                let slots = self.slots.take(chunk.rows - *from);
                self.take_in(chunk, *from, &slots)?;
                *from += slots.len();
                self.order.extend(slots);
            }
        }
        if self.order.is_empty() || (self.order.len() < self.needed && !ended) {
            return Ok(None);
        }
        self.drawn.clear();
        self.drawn.extend_from_slice(self.order.draw(self.batch_size, ended));
        let count = |level: &Level| self.drawn.iter().map(|&slot| level.spans[slot as usize].len).sum();
        let elements = std::iter::once(self.drawn.len()).chain(self.levels.iter().map(count));
        Ok(Some(Ready {
            rows: self.drawn.len(),
            elements: elements.collect(),
        }))
    }

    /// Copies the batch that `advance` told of.
    ///
    /// # Errors
    ///
    /// [`OutOfBounds`] if it doesn't fit into `targets` exactly.
    pub fn copy(&mut self, ready: &Ready, mut targets: Targets<'_>) -> Result<(), OutOfBounds> {
        targets.check(&self.layout, ready)?;
        let spans: Vec<Vec<Span>> = self.levels.iter().map(|level| level.spans_of(&self.drawn)).collect();
        let which = |part: &Part| match part.level.checked_sub(1) {
            None => Which::From(&self.drawn),
            Some(level) => Which::Spans(&spans[level]),
        };
        let lengths = self.layout.lengths.iter().zip(&self.lengths).zip(&mut targets.offsets);
        let lengths = lengths.map(|((part, source), target)| Copies {
            source,
            width: part.width,
            which: which(part),
            target: &mut target[1..],
        });
        copy_all(lengths.collect(), 1)?;
        let values = self.layout.values.iter().zip(&self.values).zip(&mut targets.values);
        let values = values.map(|((part, source), target)| Copies {
            source,
            width: part.width,
            which: which(part),
            target,
        });
        copy_all(values.collect(), self.threads)?;
        targets.add_up();
        for level in &mut self.levels {
            level.forget(&self.drawn);
        }
        self.slots.give_back(&self.drawn);
        self.drawn.clear();
        Ok(())
    }

    /// Copies rows of a chunk, from row `from` on, to these slots.
    fn take_in(&mut self, chunk: &Chunk<'_>, from: usize, slots: &[u32]) -> Result<(), OutOfBounds> {
        let rows = from..from + slots.len();
        for level in 1..=self.levels.len() {
            let fresh = chunk.stretch(level, rows.clone()).len();
            self.make_room(level, fresh);
            let ends = &chunk.ends.0[level - 1][from..];
            self.levels[level - 1].add(slots, ends, self.slots.made());
        }
        let table = (self.slots.made(), self.slots.most());
        let parts = self.layout.lengths.iter().zip(&chunk.lengths).zip(&mut self.lengths);
        let parts = parts.filter_map(|((part, from), to)| {
            let fresh = elements(from, part, chunk.stretch(part.level, rows.clone()));
            take_in_part(part, fresh, to, slots, table, 0)
        });
        copy_all(parts.collect(), 1)?;
        let parts = self.layout.values.iter().zip(&chunk.values).zip(&mut self.values);
        let parts = parts.filter_map(|((part, from), to)| {
            let fresh = elements(from, part, chunk.stretch(part.level, rows.clone()));
            take_in_part(part, fresh, to, slots, table, Byte::uninit())
        });
        copy_all(parts.collect(), self.threads)
    }

    /// Makes room for so many more elements at a level.
    fn make_room(&mut self, level: usize, fresh: usize) {
        let arena = &mut self.levels[level - 1];
        if arena.filled.saturating_add(fresh) <= arena.room {
            return;
        }
        let moves = arena.compact();
        let wanted = (arena.live.saturating_add(fresh)).saturating_mul(2);
        arena.room = arena.room.max(wanted);
        let (filled, room) = (arena.filled, arena.room);
        for (part, data) in self.layout.lengths.iter().zip(&mut self.lengths) {
            if part.level == level {
                part_room(part, data, &moves, filled, room);
            }
        }
        for (part, data) in self.layout.values.iter().zip(&mut self.values) {
            if part.level == level {
                part_room(part, data, &moves, filled, room);
            }
        }
    }
}

impl Level {
    fn spans_of(&self, slots: &[u32]) -> Vec<Span> {
        slots.iter().map(|&slot| self.spans[slot as usize]).collect()
    }

    /// Notes rows that are appended to the arena, from their ends in a chunk. There are `made` slots.
    fn add(&mut self, slots: &[u32], ends: &[usize], made: usize) {
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
    }

    /// Forgets rows that were drawn.
    fn forget(&mut self, slots: &[u32]) {
        for &slot in slots {
            let span = std::mem::replace(&mut self.spans[slot as usize], Span { start: NOWHERE, len: 0 });
            self.live -= span.len;
        }
    }

    /// Moves rows together, and tells which stretches of elements are to be moved where.
    fn compact(&mut self) -> Vec<(Span, usize)> {
        let mut moves: Vec<(Span, usize)> = Vec::new();
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
        moves
    }
}

/// Makes the moves of a compaction, which leaves so many elements `filled`, and takes memory for `room`.
fn part_room<T: Copy>(part: &Part, data: &mut Vec<T>, moves: &[(Span, usize)], filled: usize, room: usize) {
    for &(from, to) in moves {
        let from = from.start * part.width..(from.start + from.len) * part.width;
        if from.start != to * part.width {
            data.copy_within(from, to * part.width);
        }
    }
    data.truncate(filled * part.width);
    reserve_large(data, room.saturating_mul(part.width));
}

/// Takes in the elements of rows: appends them to their arena, or says how they are to be copied to their slots, of which
/// there are `made` and may be `most`.
fn take_in_part<'a, T: Copy>(
    part: &Part,
    fresh: &'a [T],
    data: &'a mut Vec<T>,
    slots: &'a [u32],
    (made, most): (usize, usize),
    blank: T,
) -> Option<Copies<'a, T>> {
    if part.level > 0 {
        data.extend_from_slice(fresh);
        return None;
    }
    if made * part.width > data.capacity() {
        // Memory costs nothing before it is written, moving it does.
        let at_once = AT_ONCE.checked_div(part.width * size_of::<T>()).unwrap_or(0);
        reserve_large(data, most.min(at_once.max(made.saturating_mul(2))) * part.width);
    }
    data.resize(made * part.width, blank);
    Some(Copies {
        source: fresh,
        width: part.width,
        which: Which::To(slots, 0),
        target: data,
    })
}
