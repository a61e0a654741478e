//! Regroups rows into another batch size, in order.

use fastpipe_batch::{OutOfBounds, Result, try_reserve};

use crate::chunk::{Byte, Chunk, elements};
use crate::copies::{Copies, Which, copy_all};
use crate::layout::{LevelPart, RowLayout};
use crate::slots::ROWS;
use crate::targets::{BatchSize, Targets};

/// Regroups chunks into batches, in order.
///
/// Rows are copied directly from a chunk to their batch. Only the rows at the end of a chunk that don't fill a batch
/// are kept.
#[derive(Debug)]
pub struct InOrder {
    layout: RowLayout,
    batch_size: usize,
    threads: usize,
    /// Number of kept elements, by level.
    kept: Vec<usize>,
    lengths: Vec<Vec<i64>>,
    values: Vec<Vec<Byte>>,
}

impl InOrder {
    /// Creates a regrouper into batches of `batch_size` rows. It copies with at most this many threads.
    pub fn new(layout: RowLayout, batch_size: usize, threads: usize) -> Self {
        InOrder {
            kept: vec![0; layout.lengths().len() + 1],
            lengths: vec![Vec::new(); layout.lengths().len()],
            values: vec![Vec::new(); layout.values().len()],
            layout,
            batch_size: batch_size.max(1),
            threads,
        }
    }

    /// Size of the kept rows' memory in bytes.
    pub fn nbytes(&self) -> usize {
        let lengths: usize = self.lengths.iter().map(|data| data.capacity() * size_of::<i64>()).sum();
        lengths + self.values.iter().map(Vec::capacity).sum::<usize>()
    }

    /// Returns the size of the next batch, if the kept rows and the chunk's rows from `from` on suffice, or if no more
    /// rows come. Otherwise it keeps the chunk's rows, and moves `from` past them.
    ///
    /// # Errors
    ///
    /// If there isn't enough memory to keep the rows.
    pub fn advance(&mut self, chunk: Option<&Chunk<'_>>, from: &mut usize, ended: bool) -> Result<Option<BatchSize>> {
        let fresh = chunk.map_or(0, |chunk| chunk.rows - *from);
        let rows = self.batch_size.min(self.kept[0] + fresh);
        if rows == self.batch_size || (ended && rows > 0) {
            let to = *from + (rows - self.kept[0]);
            let level = |(level, kept): (usize, &usize)| kept + chunk.map_or(0, |c| c.stretch(level, *from..to).len());
            return Ok(Some(BatchSize {
                rows,
                elements: self.kept.iter().enumerate().map(level).collect(),
            }));
        }
        if let Some(chunk) = chunk {
            let rows = *from..chunk.rows;
            let each = self.layout.lengths().iter().zip(&chunk.lengths);
            for (kept, (part, data)) in self.lengths.iter_mut().zip(each) {
                let fresh = elements(data, part, chunk.stretch(part.level, rows.clone()));
                try_reserve(kept, fresh.len(), ROWS)?;
                kept.extend_from_slice(fresh);
            }
            let each = self.layout.values().iter().zip(&chunk.values);
            for (kept, (part, data)) in self.values.iter_mut().zip(each) {
                let fresh = elements(data, part, chunk.stretch(part.level, rows.clone()));
                try_reserve(kept, fresh.len(), ROWS)?;
                kept.extend_from_slice(fresh);
            }
            for (level, kept) in self.kept.iter_mut().enumerate() {
                *kept += chunk.stretch(level, rows.clone()).len();
            }
            *from = chunk.rows;
        }
        Ok(None)
    }

    /// Copies the batch that `advance` returned, and moves `from` past its rows.
    ///
    /// # Errors
    ///
    /// If `targets` doesn't have exactly the size of the batch.
    pub fn copy(
        &mut self,
        chunk: Option<&Chunk<'_>>,
        from: &mut usize,
        ready: &BatchSize,
        mut targets: Targets<'_>,
    ) -> Result<()> {
        targets.check(&self.layout, ready)?;
        let to = *from + ready.rows.checked_sub(self.kept[0]).ok_or(OutOfBounds)?;
        let (mut lengths, mut values) = (Vec::new(), Vec::new());
        for (i, (part, target)) in self.layout.lengths().iter().zip(&mut targets.offsets).enumerate() {
            let fresh = chunk.map_or(&[][..], |c| {
                elements(c.lengths[i], part, c.stretch(part.level, *from..to))
            });
            push(&mut lengths, [&self.lengths[i], fresh], part, &mut target[1..]);
        }
        for (i, (part, target)) in self.layout.values().iter().zip(&mut targets.values).enumerate() {
            let fresh = chunk.map_or(&[][..], |c| {
                elements(c.values[i], part, c.stretch(part.level, *from..to))
            });
            push(&mut values, [&self.values[i], fresh], part, target);
        }
        copy_all(lengths, 1)?;
        copy_all(values, self.threads)?;
        targets.add_up();
        *from = to;
        self.kept.fill(0);
        self.lengths.iter_mut().for_each(Vec::clear);
        self.values.iter_mut().for_each(Vec::clear);
        Ok(())
    }
}

/// Adds copies of two ranges to consecutive places of the target.
fn push<'a, T>(copies: &mut Vec<Copies<'a, T>>, sources: [&'a [T]; 2], part: &LevelPart, target: &'a mut [T]) {
    let (first, second) = target.split_at_mut(sources[0].len());
    for (source, target) in sources.into_iter().zip([first, second]) {
        copies.push(Copies {
            source,
            width: part.width,
            which: Which::All,
            target,
        });
    }
}
