//! Rows in batches of another size, in order.

use fastpipe_batch::{OutOfBounds, Result, try_reserve};

use crate::chunk::{Byte, Chunk, elements};
use crate::copies::{Copies, Which, copy_all};
use crate::layout::{LevelPart, RowLayout};
use crate::slots::ROWS;
use crate::targets::{BatchSize, Targets};

/// Cuts chunks into batches, in order.
///
/// Rows go from a chunk straight to their batch; only those at its end that don't fill a batch are kept.
#[derive(Debug)]
pub struct InOrder {
    layout: RowLayout,
    batch_size: usize,
    threads: usize,
    /// Elements of the rows that are kept, level by level.
    kept: Vec<usize>,
    lengths: Vec<Vec<i64>>,
    values: Vec<Vec<Byte>>,
}

impl InOrder {
    /// Cuts rows of this layout into batches of `batch_size`, and copies them with at most this many threads.
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

    /// Memory for rows, in bytes.
    pub fn nbytes(&self) -> usize {
        let lengths: usize = self.lengths.iter().map(|data| data.capacity() * size_of::<i64>()).sum();
        lengths + self.values.iter().map(Vec::capacity).sum::<usize>()
    }

    /// What the next batch takes, if there are enough rows in what was kept and in the chunk from row `from` on, or if
    /// no more come. Otherwise the chunk's rows are kept, and `from` is behind them.
    ///
    /// # Errors
    ///
    /// If there is no memory to keep them in.
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

    /// Copies the batch that `advance` told of, and moves `from` behind its rows.
    ///
    /// # Errors
    ///
    /// If it doesn't fit into `targets` exactly.
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

/// Two stretches, one behind the other.
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
