//! What is planned: a few batches ahead of those that are begun, and always up to the first of the next window.

use fastpipe_order::{BatchPlan, Content, PlanError};

use super::{Admission, Begun};
use crate::options::Options;
use crate::order_memory::unplanned;

/// Batches under way at most, if the consumer doesn't ask for a number.
const MOST_AHEAD: u64 = 256;

/// Bytes of batches under way beyond which it takes a request to have more of them.
const MOST_BYTES_AHEAD: u64 = 64 << 20;

/// Rows planned ahead at most; 8 bytes each.
const MOST_ROWS_PLANNED: u64 = 1 << 20;

impl Admission {
    /// Plans the next batch, of the next epoch if need be, unless the pass is closed meanwhile.
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
                // An endless pass over nothing would never yield.
                self.complete = true;
            } else {
                let next = cursor.order().epoch(cursor.current_epoch() + 1)?;
                *cursor = next;
            }
        }
        Ok(())
    }

    /// Whether to plan one more batch than are planned: up to `ahead`, and all of the window that is being read, or
    /// whatever more could be fetched if it were known.
    pub(super) fn should_plan(&self, ahead: u64, could_fetch: bool) -> bool {
        let planned = self.planned.len() as u64;
        let last = self.planned.back();
        let window = last.map_or(self.window, |plan| plan.window.map(|window| (plan.epoch, window)));
        let within = window.is_some() && window == self.window;
        !self.complete && (planned < ahead || (within || could_fetch) && self.rows_planned < MOST_ROWS_PLANNED)
    }

    /// Takes out the batch that is begun next.
    pub(super) fn take_planned(&mut self) -> Option<BatchPlan> {
        let plan = self.planned.pop_front()?;
        self.rows_planned -= u64::from(plan.rows);
        self.window = plan.window.map(|window| (plan.epoch, window));
        self.next += 1;
        Some(plan)
    }

    /// Forgets batches that were handed over.
    pub(super) fn forget(&mut self, handed_over: u64) {
        while self.begun.front().is_some_and(|begun| begun.number < handed_over) {
            self.begun.pop_front();
        }
    }

    /// Lets go of what neither the next batch, of that number, nor one behind it needs.
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

    /// Whether this many threads have use for one more batch under way than the `ahead` that are in any case. Batches
    /// have that many bytes.
    pub(super) fn has_use_for_more(&self, under_way: u64, threads: u64, batch_bytes: u64) -> bool {
        let units = |begun: Option<&Begun>| begun.map_or(0, |begun| begun.units);
        let units = units(self.begun.back()) - units(self.begun.front()) + 1;
        // Batches of one unit wait for each other, so several units should be under way; and while one thread is at a
        // long one, the others need something to do.
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

    /// Bytes that units take of which later batches need more.
    pub(super) fn reserved(&self) -> u64 {
        self.sequence.reserved() + self.scatter.reserved()
    }
}
