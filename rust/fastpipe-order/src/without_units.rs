//! The rest of an epoch without some units, for example because they are damaged.
//!
//! The remaining rows keep their order and are cut into batches again. The result depends only on the order, the
//! position and the excluded units.

use std::collections::{HashMap, HashSet, VecDeque};
use std::sync::Arc;

use crate::cursor::{BatchPlan, Cursor, PartWalker};
use crate::failure::{Patience, PlanError, Result, collected, reserve, with_room};
use crate::order::Order;
use crate::plan::{Content, Groups, Picks, Row, Run};

/// A position in an epoch, and the units that are excluded from there on. For orders that aren't divided among ranks.
#[derive(Clone, Debug, Default)]
pub struct RemainingEpoch {
    /// Index of the epoch.
    pub epoch: u64,
    /// Batch of the whole epoch in which the rest begins, and the number of its rows before the rest.
    step: u64,
    offset: u32,
    without: Arc<HashSet<u64>>,
}

impl RemainingEpoch {
    /// Returns a whole epoch.
    pub fn of(epoch: u64) -> RemainingEpoch {
        RemainingEpoch {
            epoch,
            ..RemainingEpoch::default()
        }
    }

    /// Returns the remaining epoch after `rows` more rows, with one further unit excluded.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory for the search can't be allocated.
    pub fn behind(&self, order: &Arc<Order>, rows: u64, unit: u64) -> Result<RemainingEpoch> {
        let patience = &mut Patience(&mut || false);
        let mut pieces = Pieces::new(self, order, patience)?;
        let mut left = rows;
        while left > 0
            && let Some(piece) = pieces.next(left, patience)?
        {
            left -= u64::from(piece.rows);
        }
        let mut without = self.without.clone();
        Arc::make_mut(&mut without).insert(unit);
        pieces.without = without.clone();
        // Skip excluded rows now, so that later calls need not visit them again. There may be thousands of excluded
        // units.
        pieces.find(patience)?;
        Ok(RemainingEpoch {
            epoch: self.epoch,
            step: pieces.step,
            offset: pieces.offset,
            without,
        })
    }
}

impl Order {
    /// Returns a cursor over the rest of an epoch.
    ///
    /// # Errors
    ///
    /// [`PlanError`] if memory for the order can't be allocated.
    pub fn remaining_epoch(self: &Arc<Self>, rest: &RemainingEpoch) -> Result<Cursor> {
        let mut cursor = self.epoch(rest.epoch)?;
        cursor.part = Some(Box::new(RemainingWalker {
            pieces: Pieces::new(rest, self, &mut Patience(&mut || false))?,
            step: 0,
            rows: 0,
            released: VecDeque::new(),
            failed: None,
        }));
        Ok(cursor)
    }
}

/// Iterates over the rest of an epoch, batch by batch.
#[derive(Debug)]
struct RemainingWalker {
    pieces: Pieces,
    /// Number of batches and rows so far.
    step: u64,
    rows: u64,
    /// Units that are no longer needed after this many rows.
    released: VecDeque<(u64, Vec<u64>)>,
    /// The error of a batch that couldn't be planned. Some of its rows may be lost, so no further batch is planned.
    failed: Option<PlanError>,
}

impl PartWalker for RemainingWalker {
    fn batch(&mut self, order: &Order, patience: &mut Patience<'_>) -> Result<Option<BatchPlan>> {
        if let Some(failed) = self.failed {
            return Err(failed);
        }
        self.plan(order, patience)
            .inspect_err(|&failed| self.failed = Some(failed))
    }
}

impl RemainingWalker {
    fn plan(&mut self, order: &Order, patience: &mut Patience<'_>) -> Result<Option<BatchPlan>> {
        let (size, drop_last) = (order.settings().batch_size.max(1), order.settings().drop_last);
        let (mut batch, mut rows) = (Vec::new(), 0);
        let before = self.rows;
        while rows < size
            && let Some(piece) = self.pieces.next(u64::from(size - rows), patience)?
        {
            // When the whole epoch's batch releases a unit, its last rows may still be in an earlier batch of the rest.
            let released = self.pieces.released.drain(..);
            self.released
                .extend(released.map(|units| (before + u64::from(rows), units)));
            reserve(&mut batch, 1)?;
            batch.push((piece, rows));
            rows += piece.rows;
        }
        if rows == 0 || drop_last && rows < size {
            return Ok(None);
        }
        self.rows += u64::from(rows);
        self.step += 1;
        let mut released = Vec::new();
        while self.released.front().is_some_and(|(behind, _)| *behind <= before) {
            released.extend(self.released.pop_front().into_iter().flat_map(|(_, units)| units));
        }
        let after = self.pieces.state()?;
        Ok(Some(BatchPlan {
            groups: Groups::default(),
            epoch: self.pieces.cursor.current_epoch(),
            step: self.step - 1,
            batch: self.step - 1,
            rows,
            valid: rows,
            content: self.pieces.content(&batch)?,
            window: None,
            released,
            after,
        }))
    }
}

/// Consecutive rows of a unit.
#[derive(Clone, Copy, Debug)]
struct Piece {
    unit: u64,
    record: u32,
    rows: u32,
}

/// The rest of an epoch as a sequence of row ranges.
#[derive(Debug)]
struct Pieces {
    /// Cursor over the whole epoch.
    cursor: Cursor,
    without: Arc<HashSet<u64>>,
    /// The batch of the whole epoch that contains the next rows, and the number of its rows that are done.
    step: u64,
    offset: u32,
    /// The rest of that batch.
    batch: VecDeque<Piece>,
    /// Whether pieces are ranges of rows. Otherwise they are single rows.
    runs: bool,
    /// Units that batches have released since the list was last drained.
    released: Vec<Vec<u64>>,
}

impl Pieces {
    fn new(rest: &RemainingEpoch, order: &Arc<Order>, patience: &mut Patience<'_>) -> Result<Pieces> {
        let mut cursor = order.with_last()?.epoch(rest.epoch)?;
        cursor.seek(rest.step)?;
        let mut pieces = Pieces {
            cursor,
            without: rest.without.clone(),
            step: rest.step,
            offset: 0,
            batch: VecDeque::new(),
            runs: true,
            released: Vec::new(),
        };
        pieces.fill(patience)?;
        pieces.pass_over(rest.offset);
        Ok(pieces)
    }

    /// Loads the rows of the next batch of the whole epoch. Returns false at the end.
    fn fill(&mut self, patience: &mut Patience<'_>) -> Result<bool> {
        let Some(plan) = self.cursor.next_unless(patience.0).transpose()? else {
            return Ok(false);
        };
        self.released.push(plan.released);
        match plan.content {
            Content::Runs(runs) => self.batch.extend(runs.iter().map(|run| Piece {
                unit: run.unit,
                record: run.record,
                rows: run.rows,
            })),
            Content::Picks(picks) => {
                self.runs = false;
                self.batch.extend(picks.rows.iter().map(|row| Piece {
                    unit: picks.units[row.unit as usize],
                    record: row.record,
                    rows: 1,
                }));
            }
        }
        Ok(true)
    }

    fn pass_over(&mut self, mut rows: u32) {
        while rows > 0
            && let Some(piece) = self.take(u64::from(rows))
        {
            rows -= piece.rows;
        }
    }

    /// Advances to the next row that isn't excluded. Returns false at the end.
    fn find(&mut self, patience: &mut Patience<'_>) -> Result<bool> {
        loop {
            match self.batch.front() {
                Some(piece) if self.without.contains(&piece.unit) => {
                    self.offset += piece.rows;
                    self.batch.pop_front();
                }
                Some(_) => return Ok(true),
                None => {
                    let begun = self.offset > 0;
                    if !self.fill(patience)? {
                        return Ok(false);
                    }
                    (self.step, self.offset) = (self.step + u64::from(begun), 0);
                }
            }
        }
    }

    /// Returns the next piece that isn't excluded, with at most `most` rows.
    fn next(&mut self, most: u64, patience: &mut Patience<'_>) -> Result<Option<Piece>> {
        if !self.find(patience)? {
            return Ok(None);
        }
        Ok(self.take(most))
    }

    fn take(&mut self, most: u64) -> Option<Piece> {
        let front = self.batch.front_mut()?;
        // This is at most the row count of the piece, so the cast is lossless.
        let rows = u64::from(front.rows).min(most) as u32;
        let piece = Piece { rows, ..*front };
        (front.record, front.rows) = (front.record + rows, front.rows - rows);
        if front.rows == 0 {
            self.batch.pop_front();
        }
        self.offset += rows;
        Some(piece)
    }

    fn state(&mut self) -> Result<crate::State> {
        self.cursor.state()
    }

    /// Converts pieces, each with its first slot, to the content of a batch.
    fn content(&self, batch: &[(Piece, u32)]) -> Result<Content> {
        if self.runs {
            let run = |&(piece, slot): &(Piece, u32)| Run {
                unit: piece.unit,
                record: piece.record,
                slot,
                rows: piece.rows,
            };
            return Ok(Content::Runs(collected(batch.iter().map(run))?));
        }
        let mut picks = Picks {
            rows: with_room(batch.len())?,
            ..Picks::default()
        };
        let mut numbers = HashMap::new();
        for (piece, _) in batch {
            let unit = *numbers.entry(piece.unit).or_insert_with(|| {
                picks.units.push(piece.unit);
                picks.units.len() as u32 - 1
            });
            let record = piece.record;
            picks.rows.push(Row { unit, record });
        }
        Ok(Content::Picks(picks))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Kind, Settings, ShardBy, Units};

    fn order(kind: Kind, counts: &[u32], batch_size: u32, drop_last: bool) -> Arc<Order> {
        let settings = Settings {
            kind,
            batch_size,
            drop_last,
            shuffle_buffer: 20,
            seed: 3,
            shard_by: ShardBy::Batch,
            ..Settings::default()
        };
        let units = Arc::new(Units::new(counts.iter().copied()).unwrap());
        Arc::new(Order::new(&units, settings).unwrap())
    }

    fn rows(cursor: Cursor) -> Vec<Vec<(u64, u32)>> {
        let plans = cursor.map(Result::unwrap).map(|plan| {
            assert_eq!(plan.content.len(), plan.rows as usize);
            (0..plan.rows as usize)
                .filter_map(|slot| plan.content.at(slot))
                .collect()
        });
        plans.collect()
    }

    /// Units are never released before their last row, and all units except the last ones are released.
    fn check_released(cursor: Cursor) {
        let mut gone = HashSet::new();
        for plan in cursor.map(Result::unwrap) {
            gone.extend(plan.released);
            let used = (0..plan.rows as usize).filter_map(|slot| plan.content.at(slot));
            assert!(used.into_iter().all(|(unit, _)| !gone.contains(&unit)));
        }
    }

    proptest! {
        /// After any failures, the remaining rows are the rows of the epoch without the damaged units, in their order.
        #[test]
        fn what_remains_keeps_its_order(
            counts in prop::collection::vec(0..9u32, 1..30),
            batch_size in 1..12u32,
            drop_last: bool,
            kind in prop_oneof![Just(Kind::Sequential), Just(Kind::Block), Just(Kind::Buffer)],
            failures in prop::collection::vec((0..6u64, 0..30u64), 1..6),
        ) {
            let order = order(kind, &counts, batch_size, drop_last);
            let all = rows(order.with_last().unwrap().epoch(2).unwrap()).concat();
            let (mut rest, mut expected) = (RemainingEpoch::of(2), all);
            for (batches, unit) in failures {
                let unit = unit % counts.len() as u64;
                let behind = (batches * u64::from(batch_size)).min(expected.len() as u64);
                rest = rest.behind(&order, behind, unit).unwrap();
                expected.drain(..behind as usize);
                expected.retain(|row| row.0 != unit);
                let mut batches: Vec<_> = expected.chunks(batch_size as usize).map(<[_]>::to_vec).collect();
                if drop_last && batches.last().is_some_and(|last| last.len() < batch_size as usize) {
                    batches.pop();
                }
                prop_assert_eq!(rows(order.remaining_epoch(&rest).unwrap()), batches);
                check_released(order.remaining_epoch(&rest).unwrap());
            }
        }
    }

    #[test]
    fn units_skipped_at_once_are_not_visited() {
        let order = order(Kind::Sequential, &[10; 1000], 10, false);
        let mut rest = RemainingEpoch::of(0);
        for unit in 0..999 {
            rest = rest.behind(&order, 0, unit).unwrap();
            assert_eq!(rest.step, unit + 1 - u64::from(rest.offset == 10));
        }
        assert_eq!(rows(order.remaining_epoch(&rest).unwrap()).concat().len(), 10);
    }
}
