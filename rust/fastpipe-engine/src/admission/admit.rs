//! Which batches are under way: as many as keep the threads busy, as the consumer asked for, and as memory allows.
//!
//! Batches are planned further ahead than they are begun. So the engine knows which units come next, and opens those of which
//! records will be picked, and lets the system read the others from its disk, before a batch waits for them. This matters most
//! where a window ends: all units of the next one are needed by its first batch.

use std::sync::Arc;
use std::sync::atomic::Ordering;

use fastpipe_batch::{Error, Result, Rows, SlabPool};
use fastpipe_order::{BatchPlan, Content, PlanError};

use super::{Admission, Begun};
use crate::batch::About;
use crate::batches::{Batches, Cost, Need};
use crate::lock::lock;
use crate::order_memory::unplanned;
use crate::shared::Shared;
use crate::telemetry::Activity;

/// Batches under way at most, if the consumer doesn't ask for a number.
const MOST_AHEAD: u64 = 256;

/// Bytes of batches under way beyond which it takes a request to have more of them.
const MOST_BYTES_AHEAD: u64 = 64 << 20;

/// Rows planned ahead at most; 8 bytes each.
const MOST_ROWS_PLANNED: u64 = 1 << 20;

impl Shared {
    /// Begins as many batches as may be under way.
    pub(crate) fn admit(self: &Arc<Self>) -> Result<()> {
        let mut admission = lock(&self.admission);
        // Before it looks: whoever takes a batch from now on asks again.
        self.admitting.store(false, Ordering::SeqCst);
        let (result, _) = self.telemetry.time(Activity::Plan, || self.admit_all(&mut admission));
        result
    }

    fn admit_all(self: &Arc<Self>, admission: &mut Admission) -> Result<()> {
        while !self.is_closed() {
            let number = admission.next;
            let handed_over = {
                let mut state = lock(&self.hand_over);
                state.begun = number;
                if state.end.is_some() {
                    return Ok(());
                }
                state.next
            };
            while admission.begun.front().is_some_and(|begun| begun.number < handed_over) {
                admission.begun.pop_front();
            }
            let under_way = number.saturating_sub(handed_over);
            if !self.has_room(admission, under_way) {
                break;
            }
            if admission.planned.is_empty() {
                self.plan(admission);
            }
            if admission.planned.is_empty() {
                let error = admission.unplanned.take();
                self.end_at(number, error);
                return Ok(());
            }
            self.let_go(admission, number);
            let Some(plan) = admission.planned.front() else { break };
            let Need { class, more, units } = self.need(admission, plan);
            let rows = self.rows_need(class, u64::from(plan.rows));
            let need = rows + more;
            (admission.rows_need, admission.need) = (rows, need);
            if !self.budget.fits(need + units) {
                if under_way > 0 {
                    break;
                }
                // What nobody needs any more is given back by tasks that end just now: the last one looks here again.
                let unused = self.budget.reserved() > admission.sequence.reserved() + admission.scatter.reserved();
                if unused && self.schedule.is_busy() {
                    self.short_of_memory.store(true, Ordering::SeqCst);
                    break;
                }
            }
            let Some(plan) = admission.planned.pop_front() else {
                break;
            };
            admission.rows_planned -= u64::from(plan.rows);
            admission.window = plan.window.map(|window| (plan.epoch, window));
            if admission.prepared > 0 {
                admission.prepared -= 1;
                if let Content::Runs(runs) = &plan.content {
                    self.no_longer_ahead(&mut admission.sequence, runs);
                }
            }
            admission.next += 1;
            if under_way >= admission.most_under_way {
                admission.most_under_way = under_way + 1;
                self.memory.keep_batches(admission.most_under_way);
            }
            if let Err(error) = self.begin(admission, number, plan, need) {
                self.end_at(number, Some(error));
                return Ok(());
            }
        }
        if !self.is_closed() {
            self.look_ahead(admission);
        }
        Ok(())
    }

    /// Ends the pass at a batch, in the place of which an error stands, if any; those before are still handed over.
    fn end_at(&self, number: u64, error: Option<Error>) {
        let mut state = lock(&self.hand_over);
        state.end = Some(number + u64::from(error.is_some()));
        if let Some(error) = error {
            state.put(number, Err(error));
        }
        self.changed.notify_all();
    }

    /// Whether one more batch may be under way, as far as their number goes.
    fn has_room(&self, admission: &Admission, under_way: u64) -> bool {
        if let Some(prefetch) = self.options.prefetch {
            return under_way < prefetch.max(1) as u64;
        }
        let threads = self.schedule.allowed() as u64;
        if under_way < self.ahead() {
            return true;
        }
        let units = |begun: Option<&Begun>| begun.map_or(0, |begun| begun.units);
        let units = units(admission.begun.back()) - units(admission.begun.front()) + 1;
        // Batches of one unit wait for each other, so several units should be under way; and while one thread is at a long
        // one, the others need something to do.
        let enough = || {
            let cost: u64 = admission.begun.iter().map(|begun| begun.cost).sum();
            let longest = admission.begun.iter().map(|begun| begun.longest).max();
            units >= 2 * threads && cost >= threads * longest.unwrap_or(0)
        };
        threads > 1
            && admission.sequence.is_in_use()
            && under_way < MOST_AHEAD
            && under_way * self.batch_bytes.get().copied().unwrap_or(0) < MOST_BYTES_AHEAD
            && !enough()
    }

    /// Batches that may be under way in any case.
    pub(crate) fn ahead(&self) -> u64 {
        match (self.options.prefetch, self.schedule.allowed() as u64) {
            (Some(prefetch), _) => prefetch.max(1) as u64,
            (None, 1) => 2,
            (None, threads) => threads + 2,
        }
    }

    /// What a batch will take.
    fn need(&self, admission: &Admission, plan: &BatchPlan) -> Need {
        match &plan.content {
            Content::Runs(runs) => self.needed(&admission.sequence, plan.epoch, runs),
            Content::Picks(picks) => self.needed(&admission.scatter, plan.epoch, picks),
        }
    }

    /// Bytes that the rows of a batch will take.
    pub(crate) fn rows_need(&self, class: u32, rows: u64) -> u64 {
        let placed = Rows::placed_bytes(&self.parts, rows as usize).unwrap_or(usize::MAX / 4);
        let arenas = self.costs.arena_bytes(class, rows);
        // Slabs are a little larger than what is in them.
        SlabPool::size(placed) as u64 + arenas + arenas / 4
    }

    /// Bytes that a unit will take while it is open.
    pub(crate) fn unit_bytes(&self, unit: u64) -> u64 {
        let info = self.source.describe(unit);
        let stored = info.range.map_or(0, |range| range.len);
        // Buffers are a little larger than what is in them, and beside them stands where records start.
        let larger = |bytes: u64| bytes + bytes / 8 + (64 << 10);
        info.held.map_or_else(
            || larger(self.costs.opened_bytes(info.class, stored)) + 4 * u64::from(info.rows),
            larger,
        )
    }

    /// Bytes that are fetched for a unit besides, while it is being opened.
    pub(crate) fn fetched_bytes(&self, unit: u64) -> u64 {
        let info = self.source.describe(unit);
        let stored = info.range.filter(|_| info.apart).map_or(0, |range| range.len);
        stored + stored / 16
    }

    /// Plans the next batch, of the next epoch if need be.
    fn plan(&self, admission: &mut Admission) {
        if let Err(error) = self.plan_next(admission) {
            admission.complete = true;
            admission.unplanned = Some(unplanned(error));
        }
    }

    fn plan_next(&self, admission: &mut Admission) -> Result<(), PlanError> {
        let goes_on = |epoch: u64| self.options.end_epoch.is_none_or(|end| epoch < end);
        while !admission.complete {
            let Some(cursor) = &mut admission.cursor else { break };
            let wanted = self.options.limit.is_none_or(|limit| admission.plans < limit);
            if !wanted || !goes_on(cursor.current_epoch()) {
                admission.complete = true;
            } else if let Some(plan) = cursor.next_unless(&mut || self.is_closed()) {
                let plan = plan?;
                admission.plans += 1;
                admission.rows_planned += u64::from(plan.rows);
                admission.planned.push_back(plan);
                return Ok(());
            } else if cursor.order().steps() == 0 {
                // An endless pass over nothing would never yield.
                admission.complete = true;
            } else {
                let next = cursor.order().epoch(cursor.current_epoch() + 1)?;
                *cursor = next;
            }
        }
        Ok(())
    }

    /// Lets go of what neither the next batch nor one behind it needs.
    fn let_go(&self, admission: &mut Admission, number: u64) {
        let Some(plan) = admission.planned.front() else { return };
        if admission.epoch != plan.epoch {
            admission.epoch = plan.epoch;
            admission.sequence.keep_from(plan.epoch);
            admission.scatter.keep_from(plan.epoch);
        }
        admission.sequence.release(&plan.released);
        admission.scatter.release(plan.epoch, &plan.released, number);
    }

    fn begin(self: &Arc<Self>, admission: &mut Admission, number: u64, plan: BatchPlan, need: u64) -> Result<()> {
        self.trim(admission);
        let reserved = self.budget.reserve(need);
        let about = About {
            epoch: plan.epoch,
            step: plan.step,
            rows: plan.rows as usize,
            valid: plan.valid as usize,
            after: plan.after,
        };
        let started = match plan.content {
            Content::Runs(runs) => self.start(&mut admission.sequence, number, about, runs, reserved),
            Content::Picks(picks) => self.start(&mut admission.scatter, number, about, picks, reserved),
        };
        let Cost { cost, longest } = started?;
        admission.begun.push_back(Begun {
            number,
            units: admission.sequence.cells(),
            cost,
            longest,
        });
        Ok(())
    }

    /// Prepares what batches that aren't begun will need.
    fn look_ahead(self: &Arc<Self>, admission: &mut Admission) {
        self.trim(admission);
        loop {
            let i = admission.prepared;
            if i == admission.planned.len() && self.should_plan(admission) {
                self.plan(admission);
            }
            let Some(plan) = admission.planned.get(i) else { break };
            let (epoch, number) = (plan.epoch, admission.next + i as u64);
            let prepared = match &plan.content {
                Content::Runs(runs) => self.prepare(&mut admission.sequence, epoch, number, runs),
                Content::Picks(picks) => self.prepare(&mut admission.scatter, epoch, number, picks),
            };
            if !prepared {
                return;
            }
            admission.prepared += 1;
        }
    }

    /// Lets go of free memory beyond the limit: buffers may have what batches leave, and slabs what units leave. The memory of
    /// one batch more may always be kept, since the consumer had it until now.
    fn trim(&self, admission: &Admission) {
        let Some(limit) = self.budget.limit() else { return };
        let bytes = |bytes: u64| Some(usize::try_from(bytes).unwrap_or(usize::MAX));
        let units = admission.sequence.reserved() + admission.scatter.reserved();
        // What batches have reserved for units that end in them is the buffers'.
        let batches = admission.begun.len() as u64 * admission.rows_need;
        let few = (self.threads as u64 + 1) * (admission.need - admission.rows_need);
        self.memory.buffers.keep(bytes(limit.saturating_sub(batches).max(few)));
        self.memory
            .slabs
            .keep(bytes(limit.saturating_sub(units) + admission.need));
    }

    /// Whether to plan one more batch than are planned: a few, but always up to the first batch of the next window.
    fn should_plan(&self, admission: &Admission) -> bool {
        let planned = admission.planned.len() as u64;
        let last = admission.planned.back();
        let window = last.map_or(admission.window, |plan| plan.window.map(|window| (plan.epoch, window)));
        let within = window.is_some() && window == admission.window;
        let waiting = self.fetches.are_needed() && self.fetches.have_room();
        !admission.complete
            && (planned < self.ahead() || (within || waiting) && admission.rows_planned < MOST_ROWS_PLANNED)
    }
}
