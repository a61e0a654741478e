//! Regroups rows into another batch size, shuffled through a buffer.

use fastpipe_batch::{Error, OutOfBounds, Place, Result, Span, try_reserve};
use fastpipe_order::{FisherYates, Key};

use crate::arena::{Arena, part_room};
use crate::chunk::{Byte, Chunk, elements};
use crate::copies::{Copies, Which, copy_all};
use crate::layout::{LevelPart, RowLayout};
use crate::retained_arrays::{Array, RetainedArrays, WIDE};
use crate::slots::{ROWS, Slots, make_room};
use crate::targets::{BatchSize, Targets};

/// The row buffer of a shuffle: a Fisher-Yates draw over a window, see [`FisherYates`].
#[derive(Debug)]
pub struct Shuffled {
    layout: RowLayout,
    batch_size: usize,
    /// Number of buffered rows that a whole batch is drawn from.
    needed: usize,
    threads: usize,
    order: FisherYates<u32>,
    slots: Slots,
    /// The slots of the batch that is about to be copied.
    drawn: Vec<u32>,
    /// The arenas of the levels from 1 on.
    levels: Vec<Arena>,
    lengths: Vec<Vec<i64>>,
    /// The tables and arenas of values, by part. They stay empty for retained parts.
    values: Vec<Vec<Byte>>,
    retained: RetainedArrays,
    /// Indices of the parts whose values stay in the incoming arrays, ascending.
    retained_parts: Vec<usize>,
}

/// The buffer may contain `1 / SLACK` more rows than it needs for a batch, or one more batch if that is larger. The
/// more rows come in at once, the closer together their slots are.
const SLACK: u32 = 4;

impl Shuffled {
    /// Shuffles rows of this layout through a window of `span` rows, into batches of `batch_size`, and copies them with
    /// at most this many threads. The window and the batch together have at most 2^32 - 1 rows. With `copy`, all parts
    /// are copied when they come in. Otherwise wide parts are [retained](Shuffled::retained_parts).
    ///
    /// # Errors
    ///
    /// If the window and the batch have more rows.
    pub fn new(layout: RowLayout, batch_size: usize, span: u64, key: Key, threads: usize, copy: bool) -> Result<Self> {
        let batch_size = batch_size.max(1);
        let needed = span.max(1).checked_add(batch_size as u64 - 1).ok_or(OutOfBounds)?;
        let most = u32::try_from(needed).map_err(|_| OutOfBounds)?;
        let most = most.saturating_add((batch_size as u32).max(most / SLACK));
        let is_retained = |part: &LevelPart| !copy && part.level == 0 && part.width >= WIDE;
        let retained_parts = (0..layout.values().len()).filter(|&i| is_retained(&layout.values()[i]));
        let retained_parts: Vec<usize> = retained_parts.collect();
        let widths = retained_parts.iter().map(|&i| layout.values()[i].width).collect();
        Ok(Shuffled {
            levels: layout.lengths().iter().map(|_| Arena::default()).collect(),
            lengths: vec![Vec::new(); layout.lengths().len()],
            values: vec![Vec::new(); layout.values().len()],
            layout,
            batch_size,
            needed: needed as usize,
            threads,
            order: FisherYates::new(key, span),
            slots: Slots::new(most),
            drawn: Vec::new(),
            retained: RetainedArrays::new(widths, most as usize),
            retained_parts,
        })
    }

    /// Size of the memory for rows in bytes, including retained arrays.
    pub fn nbytes(&self) -> usize {
        let lengths: usize = self.lengths.iter().map(|data| data.capacity() * size_of::<i64>()).sum();
        lengths + self.values.iter().map(Vec::capacity).sum::<usize>() + self.retained.nbytes()
    }

    /// Indices of the parts of values whose elements stay in the incoming arrays.
    pub fn retained_parts(&self) -> &[usize] {
        &self.retained_parts
    }

    /// Retains the parts [`retained_parts`](Shuffled::retained_parts) of a chunk. Must be called before the chunk is
    /// first passed to [`advance`](Shuffled::advance).
    ///
    /// # Errors
    ///
    /// If an array doesn't have the length of the chunk, or if the previous chunk still has rows to take in.
    pub fn retain(&mut self, rows: usize, arrays: Vec<Box<dyn Array>>) -> Result<()> {
        if self.retained_parts.is_empty() && arrays.is_empty() {
            return Ok(());
        }
        self.retained.retain(rows, arrays)
    }

    /// Takes rows of the chunk into the buffer, from row `from` on, and moves `from` past them. Returns the size of the
    /// next batch, if the buffer is full enough to draw from, or if no more rows come.
    ///
    /// # Errors
    ///
    /// If there isn't enough memory. Callers can't cause other errors.
    pub fn advance(&mut self, chunk: Option<&Chunk<'_>>, from: &mut usize, ended: bool) -> Result<Option<BatchSize>> {
        if let Some(chunk) = chunk
            && self.order.len() < self.needed
        {
            while *from < chunk.rows && self.slots.available() > 0 {
                let slots = self.slots.take(chunk.rows - *from)?;
                let room = self.order.try_reserve(slots.len());
                room.map_err(|_| Error::out_of_memory(slots.len() * size_of::<u32>(), ROWS))?;
                self.take_in(chunk, *from, &slots)?;
                *from += slots.len();
                self.order.extend(slots);
            }
        }
        if self.order.is_empty() || (self.order.len() < self.needed && !ended) {
            return Ok(None);
        }
        self.drawn.clear();
        try_reserve(&mut self.drawn, self.batch_size.min(self.order.len()), ROWS)?;
        self.drawn.extend_from_slice(self.order.draw(self.batch_size, ended));
        let count = |level: &Arena| self.drawn.iter().map(|&slot| level.spans[slot as usize].len).sum();
        let elements = std::iter::once(self.drawn.len()).chain(self.levels.iter().map(count));
        Ok(Some(BatchSize {
            rows: self.drawn.len(),
            elements: elements.collect(),
        }))
    }

    /// Copies the batch that `advance` returned.
    ///
    /// # Errors
    ///
    /// If `targets` doesn't have exactly the size of the batch.
    pub fn copy(&mut self, ready: &BatchSize, mut targets: Targets<'_>) -> Result<()> {
        targets.check(&self.layout, ready)?;
        let spans = self.levels.iter().map(|level| level.spans_of(&self.drawn));
        let spans: Vec<Vec<Span>> = spans.collect::<Result<_>>()?;
        let lengths = self
            .layout
            .lengths()
            .iter()
            .zip(&self.lengths)
            .zip(&mut targets.offsets);
        let lengths = lengths.map(|((part, source), target)| Copies {
            source,
            width: part.width,
            which: at_level(part.level, &self.drawn, &spans),
            target: &mut target[1..],
        });
        copy_all(lengths.collect(), 1)?;
        let places: Vec<Place> = if self.retained_parts.is_empty() {
            Vec::new()
        } else {
            self.retained.draw(&self.drawn)?
        };
        let sources = (0..self.retained_parts.len()).map(|k| self.retained.sources(k));
        let sources: Vec<_> = sources.collect::<Result<_>>()?;
        let values = self.layout.values().iter().zip(&self.values).zip(&mut targets.values);
        let values = values.enumerate().map(|(i, ((part, source), target))| Copies {
            source,
            width: part.width,
            which: match self.retained_parts.binary_search(&i) {
                Ok(k) => Which::Places(&sources[k], &places),
                Err(_) => at_level(part.level, &self.drawn, &spans),
            },
            target,
        });
        copy_all(values.collect(), self.threads)?;
        targets.add_up();
        self.retained.forget(&places);
        for level in &mut self.levels {
            level.forget(&self.drawn);
        }
        self.slots.give_back(&self.drawn);
        self.drawn.clear();
        Ok(())
    }

    /// Copies rows of a chunk, from row `from` on, to these slots.
    fn take_in(&mut self, chunk: &Chunk<'_>, from: usize, slots: &[u32]) -> Result<()> {
        let rows = from..from + slots.len();
        for level in 1..=self.levels.len() {
            let fresh = chunk.stretch(level, rows.clone()).len();
            self.make_room(level, fresh)?;
            let ends = &chunk.ends.0[level - 1][from..];
            self.levels[level - 1].add(slots, ends, self.slots.made())?;
        }
        let table = (self.slots.made(), self.slots.most());
        let parts = self.layout.lengths().iter().zip(&chunk.lengths).zip(&mut self.lengths);
        let parts = parts.filter_map(|((part, from), to)| {
            let fresh = elements(from, part, chunk.stretch(part.level, rows.clone()));
            take_in_part(part, fresh, to, slots, table, 0).transpose()
        });
        copy_all(parts.collect::<Result<_>>()?, 1)?;
        if !self.retained_parts.is_empty() {
            self.retained.take_in(slots, self.slots.made())?;
        }
        let parts = self.layout.values().iter().zip(&chunk.values).zip(&mut self.values);
        let parts = parts.enumerate().filter_map(|(i, ((part, from), to))| {
            if self.retained_parts.binary_search(&i).is_ok() {
                return None;
            }
            let fresh = elements(from, part, chunk.stretch(part.level, rows.clone()));
            take_in_part(part, fresh, to, slots, table, Byte::uninit()).transpose()
        });
        Ok(copy_all(parts.collect::<Result<_>>()?, self.threads)?)
    }

    /// Makes room for `fresh` more elements at a level.
    fn make_room(&mut self, level: usize, fresh: usize) -> Result<()> {
        let arena = &mut self.levels[level - 1];
        if arena.filled.saturating_add(fresh) <= arena.room {
            return Ok(());
        }
        let moves = arena.compact()?;
        let wanted = (arena.live.saturating_add(fresh)).saturating_mul(2);
        arena.room = arena.room.max(wanted);
        let (filled, room) = (arena.filled, arena.room);
        for (part, data) in self.layout.lengths().iter().zip(&mut self.lengths) {
            if part.level == level {
                part_room(part, data, &moves, filled, room)?;
            }
        }
        for (part, data) in self.layout.values().iter().zip(&mut self.values) {
            if part.level == level {
                part_room(part, data, &moves, filled, room)?;
            }
        }
        Ok(())
    }
}

/// Selects the elements of the rows at these slots, at a level.
fn at_level<'a, T>(level: usize, slots: &'a [u32], spans: &'a [Vec<Span>]) -> Which<'a, T> {
    match level.checked_sub(1) {
        None => Which::From(slots),
        Some(level) => Which::Spans(&spans[level]),
    }
}

/// Takes in the elements of rows: appends them to their arena, or returns the copy to their slots. The table has `made`
/// slots, out of at most `most`.
fn take_in_part<'a, T: Copy>(
    part: &LevelPart,
    fresh: &'a [T],
    data: &'a mut Vec<T>,
    slots: &'a [u32],
    (made, most): (usize, usize),
    blank: T,
) -> Result<Option<Copies<'a, T>>> {
    if part.level > 0 {
        // `Shuffled::make_room` has already reserved the memory.
        data.extend_from_slice(fresh);
        return Ok(None);
    }
    make_room(data, part.width, made, most, blank)?;
    Ok(Some(Copies {
        source: fresh,
        width: part.width,
        which: Which::To(slots, 0),
        target: data,
    }))
}
