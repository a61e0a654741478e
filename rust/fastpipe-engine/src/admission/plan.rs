//! Planning: a few batches after the started ones, and always up to the first batch of the next window.

use fastpipe_order::{BatchPlan, Content, PlanError};

use super::{Admission, Begun};
use crate::options::Options;
use crate::order_memory::unplanned;

/// The maximum number of batches in flight if the consumer doesn't set it.
const MOST_AHEAD: u64 = 256;

/// Bytes of batches in flight above which more batches are started only if the consumer sets `prefetch`.
const MOST_BYTES_AHEAD: u64 = 64 << 20;

/// The maximum number of rows planned in advance; each takes 8 bytes.
const MOST_ROWS_PLANNED: u64 = 1 << 20;

impl Admission {
    /// Plans the next batch, which may be in the next epoch, unless the pass is closed during planning.
    pub(super) fn plan(&mut self, options: &Options, is_closed: &dyn Fn() -> bool) {
        if let Err(error) = self.plan_next(options, is_closed) {
            self.complete = true;
            self.unplanned = Some(unplanned(error));
        }
    }

    fn plan_next(&mut self, options: &Options, is_closed: &dyn Fn() -> bool) -> Result<(), PlanError> {
        let goes_on = |epoch: u64| options.end_epoch.is_none_or(|end| epoch < end);
        while !self.complete {
            let Some(cursor) = &mut self.cursor else { break };
            let wanted = options.limit.is_none_or(|limit| self.plans < limit);
            if !wanted || !goes_on(cursor.current_epoch()) {
                self.complete = true;
            } else if let Some(plan) = cursor.next_unless(&mut || is_closed()) {
                let plan = plan?;
                self.plans += 1;
                self.rows_planned += u64::from(plan.rows);
                self.planned.push_back(plan);
                return Ok(());
            } else if cursor.order().steps() == 0 {
                // An endless pass without batches would never return.
                self.complete = true;
            } else {
                let next = cursor.order().epoch(cursor.current_epoch() + 1)?;
                *cursor = next;
            }
        }
        Ok(())
    }

    /// Whether to plan one more batch: up to `ahead` batches, the rest of the window that is being read, and anything
    /// else that could already be fetched.
    pub(super) fn should_plan(&self, ahead: u64, could_fetch: bool) -> bool {
        let planned = self.planned.len() as u64;
        let last = self.planned.back();
        let window = last.map_or(self.window, |plan| plan.window.map(|window| (plan.epoch, window)));
        let within = window.is_some() && window == self.window;
        !self.complete && (planned < ahead || (within || could_fetch) && self.rows_planned < MOST_ROWS_PLANNED)
    }

    /// Removes and returns the batch that is started next.
    pub(super) fn take_planned(&mut self) -> Option<BatchPlan> {
        let plan = self.planned.pop_front()?;
        self.rows_planned -= u64::from(plan.rows);
        self.window = plan.window.map(|window| (plan.epoch, window));
        self.next += 1;
        Some(plan)
    }

    /// Drops batches that were delivered.
    pub(super) fn forget(&mut self, handed_over: u64) {
        while self.begun.front().is_some_and(|begun| begun.number < handed_over) {
            self.begun.pop_front();
        }
    }

    /// Releases units that neither the next batch, `number`, nor any later batch needs.
    pub(super) fn let_go(&mut self, number: u64) {
        let Some(plan) = self.planned.front() else { return };
        if self.epoch != plan.epoch {
            self.epoch = plan.epoch;
            self.sequence.keep_from(plan.epoch);
            self.scatter.keep_from(plan.epoch);
        }
        self.sequence.release(&plan.released);
        self.scatter.release(plan.epoch, &plan.released, number);
        if let Content::Runs(runs) = &plan.content
            && let Some(run) = runs.first()
        {
            self.sequence.begin_at(run);
        }
    }

    /// Whether `threads` threads have use for one more batch in flight beyond the `ahead` batches that are always
    /// allowed. Each batch has `batch_bytes` bytes.
    pub(super) fn has_use_for_more(&self, under_way: u64, threads: u64, batch_bytes: u64) -> bool {
        let units = |begun: Option<&Begun>| begun.map_or(0, |begun| begun.units);
        let units = units(self.begun.back()) - units(self.begun.front()) + 1;
        // Batches of the same unit wait for each other, so several units should be in flight. And while one thread
        // processes a long unit, the other threads need work.
        let enough = || {
            let cost: u64 = self.begun.iter().map(|begun| begun.cost).sum();
            let longest = self.begun.iter().map(|begun| begun.longest).max();
            units >= 2 * threads && cost >= threads * longest.unwrap_or(0)
        };
        threads > 1
            && self.sequence.is_in_use()
            && under_way < MOST_AHEAD
            && under_way * batch_bytes < MOST_BYTES_AHEAD
            && !enough()
    }

    /// Bytes reserved for units that later batches also need.
    pub(super) fn reserved(&self) -> u64 {
        self.sequence.reserved() + self.scatter.reserved()
    }
}
